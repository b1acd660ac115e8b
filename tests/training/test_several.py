import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from rlpost.training.metrics import read, without_clock
from rlpost.training.workdir import Workdir
from tests.training import several_online

pytestmark = pytest.mark.slow
STEPS = 8


def start(*arguments, module="tests.training.several"):
    """Two processes of two devices each, that make up one run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                module,
                address,
                "2",
                str(i),
                *map(str, arguments),
            ],
            cwd=Path(__file__).parents[2],
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for i in range(2)
    ]


def finish(processes):
    outputs = [p.communicate(timeout=120)[0] for p in processes]
    return [p.returncode for p in processes], outputs


def lines(folder):
    return [without_clock(line) for line in read(folder / "metrics.jsonl")]


def test_a_signal_to_one_process_stops_both_and_the_run_goes_on_the_same(tmp_path):
    codes, outputs = finish(start(tmp_path / "whole", STEPS, 0))
    assert codes == [0, 0], outputs
    processes = start(tmp_path / "run", STEPS, 0.3)
    while "update 1/" not in processes[0].stdout.readline():
        pass
    processes[1].send_signal(signal.SIGTERM)  # not to the one that saves
    codes, outputs = finish(processes)
    assert codes == [75, 75], outputs
    assert "a signal elsewhere after update" in outputs[0]
    assert "update" not in outputs[1].replace("after update", "")  # one display
    codes, outputs = finish(start(tmp_path / "run", STEPS, 0))
    assert codes == [0, 0], outputs
    assert "resumed after update" in outputs[0]
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")
    # And killed, both at once.
    processes = start(tmp_path / "killed", STEPS, 0.3)
    while "update 1/" not in processes[0].stdout.readline():
        pass
    for process in processes:
        process.kill()
    finish(processes)
    codes, outputs = finish(start(tmp_path / "killed", STEPS, 0))
    assert codes == [0, 0], outputs
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")


def test_a_folder_in_use_is_refused_by_all_processes(tmp_path):
    with Workdir(tmp_path / "run"):
        codes, outputs = finish(start(tmp_path / "run", STEPS, 0))
    assert codes == [1, 1]
    assert "in use by process" in outputs[0]
    assert "the first process refused" in outputs[1]


def test_an_online_run_is_the_same_on_one_process_and_on_two():
    codes, outputs = finish(start(module="tests.training.several_online"))
    assert codes == [0, 0], outputs
    told = [re.search(r"^told (.*)$", o, re.M).group(1) for o in outputs]
    assert told[0] == told[1]  # also the rewards, which each draws differently
    expected = several_online.tell(jax.devices()[:4])
    for name, value in json.loads(told[0]).items():
        assert value == pytest.approx(expected[name], abs=1e-5), name
