"""The order in which tasks are met: shuffled, sharded, and resumed exactly."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rlpost.data.task import Source, Task


class Prompts:
    """Batches of tasks, a grain pipeline whose position counts consumed batches.

    Every epoch goes through the whole source once, in an order of its own that depends
    on seed and epoch. Epochs follow each other without a seam: a batch may hold the end
    of one and the beginning of the next, so that all batches are full; only the last
    one of a finite run may be short.

    The batches are those of the whole run, in the same order however many processes
    share them: process p of n gets the p-th n-th part of each.

    Args:
        source: a `Source` of tasks.
        batch_size: tasks of a batch over all processes.
        seed: in [0, 2^32), of the order; None keeps the source's order.
        epochs: how often to go through the source; None is for ever.
        process_index, process_count: which share of each batch is made here.

    Raises:
        ValueError: if the source is empty, a number is out of range, or the batch does
            not split evenly over the processes.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        seed: int | None = 0,
        epochs: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        import grain  # a second, and those who only score need none of it

        rows = len(source)
        if not rows:
            raise ValueError("the prompt set is empty: no task to draw from")
        if batch_size < 1 or (epochs is not None and epochs < 1):
            raise ValueError(
                f"batch_size and epochs must be at least 1, got {batch_size}, {epochs}"
            )
        if not 0 <= process_index < process_count:
            raise ValueError(f"no process {process_index} among {process_count}")
        if batch_size % process_count:
            raise ValueError(
                f"a batch of {batch_size} does not split over {process_count} processes"
            )
        if seed is not None and not 0 <= seed < 2**32:
            raise ValueError(f"seed must be in [0, 2^32), got {seed}")
        share = batch_size // process_count
        first = process_index * share
        order = grain.MapDataset.range(rows)
        if seed is not None:
            order = order.shuffle(seed=seed)
        # Without an end there is no remainder, and grain's count of it overflows.
        endless = epochs is None
        batches = order.repeat(epochs).batch(batch_size, drop_remainder=endless)

        def tasks(indices: Any) -> list[Task]:
            return [source[int(i)] for i in indices[first : first + share]]

        # No threads read ahead: making a task is cheap beside sampling from it, and the
        # position is then that of the last batch handed out.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._batches = iter(batches.map(tasks).to_iter_dataset(options))
        self._what = {"rows": rows, "batch_size": batch_size, "seed": seed}
        self._total = None if epochs is None else math.ceil(rows * epochs / batch_size)

    def __iter__(self) -> Iterator[list[Task]]:
        return self

    def __next__(self) -> list[Task]:
        """The next batch: this process's share, a list of tasks."""
        return next(self._batches)

    @property
    def consumed(self) -> int:
        """How many batches were handed out."""
        return int(self._batches.get_state()["next_index"])

    @property
    def remaining(self) -> int | None:
        """How many batches are left; None if there is no end."""
        return None if self._total is None else self._total - self.consumed

    def get_state(self) -> dict[str, Any]:
        """The position, as JSON values; the same in every process."""
        return {**self._what, "consumed": self.consumed}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on at the first batch that was not handed out when `state` was taken.

        The number of processes and of epochs may differ from what it was then.

        Raises:
            ValueError: if the order is another one: rows, batch size or seed differ.
        """
        for name, value in self._what.items():
            if state[name] != value:
                raise ValueError(
                    f"the saved position is in an order with {name}={state[name]}, "
                    f"this one has {name}={value}: it does not go on with those tasks"
                )
        self._batches.set_state({"next_index": int(state["consumed"])})
