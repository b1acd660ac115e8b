"""Rewards that misbehave on request: the response says how."""

import ctypes
import os
import subprocess
import sys
import time

import numpy as np

from rlpost.rewards import Parts, Sample


def reward(samples: list[Sample]) -> Parts:
    """The response read as a number, unless it names a way to fail."""
    return {"value": np.array([one(sample.text) for sample in samples], np.float32)}


def one(text: str) -> float:
    kind, _, rest = text.partition(" ")
    if kind == "raise":
        raise KeyError(f"no such key {rest}")
    if kind == "hang":
        time.sleep(1000)
    if kind == "hang-in-c":  # holds the interpreter's lock all the while
        ctypes.PyDLL(None).sleep(1000)
    if kind == "die":
        os._exit(7)
    if kind == "children":  # a child that would outlive its parent
        child = subprocess.Popen(
            [sys.executable, "-c", "import time; time.sleep(1000)"]
        )
        with open(rest, "w") as file:
            file.write(str(child.pid))
        time.sleep(1000)
    if kind == "print":
        print('{"parts": {"value": [99]}}')
        print("noise", file=sys.stderr)
        return float(len(sys.stdin.read()))
    if kind == "sleep":
        time.sleep(float(rest))
        return 1.0
    if kind == "pid":
        return float(os.getpid())
    if kind == "jax":
        return float("jax" in sys.modules)
    return float(text)


def shapes(samples: list[Sample]):
    """Wrong returns of many kinds."""
    return {
        "none": None,
        "list": [1.0],
        "long": {"value": np.zeros(2)},
        "scalar": {"value": 1.0},
        "text": {"value": ["x"]},
        "inf": {"value": [np.inf]},
        "nan": {"value": [np.nan]},
        "missing": {"value": [None]},
        "empty": {},
        "two": {"a": [0.0], "b": [0.0]},
        "fine": {"value": [2.0]},
    }[samples[0].text]


def scaled(scale: float):
    """A factory."""

    def made(samples: list[Sample]) -> Parts:
        return {"value": np.array([scale * len(s.text) for s in samples], np.float32)}

    return made


def rank(samples: list[Sample]) -> Parts:
    """Compares the samples of a batch: how many are shorter."""
    sizes = np.array([len(sample.text) for sample in samples])
    return {"rank": np.sum(sizes[:, None] > sizes, axis=1).astype(np.float32)}


def never(samples: list[Sample]) -> Parts:
    """Raises, always."""
    raise RuntimeError("the judge is not there")
