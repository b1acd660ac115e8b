"""What a run writes down: JSON lines, and the same numbers as TensorBoard events.

    metrics.jsonl   {"step", "time", "kind": "train" | "eval", "reward/mean": ..., ...}
    samples.jsonl   {"step", "time", "kind", ...} what the model said
    errors.jsonl    {"step", "time", "kind", "message", ...}

`step` is the number of updates done, `time` seconds since the run began, over all its
resumes. A number that is not finite is null, and `nonfinite` counts those of the line.
On resume all three are cut back to the checkpoint, and the event files made anew from
what remains, so that a run that was killed ends with the lines of one that was not.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlpost.training import processes
from rlpost.training.workdir import Workdir, WorkdirError
from rlpost.types import Mean

# Keys that tell how fast a run was, not what it did.
CLOCK = ("time", "speed/")
FLUSH_SECONDS = 5.0  # of the event files, which TensorBoard polls anyway


class RunLog:
    """The writers of one run; all but the first process write nothing.

    Args:
        workdir: where.
        step: the step that the run starts or goes on from; lines beyond it are cut. -1
            for a new run: no line stays.
        elapsed: seconds that the run had already taken.
        tensorboard: also write event files.
    """

    def __init__(
        self,
        workdir: Workdir,
        *,
        step: int = -1,
        elapsed: float = 0.0,
        tensorboard: bool = True,
    ):
        self._start = time.monotonic() - elapsed
        self._files: dict[Path, Any] = {}
        self._events: Any = None
        self._flushed = time.monotonic()
        self._workdir = workdir
        if not processes.is_first():
            return
        for path in (workdir.metrics, workdir.samples, workdir.errors):
            cut(path, step)
            # Line buffered: a killed process loses at most the line it was writing.
            self._files[path] = open(path, "a", buffering=1)  # noqa: SIM115
        if tensorboard:
            self._events = _rebuild(workdir, time.time() - elapsed)

    @property
    def elapsed(self) -> float:
        """Seconds that the run has taken, over all its resumes."""
        return time.monotonic() - self._start

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Write a line of metrics.

        Args:
            step: updates done.
            kind: "train" or "eval".
            values: numbers, scalar arrays or `Mean`s, replicated over processes.

        Returns:
            The line as written, on every process.
        """
        line = {"step": step, "time": round(self.elapsed, 3), "kind": kind}
        line |= numbers(values)
        self._append(self._workdir.metrics, [line])
        if self._events is not None:
            with _writing(self._workdir.tensorboard):
                _add_event(self._events, line, time.time())
                if time.monotonic() - self._flushed > FLUSH_SECONDS:
                    self._flushed = time.monotonic()
                    self._events.flush()
        return line

    def samples(
        self, step: int, kind: str, samples: Iterable[Mapping[str, Any]]
    ) -> None:
        """Write what the model said, a line each."""
        start = {"step": step, "time": round(self.elapsed, 3), "kind": kind}
        self._append(self._workdir.samples, [start | plain(s) for s in samples])

    def error(self, step: int, kind: str, message: str, **more: Any) -> None:
        """Write down something that went wrong, in one line."""
        line = {"step": step, "time": round(self.elapsed, 3), "kind": kind}
        self._append(self._workdir.errors, [line | {"message": message} | plain(more)])

    def sync(self) -> None:
        """Have all lines on disk: done before a checkpoint that counts on them."""
        with _writing(self._workdir.path):
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            if self._events is not None:
                self._events.flush()

    def close(self) -> None:
        """Close the files."""
        files = [*self._files.values(), *([self._events] if self._events else [])]
        self._files, self._events = {}, None
        for file in files:
            # What a full disk kept from being written was raised when it happened.
            with suppress(OSError):
                file.close()

    def _append(self, path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
        if path in self._files:
            with _writing(path):
                for line in lines:
                    self._files[path].write(json.dumps(line) + "\n")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise WorkdirError(
            f"{path} cannot be written: {error}; the last checkpoint stands, and the "
            "same command goes on from there"
        ) from error


def numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Plain numbers of a metrics mapping; None and a count where one is not finite.

    Raises:
        ValueError: naming a metric that is not one number, or has a reserved name.
    """
    taken = {"step", "time", "kind", "nonfinite"} & set(values)
    if taken:
        raise ValueError(f"a metric cannot be named {', '.join(sorted(taken))}")
    values = {k: v.value if isinstance(v, Mean) else v for k, v in values.items()}
    line: dict[str, Any] = {}
    nonfinite = 0
    fetched = jax.device_get(values)  # in one go; sorted by name, unlike `values`
    for key in values:
        value = fetched[key]
        if np.size(value) != 1:
            raise ValueError(f"metric {key} must be one number, got {np.shape(value)}")
        number = np.asarray(value).reshape(()).item()
        if isinstance(number, float) and not math.isfinite(number):
            nonfinite += 1
            number = None
        line[key] = number
    return line | ({"nonfinite": nonfinite} if nonfinite else {})


def plain(value: Any) -> Any:
    """The value as strict JSON: arrays become lists, what is not finite null."""
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return plain(np.asarray(value).tolist())
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)


def without_clock(line: Mapping[str, Any]) -> dict[str, Any]:
    """A line without what depends on the speed of the machine: two runs compare so."""
    return {k: v for k, v in line.items() if not k.startswith(CLOCK)}


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of a JSON lines file; a last, half-written one is left out."""
    path = Path(path)
    if not path.exists():
        return []
    lines = []
    with open(path, "rb") as file:
        for raw in file:
            line = _parse(raw)
            if line is None:
                break
            lines.append(line)
    return lines


def cut(path: Path, step: int) -> None:
    """Cut a file back to its lines of steps up to `step`; the steps never decrease."""
    if not path.exists():
        return
    end = 0
    with open(path, "rb") as file:
        for raw in file:
            line = _parse(raw)
            if line is None or line["step"] > step:
                break
            end += len(raw)
    os.truncate(path, end)


def _parse(raw: bytes) -> dict[str, Any] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        line = json.loads(raw)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "step" in line else None


def _rebuild(workdir: Workdir, began: float) -> Any:
    """One event file with the lines of metrics.jsonl, open for more."""
    from tensorboardX.event_file_writer import EventsWriter

    workdir.tensorboard.mkdir(exist_ok=True)
    for old in workdir.tensorboard.glob("events.out.tfevents.*"):
        old.unlink()
    # The writer makes the rest of the name, which TensorBoard recognises it by.
    writer = EventsWriter(str(workdir.tensorboard / "events"))
    for line in read(workdir.metrics):
        _add_event(writer, line, began + line["time"])
    writer.flush()
    return writer


def _add_event(writer: Any, line: Mapping[str, Any], wall_time: float) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    values = [
        Summary.Value(tag=_tag(line["kind"], key), simple_value=float(number))
        for key, number in line.items()
        if key not in ("step", "time", "kind") and number is not None
    ]
    event = Event(step=line["step"], wall_time=wall_time)
    event.summary.CopyFrom(Summary(value=values))
    writer.write_event(event)


def _tag(kind: str, key: str) -> str:
    return key if key.startswith(f"{kind}/") else f"{kind}/{key}"
