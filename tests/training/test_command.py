import json
import signal

import jax.numpy as jnp
import pytest

from rlpost.training.command import main
from rlpost.training.config import check_read
from rlpost.training.guards import GuardError
from rlpost.training.loop import Report, run
from rlpost.training.progress import Progress

FILE = """
import ml_collections

def get_config(variant="small"):
    config = ml_collections.ConfigDict()
    config.steps = 3  # updates in all
    config.rate = 0.5
    config.end = "well"
    config.unused = ml_collections.config_dict.placeholder(int)
    return config
"""


def entry(config, workdir):
    """Counts up to `steps`, and ends as `end` says."""
    rate, end, steps = config.rate, config.end, config.steps
    if end != "unread":
        assert config.unused is None
    check_read(config)

    def iterate(state, step):
        if end == "signal" and step == 1:
            signal.raise_signal(signal.SIGTERM)
        if end == "guard":
            raise GuardError("a guard fell")
        if end == "bug":
            raise ZeroDivisionError
        return state + rate, Report({"n": state})

    run(
        iterate,
        jnp.zeros(()),
        steps=steps,
        workdir=workdir,
        progress=Progress(steps, live=False),
    )


@pytest.fixture
def command(tmp_path):
    (tmp_path / "x.py").write_text(FILE)
    return main(entry, "Counts.\n\nCosts nothing.", f"{tmp_path}/x.py:small")


def code(command, *argv):
    try:
        command(argv)
    except SystemExit as leaving:
        return leaving.code
    return 0


def test_a_run_writes_its_config_and_resumes_with_it_alone(command, tmp_path, capsys):
    folder = f"--workdir={tmp_path}/run"
    assert code(command, folder, "--config.rate=2") == 0
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved == {"steps": 3, "rate": 2.0, "end": "well", "unused": None}
    assert f"run folder: {tmp_path}/run" in capsys.readouterr().out
    assert code(command, folder, "--config.steps=5", "--config.rate=2") == 1
    assert "steps: was 3, is 5" in capsys.readouterr().err
    longer = [folder, "--config.steps=5", "--config.rate=2", "--change_config"]
    assert code(command, *longer) == 0
    assert "resumed after update 3 of 5" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv, expected, said",
    [
        (["--config.step=5"], 2, "did you mean steps"),
        (["--confg=x.py"], 2, "confg"),
        (["--config=absent.py"], 2, "there is no config file absent.py"),
        (
            ["--config.end=unread"],
            2,
            "never read and would change nothing: config.unused",
        ),
        (["stray"], 2, "stray"),
        (["--distributed=1,2"], 2, "must be auto or host:port,count,index"),
        (["--config.end=guard"], 1, "a guard fell\nat update 1"),
        (["--config.end=signal"], 75, "SIGTERM after update 2 of 3: saved"),
    ],
)
def test_each_end_has_its_code_and_says_why(
    command, tmp_path, capsys, argv, expected, said
):
    assert code(command, f"--workdir={tmp_path}/run", *argv) == expected
    told = capsys.readouterr()
    assert said in told.out + told.err
    assert "Traceback" not in told.err


def test_a_bug_keeps_its_traceback(command, tmp_path):
    with pytest.raises(ZeroDivisionError):
        command([f"--workdir={tmp_path}/run", "--config.end=bug"])


def test_without_a_folder_a_new_one_is_made(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert code(command) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("x-small-2")


def test_help_shows_the_experiment_its_flags_and_keys(command, capsys):
    assert code(command, "--help") == 0
    text = capsys.readouterr().out
    assert text.startswith("Counts.\n\nCosts nothing.")
    for part in (
        "--workdir",
        "--change_config",
        "75 stopped by a signal",
        "--config.steps=3  # updates in all",
        "--config.rate=0.5",
    ):
        assert part in text
