import os
import signal
import subprocess
import sys

import pytest

from rlpost.training.workdir import Workdir, WorkdirError

HOLD = """
import os, sys, time
from rlpost.training.workdir import Workdir
folder = Workdir(sys.argv[1])
if os.fork() == 0:  # a child that outlives its parent must not keep the folder
    time.sleep(60)
    os._exit(0)
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_run_on_the_folder_is_refused_until_the_first_is_gone(tmp_path):
    first = Workdir(tmp_path / "run")
    with pytest.raises(WorkdirError, match=f"in use by process {os.getpid()}"):
        Workdir(tmp_path / "run")
    first.close()
    Workdir(tmp_path / "run").close()


def test_a_killed_process_leaves_no_lock(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "run")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(WorkdirError, match=f"process {process.pid} on "):
            Workdir(tmp_path / "run")
        process.kill()
        process.wait()
        Workdir(tmp_path / "run").close()  # though the forked child still sleeps
    finally:
        os.killpg(process.pid, signal.SIGKILL)


def test_another_config_is_refused_by_the_names_of_its_keys(tmp_path):
    before = {"steps": 10, "model": {"depth": 2, "width": 64}, "clip": (0.2, 0.2)}
    now = {"steps": 10, "model": {"depth": 3, "heads": 4}, "clip": (0.2, 0.3)}
    with Workdir(tmp_path / "run") as folder:
        folder.record("config", before)
    with Workdir(tmp_path / "run") as folder:
        folder.record("config", before)
        with pytest.raises(WorkdirError) as raised:
            folder.record("config", now)
    message = str(raised.value)
    assert "model.depth: was 2, is 3" in message
    assert "model.width: was 64, is gone" in message
    assert "model.heads: is new, 4" in message
    assert "clip: was [0.2, 0.2], is [0.2, 0.3]" in message
    assert "steps" not in message
    with Workdir(tmp_path / "run", change_config=True) as folder:
        folder.record("config", now)
        assert folder.read_json("config.json")["model"] == {"depth": 3, "heads": 4}


def test_one_is_not_one_point_zero_nor_true(tmp_path):
    with Workdir(tmp_path / "run") as folder:
        folder.record("config", {"a": 1})
        for other in (1.0, True):
            with pytest.raises(WorkdirError, match="a: was 1, is"):
                folder.record("config", {"a": other})


def test_a_function_among_the_choices_is_the_same_in_the_next_process(tmp_path):
    # Its repr ends in an address, which differs from process to process.
    with Workdir(tmp_path / "run") as folder:
        folder.record("choices", {"aggregate": lambda x: x})
        first = folder.read_json("choices.json")
        folder.record("choices", {"aggregate": lambda x: x})
        assert folder.read_json("choices.json") == first
        assert " at 0x" not in first["aggregate"]
        with pytest.raises(WorkdirError, match="aggregate: was"):
            folder.record("choices", {"aggregate": len})


def test_a_folder_of_something_else_and_a_file_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(WorkdirError, match="not the folder of a run: it holds notes"):
        Workdir(tmp_path)
    with pytest.raises(WorkdirError, match="is a file"):
        Workdir(tmp_path / "notes.txt")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt"]


def test_a_broken_config_is_named(tmp_path):
    with Workdir(tmp_path / "run") as folder:
        (folder.path / "config.json").write_text('{"a": ')
        with pytest.raises(WorkdirError, match=r"config\.json is not readable JSON"):
            folder.record("config", {"a": 1})
