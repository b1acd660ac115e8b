"""The first experiment as it is used: by its command; killed, stopped, resumed."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from experiments import grpo
from rlpost.training.checkpoints import Checkpoints
from rlpost.training.config import reload
from rlpost.training.metrics import read, without_clock
from rlpost.training.online import online

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[2]
STEPS = 12
# Lessons enough for some answers to be right, so that there is something to learn.
CHANGES = (
    f"--config.steps={STEPS}",
    "--config.pretrain.steps=60",
    "--config.evaluation.every=5",
)


def start(folder, changes=CHANGES):
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "experiments.grpo"),
            *("--config=configs/grpo.py:smoke", f"--workdir={folder}", *changes),
        ],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def end(process):
    output = process.communicate(timeout=120)[0]
    return process.returncode, output


def newest(metrics):
    """The last update that has a line."""
    return max((x["step"] for x in read(metrics)), default=0) if metrics.exists() else 0


def await_update(process, metrics, step):
    """Wait until the line of an update is written, or the process has ended."""
    while process.poll() is None and newest(metrics) < step:
        time.sleep(0.002)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nobody disturbs."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    code, output = end(start(folder))
    assert code == 0, output
    return folder, output


def final(folder):
    """Arrays and host state of the last checkpoint, the clock aside."""
    program = online(grpo.build(reload(folder / "config.json")))
    found = Checkpoints(folder / "checkpoints").restore(program.state)
    assert found.step == STEPS
    assert not found.notes
    leaves = [np.asarray(x) for x in jax.tree.leaves(found.state)]
    return [(x.dtype, x.shape, x.tobytes()) for x in leaves], found.host["structures"]


def lines(path):
    return [without_clock(line) for line in read(path)]


def assert_same(folder, other):
    assert final(folder) == final(other)
    for name in ("metrics.jsonl", "samples.jsonl", "pretrain/metrics.jsonl"):
        assert lines(folder / name) == lines(other / name), name


def test_the_command_runs_to_its_page(whole):
    folder, output = whole
    assert f"update {STEPS}/{STEPS}" in output
    assert "response: " in output
    train = [x for x in read(folder / "metrics.jsonl") if x["kind"] == "train"]
    assert [line["step"] for line in train] == list(range(1, STEPS + 1))
    # It learned from something: without a signal a resumed run would show little.
    assert sum(line["gradient/norm"] > 0 for line in train) >= 3
    evaluated = [x for x in read(folder / "metrics.jsonl") if x["kind"] == "eval"]
    assert [line["step"] for line in evaluated] == [0, 5, 10, 12]
    assert all(0 <= x["eval/pass@1"] <= 1 for x in evaluated)
    samples = list(read(folder / "samples.jsonl"))
    assert {"prompt", "response", "reward", "tokens"} <= set(samples[-1]) | set(
        samples[len(samples) // 2]
    )
    choices = json.loads((folder / "choices.json").read_text())
    assert choices["experiment"] == "grpo"
    assert choices["objective"]["clip"] == [0.2, 0.2]
    page = (folder / "report.html").read_text()
    assert "eval/pass@1" in page
    assert not (folder / "errors.jsonl").read_text()


def test_a_finished_run_given_again_does_nothing_more(whole):
    folder, _ = whole
    before = [os.stat(p).st_mtime_ns for p in (folder / "checkpoints").iterdir()]
    code, output = end(start(folder))
    assert code == 0
    assert f"resumed after update {STEPS} of {STEPS}" in output
    after = [os.stat(p).st_mtime_ns for p in (folder / "checkpoints").iterdir()]
    assert before == after


def test_killed_at_random_moments_it_ends_the_same(whole, tmp_path):
    folder, draw = tmp_path / "run", random.Random(0)
    killed = []
    # One in the lessons, four in the updates; the start, mostly compiling, is waited
    # out, so that each life gets somewhere.
    for name in ("pretrain/metrics.jsonl", *4 * ["metrics.jsonl"]):
        at = newest(folder / name)
        process = start(folder)
        await_update(process, folder / name, at + 1)
        time.sleep(draw.uniform(0.0, 0.3))
        process.send_signal(signal.SIGKILL)
        code, output = end(process)
        assert code in (-signal.SIGKILL, 0), output
        killed.append((code, newest(folder / name)))
    assert sum(code != 0 for code, _ in killed) >= 4, killed
    code, output = end(start(folder))
    assert code == 0, output
    assert_same(folder, whole[0])


def test_stopped_by_a_signal_it_saves_and_goes_on(whole, tmp_path):
    folder = tmp_path / "run"
    process = start(folder, (*CHANGES, "--config.save_every=5"))
    await_update(process, folder / "metrics.jsonl", 1)
    process.send_signal(signal.SIGTERM)
    code, output = end(process)
    assert code == 75, output
    assert "SIGTERM after update" in output
    assert "saved, the same command goes on" in output
    step = json.loads((folder / "saved.json").read_text())["step"]
    assert (folder / "checkpoints" / f"{step:08d}").is_dir()
    assert 1 <= step < STEPS
    code, output = end(start(folder, (*CHANGES, "--config.save_every=5")))
    assert code == 0, output
    assert f"resumed after update {step} of {STEPS}" in output
    assert_same(folder, whole[0])
