"""Checkpoints of a run: one pytree of arrays and one host value, whole or absent.

    <folder>/00000120/
      state/           the arrays, written by Orbax under their paths in the tree
      tree.json        path, shape and dtype of every leaf; what wrote it
      host.<p>.json    the host state of process p (and .npz where it has arrays)
      files.json       name, size and CRC-32 of every file above

A checkpoint is written under `<step>.partial` and renamed when `files.json`, its last
file, is on disk. What is killed half-way is therefore never taken for a checkpoint, and
one of which files went missing or bad later is recognised by the list.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax

from rlpost.training import array_store, host_state, processes
from rlpost.training.array_store import CheckpointError
from rlpost.training.whole import damaged, list_files, remove, write_whole


class Restored(NamedTuple):
    """A checkpoint read back: its step, the state, the host value, and remarks."""

    step: int
    state: Any
    host: Any
    notes: list[str]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: where they lie; all processes must reach it.
        keep: how many of the newest to keep, at least 1.
        every: keep for good those whose step is a multiple of it; 0 keeps none so.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, keep: int = 2, every: int = 0
    ):
        if keep < 1 or every < 0:
            raise ValueError(
                f"keep={keep} must be at least 1, every={every} at least 0"
            )
        self.folder = Path(folder).absolute()
        self.keep = keep
        self.every = every

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, whole or damaged, oldest first."""
        if not self.folder.is_dir():
            return []
        names = (entry.name for entry in self.folder.iterdir())
        return sorted(int(name) for name in names if name.isdecimal())

    def check(self, state: Any, host: Any = None) -> None:
        """Raise the ValueError that saving them would raise."""
        array_store.leaves_of(state)
        host_state.encode(host)

    def save(self, step: int, state: Any, host: Any = None) -> None:
        """Write the checkpoint of `step`, then remove those that need not be kept.

        All processes of a run call it together.

        Args:
            step: updates done so far.
            state: a pytree of arrays (typed keys included).
            host: this process's host value; see `rlpost.training.host_state`.

        Raises:
            CheckpointError: if it cannot be written, a full disk say. The half-written
                one is removed, the older ones are as they were, and saving again is
                possible.
            ValueError: if the state holds something else than arrays, or the host
                value something that would not come back as it is.
        """
        names, leaves = array_store.leaves_of(state)
        encoded = host_state.encode(host)
        partial = self.folder / f"{step:08d}.partial"
        problem: Exception | None = None
        try:
            if processes.is_first():
                remove(partial)
                partial.mkdir(parents=True)
            processes.barrier(f"rlpost save {step}")
            host_state.write(partial / f"host.{jax.process_index()}", encoded)
            array_store.write(partial / "state", names, leaves)
            if processes.is_first():
                tree = {
                    "written_by": array_store.environment(),
                    "leaves": array_store.describe(names, leaves),
                }
                (partial / "tree.json").write_text(json.dumps(tree, indent=1))
        except Exception as error:  # Orbax reports a full disk as a ValueError
            problem = error
        # Nobody lists files before all are written, or commits before all are listed.
        failed = processes.any_of(problem is not None)
        if not failed:
            try:
                list_files(partial)
            except OSError as error:
                problem = error
            failed = processes.any_of(problem is not None)
        if not failed and processes.is_first():
            try:
                self._commit(partial, step)
            except OSError as error:
                problem = error
        if processes.any_of(failed or problem is not None):
            if processes.is_first():
                shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(
                f"step {step} could not be saved in {self.folder}: "
                f"{array_store.reason(problem)}; older checkpoints are untouched"
            ) from problem

    def restore(self, like: Any) -> Restored | None:
        """The newest whole checkpoint, on the shardings of `like`; None if none is.

        Args:
            like: a pytree of the state's structure: arrays, or `jax.ShapeDtypeStruct`
                with shardings where two copies of the state would not fit.

        Raises:
            CheckpointError: if there are checkpoints and none is whole, or if the tree
                differs from `like`: the message names paths, expected and found.
        """
        notes: list[str] = []
        steps = self.steps()
        step = processes.from_first(steps.pop() if steps else -1)
        while step >= 0:
            damage = damaged(self._at(step))
            if not processes.any_of(damage is not None):
                break
            damage = damage or "another process found it so"
            notes.append(f"the checkpoint of step {step} is damaged: {damage}")
            step = processes.from_first(steps.pop() if steps else -1)
        if step < 0 and notes:
            raise CheckpointError(
                f"no checkpoint in {self.folder} is whole:\n  "
                + "\n  ".join(notes)
                + "\nput the missing files back, or remove the folder to start anew"
            )
        if step < 0:
            return None
        if notes:
            notes.append(f"went back to the checkpoint of step {step}")
        folder = self._at(step)
        tree = json.loads((folder / "tree.json").read_text())
        state = array_store.read(folder, tree["leaves"], like)
        if tree["written_by"] != array_store.environment():
            notes.append(
                f"the checkpoint was written by {tree['written_by']}, this is "
                f"{array_store.environment()}: the run goes on, but not bit for bit"
            )
        mine = folder / f"host.{jax.process_index()}"
        if not mine.with_name(mine.name + ".json").exists():
            raise CheckpointError(
                f"{folder} has no host state of process {jax.process_index()}: resume "
                "with as many processes as wrote it"
            )
        return Restored(step, state, host_state.read(mine), notes)

    def _at(self, step: int) -> Path:
        return self.folder / f"{step:08d}"

    def _commit(self, partial: Path, step: int) -> None:
        files: dict[str, Any] = {}
        for listed in sorted(partial.glob("list.*.json")):
            files |= json.loads(listed.read_text())
            listed.unlink()
        write_whole(partial / "files.json", json.dumps(files, indent=1))
        remove(self._at(step))
        os.rename(partial, self._at(step))
        # A later step is a damaged one that the run went back from: it counts for none.
        steps = [old for old in self.steps() if old <= step]
        for old in steps[: -self.keep]:
            if not (self.every and old % self.every == 0):
                remove(self._at(old))
        for left in self.folder.glob("*.deleted"):
            shutil.rmtree(left, ignore_errors=True)
