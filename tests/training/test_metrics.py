import json
import math

import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from rlpost.training.metrics import RunLog, cut, numbers, plain, read, without_clock
from rlpost.training.workdir import Workdir, WorkdirError
from rlpost.types import Mean


def events(folder):
    """{tag: [(step, value)]} of all event files, read record by record."""
    found = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        content, at = path.read_bytes(), 0
        while at < len(content):
            length = int.from_bytes(content[at : at + 8], "little")
            event = Event.FromString(content[at + 12 : at + 12 + length])
            at += 16 + length  # length and its checksum, the record and its checksum
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_lines_and_events_hold_the_same_numbers(tmp_path):
    with Workdir(tmp_path / "run") as folder:
        log = RunLog(folder)
        mean = Mean(jnp.array(3.0), jnp.array(4.0))
        line = log.write(1, "train", {"loss": jnp.float32(0.5), "reward/mean": mean})
        log.write(2, "eval", {"accuracy": 0.25, "count": np.int64(7)})
        log.close()
        assert list(line) == ["step", "time", "kind", "loss", "reward/mean"]
        assert [without_clock(x) for x in read(folder.metrics)] == [
            {"step": 1, "kind": "train", "loss": 0.5, "reward/mean": 0.75},
            {"step": 2, "kind": "eval", "accuracy": 0.25, "count": 7},
        ]
        assert events(folder.tensorboard) == {
            "train/loss": [(1, 0.5)],
            "train/reward/mean": [(1, 0.75)],
            "eval/accuracy": [(2, 0.25)],
            "eval/count": [(2, 7.0)],
        }


def test_what_is_not_finite_is_null_and_counted(tmp_path):
    values = {"loss": math.nan, "kl": jnp.inf, "entropy": 1.0}
    line = numbers(values)
    assert line == {"loss": None, "kl": None, "entropy": 1.0, "nonfinite": 2}
    with Workdir(tmp_path / "run") as folder:
        log = RunLog(folder)
        log.write(1, "train", values)
        log.samples(1, "train", [{"logp": np.array([0.5, -np.inf]), "reward": np.nan}])
        log.close()
        for path in (folder.metrics, folder.samples):
            text = path.read_text()
            assert "NaN" not in text
            assert "Infinity" not in text
        assert read(folder.samples)[0]["logp"] == [0.5, None]
        assert list(events(folder.tensorboard)) == ["train/entropy", "train/nonfinite"]


def test_a_metric_is_one_number_with_a_name_of_its_own():
    with pytest.raises(ValueError, match=r"metric loss must be one number, got \(2,\)"):
        numbers({"loss": jnp.zeros(2)})
    with pytest.raises(ValueError, match="cannot be named step"):
        numbers({"step": 1})


def test_a_resumed_log_is_cut_back_to_the_checkpoint(tmp_path):
    with Workdir(tmp_path / "run") as folder:
        log = RunLog(folder)
        for step in range(1, 6):
            log.write(step, "train", {"loss": float(step)})
            log.samples(step, "train", [{"text": str(step)}])
            log.error(step, "reward", "it hung", prompt="p")
        log.close()
        with open(folder.metrics, "a") as file:
            file.write('{"step": 6, "lo')  # the line that a kill cut short
        log = RunLog(folder, step=3, elapsed=100.0)
        assert [x["step"] for x in read(folder.metrics)] == [1, 2, 3]
        assert [x["step"] for x in read(folder.samples)] == [1, 2, 3]
        assert [x["step"] for x in read(folder.errors)] == [1, 2, 3]
        log.write(4, "train", {"loss": 40.0})
        log.close()
        losses = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
        assert [(x["step"], x["loss"]) for x in read(folder.metrics)] == losses
        assert events(folder.tensorboard) == {"train/loss": losses}
        assert read(folder.metrics)[-1]["time"] >= 100.0


def test_a_new_run_keeps_no_line_and_a_cut_without_need_changes_no_byte(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps({"step": s}) + "\n" for s in (0, 1, 1, 2)))
    before = path.read_bytes()
    cut(path, 2)
    assert path.read_bytes() == before
    cut(path, 1)
    assert [x["step"] for x in read(path)] == [0, 1, 1]
    cut(path, -1)
    assert path.read_bytes() == b""
    cut(tmp_path / "absent", 3)


def test_a_full_disk_is_named(tmp_path):
    with Workdir(tmp_path / "run") as folder:
        log = RunLog(folder, tensorboard=False)
        log._files[folder.metrics] = open("/dev/full", "a", buffering=1)  # noqa: SIM115
        with pytest.raises(WorkdirError, match=r"cannot be written: .*No space left"):
            log.write(1, "train", {"loss": 1.0})
        log.close()


def test_plain_makes_anything_strict_json():
    value = {1: (np.float32(0.5), jnp.arange(2)), "f": math.inf, "o": object}
    assert plain(value) == {"1": [0.5, [0, 1]], "f": None, "o": "<class 'object'>"}
