"""The folder of one run: its lock, its config, and where everything lies.

config.json      the resolved config
choices.json     the choices that the experiment bound (defaults included)
metrics.jsonl    a line per logged step; samples.jsonl, errors.jsonl beside it
tensorboard/     the same numbers as event files
checkpoints/     see `rlpost.training.checkpoints`
saved.json       the step of the newest checkpoint
lock             held, by the kernel, as long as the process lives
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlpost.training import processes
from rlpost.training.whole import write_whole


class WorkdirError(RuntimeError):
    """The run folder is in use, is not one, or belongs to another config."""


class Workdir:
    """A run folder, made if absent and locked against a second run.

    The lock is the kernel's (flock): a killed process leaves none behind. With several
    processes the first one locks and the others rely on it.

    Args:
        path: the folder, shared by all processes of a run.
        change_config: accept a config or choices other than those of the run that is
            resumed.

    Raises:
        WorkdirError: if another run holds the folder, or it holds something else.
    """

    def __init__(self, path: str | os.PathLike[str], *, change_config: bool = False):
        self.path = Path(path).expanduser().absolute()
        self.change_config = change_config
        self._lock: int | None = None
        problem = self._open() if processes.is_first() else None
        # Without this the other processes would wait for a first one that has left.
        failed = processes.any_of(problem is not None)
        if failed:
            raise WorkdirError(problem or f"the first process refused {self.path}")

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def errors(self) -> Path:
        return self.path / "errors.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def dumps(self) -> Path:
        """Batches that gave a non-finite step."""
        return self.path / "dumps"

    def record(self, name: str, values: Mapping[str, Any]) -> None:
        """Write `<name>.json`, or compare with what the run was started with.

        Args:
            name: "config" or "choices".
            values: JSON-able, by key; nested mappings are compared key by key.

        Raises:
            WorkdirError: if they differ and `change_config` was not asked for; the
                message names each key, what it was and what it is.
        """
        if not processes.is_first():
            return
        values = _plain(values)
        before = self.read_json(f"{name}.json")
        if before is not None and not self.change_config:
            changed = differences(before, values)
            if changed:
                raise WorkdirError(
                    f"{self.path} holds a run with another {name}:\n  "
                    + "\n  ".join(changed)
                    + "\nuse another folder for a new run, or ask to change the "
                    "config of this one (--change_config)"
                )
        self.write_json(f"{name}.json", values)

    def read_json(self, name: str) -> Any:
        """The content of a JSON file of the folder; None where there is none."""
        path = self.path / name
        if not path.exists():
            return None
        try:
            return json.loads(path.read_text())
        except ValueError as error:
            raise WorkdirError(f"{path} is not readable JSON: {error}") from error

    def write_json(self, name: str, values: Any) -> None:
        """Write a JSON file of the folder: the whole of it or nothing."""
        write_whole(self.path / name, json.dumps(values, indent=1) + "\n")

    def close(self) -> None:
        """Give the folder back; a closed or lost Workdir does so by itself."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> Workdir:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _open(self) -> str | None:
        """Make and lock the folder; what is wrong, if something is."""
        if self.path.exists():
            if not self.path.is_dir():
                return f"{self.path} is a file: give a folder for the run"
            content = sorted(entry.name for entry in self.path.iterdir())
            if content and not {"lock", "config.json"} & set(content):
                return (
                    f"{self.path} is not the folder of a run: it holds "
                    f"{', '.join(content[:5])}; give a new or an empty folder"
                )
        self.path.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(lock, 200, 0).decode(errors="replace").strip()
            os.close(lock)
            return (
                f"{self.path} is in use by {holder or 'another process'}: wait for it, "
                "end it, or use another folder"
            )
        os.ftruncate(lock, 0)
        os.pwrite(
            lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0
        )
        self._lock = lock
        # A forked child (a reward worker, say) shares the open file and with it the
        # lock: it would hold the folder after its parent was killed.
        itself = weakref.ref(self)

        def release() -> None:
            held = itself()
            if held is not None:
                held.close()

        os.register_at_fork(after_in_child=release)
        return None


def differences(before: Any, now: Any, at: str = "") -> list[str]:
    """One line for each key of nested mappings that was added, removed or changed."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        lines = []
        for key in sorted(set(before) | set(now), key=str):
            here = f"{at}.{key}" if at else str(key)
            if key not in now:
                lines.append(f"{here}: was {before[key]!r}, is gone")
            elif key not in before:
                lines.append(f"{here}: is new, {now[key]!r}")
            else:
                lines += differences(before[key], now[key], here)
        return lines
    # As text: 1, 1.0 and True are equal in Python, and not the same hyperparameter.
    if json.dumps(before) == json.dumps(now):
        return []
    return [f"{at}: was {before!r}, is {now!r}"]


def _plain(values: Any) -> Any:
    """As it reads back from JSON, without the addresses in a function's repr."""
    text = json.dumps(values, default=repr)
    return json.loads(re.sub(r" at 0x[0-9a-f]+", "", text))
