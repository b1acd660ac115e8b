"""Rewards in parallel, with time limits, where a failure is never a reward of 0."""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import os
import queue
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlpost.rewards.types import Parts, Reward, Sample, reward_of
from rlpost.rewards.worker import evaluate, resolve
from rlpost.rewards.workers import ProcessWorker, RewardError, ThreadWorker

__all__ = ["Failure", "RewardError", "RewardPool", "Scored", "score_here"]


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why one sample has no reward.

    Attributes:
        index: of the sample in its batch.
        task: its task's id.
        kind: "raised", "timeout", "died" (the worker's process ended), "invalid" (not a
            number for every sample) or "unscorable" (nan or None).
        detail: the traceback, where the worker hung, or what was returned.
    """

    index: int
    task: str
    kind: str
    detail: str


@dataclasses.dataclass(frozen=True)
class Scored:
    """The rewards of a batch.

    Attributes:
        parts: {name: f32[B]}, nan where a sample could not be scored.
        failures: in the samples' order, one for each row whose reward is nan.
    """

    parts: Parts
    failures: tuple[Failure, ...] = ()

    @property
    def reward(self) -> np.ndarray:
        """f32[B], the part that trains."""
        return reward_of(self.parts)

    @property
    def counts(self) -> dict[str, int]:
        """How many samples failed, by kind."""
        return dict(collections.Counter(failure.kind for failure in self.failures))

    def report(self, shown: int = 3) -> str:
        """What failed, for a log: the counts, and the first few in full; "" if none."""
        if not self.failures:
            return ""
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        lines = [f"{len(self.failures)} samples not scored ({kinds})"]
        for failure in self.failures[:shown]:
            lines.append(
                f"sample {failure.index}, task {failure.task!r}, {failure.kind}"
            )
            lines += [f"    {line}" for line in failure.detail.splitlines()]
        return "\n".join(lines)


class RewardPool:
    """Scores batches by several workers, each sample on its own.

    A sample whose scoring raises, hangs, ends the process or gives no number costs only
    its own reward, which is nan. Results stand in the order of the samples, whatever
    the order of arrival. The pool is itself a reward: `pool(samples)` gives the parts;
    `pool.score(samples)` gives the failures too.

    Workers are processes by default: a fresh Python each, which imports the reward by
    its path and gets samples as JSON; a hanging one is ended and replaced. They are
    started here and live until `close` (or the end of a `with`). Threads suit a reward
    that waits for others, or a function that has no path; one that hangs is left
    behind, still running.

    Args:
        reward: "module:name", or a reward. Processes need one that can be imported: a
            function defined at the top of a module, not in `main` or a notebook.
        arguments: if given, "module:name" is a factory, called in the worker with
            these, JSON values.
        workers: how many; by default one for each processor, 8 at most.
        limit: seconds for one sample, or for the batch where it goes `whole`.
        threads: use threads of this process.
        whole: hand over the whole batch in one call, for a reward that compares
            samples; a failure then costs all of it.
        max_failures: the share of a batch, in (0, 1], whose failing is an error rather
            than a number in the log: 1 means that all failed. None is never.
        start_limit: seconds in which a worker must start and import.

    Raises:
        ValueError: on values out of range, or a reward that a process cannot import.
        RewardError: from `score`, if workers cannot start or too many samples failed;
            the message holds the first cause.
    """

    def __init__(
        self,
        reward: Reward | str,
        *,
        arguments: Mapping[str, Any] | None = None,
        workers: int | None = None,
        limit: float = 10.0,
        threads: bool = False,
        whole: bool = False,
        max_failures: float | None = 1.0,
        start_limit: float = 120.0,
    ) -> None:
        count = min(8, os.cpu_count() or 1) if workers is None else workers
        if count < 1:
            raise ValueError(f"a pool needs at least one worker, got {workers}")
        for name, value in (("limit", limit), ("start_limit", start_limit)):
            if not 0 < value < math.inf:
                raise ValueError(f"{name} must be positive seconds, got {value}")
        if max_failures is not None and not 0 < max_failures <= 1:
            raise ValueError(f"max_failures must be in (0, 1], got {max_failures}")
        self._whole, self._max_failures = whole, max_failures
        self._closed = False
        self._workers: list[ProcessWorker | ThreadWorker]
        if threads:
            if isinstance(reward, str):
                reward = resolve(reward, arguments)
            self._workers = [ThreadWorker(reward, limit) for _ in range(count)]
        else:
            path = reward if isinstance(reward, str) else _path_of(reward)
            self._workers = [
                ProcessWorker(path, arguments, limit, start_limit) for _ in range(count)
            ]
        # Also where the pool is forgotten, and when Python ends.
        self._finalizer = weakref.finalize(self, _close, self._workers)

    def __call__(self, samples: Sequence[Sample]) -> Parts:
        return self.score(samples).parts

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; `score` is then an error."""
        self._closed = True
        self._finalizer()

    def score(self, samples: Sequence[Sample]) -> Scored:
        """The rewards of B samples, and what failed."""
        if self._closed:
            raise RewardError("the reward pool is closed")
        indices = (
            [[*range(len(samples))]]
            if self._whole
            else [[i] for i in range(len(samples))]
        )
        calls = [rows for rows in indices if rows]
        answers = self._run([[samples[i] for i in rows] for rows in calls])
        return _bounded(_gather(samples, calls, answers), self._max_failures)

    def _run(self, calls: list[list[Sample]]) -> list[dict[str, Any]]:
        waiting = collections.deque(range(len(calls)))
        done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

        def serve(worker: ProcessWorker | ThreadWorker) -> None:
            while True:
                try:
                    number = waiting.popleft()
                except IndexError:
                    return
                try:
                    done.put((number, worker.call(calls[number])))
                except BaseException as error:  # handed to the thread that asked
                    done.put((number, error))
                    return

        threads = [
            threading.Thread(target=serve, args=(worker,), daemon=True)
            for worker in self._workers[: len(calls)]
        ]
        for thread in threads:
            thread.start()
        answers: list[Any] = [None] * len(calls)
        try:
            for _ in calls:
                number, answer = done.get()
                if isinstance(answer, BaseException):
                    raise answer
                answers[number] = answer
        except BaseException:  # Ctrl-C too: a reply under way would meet the next call
            waiting.clear()
            for worker in self._workers:
                worker.kill()
            raise
        finally:
            for thread in threads:
                thread.join()
        return answers


def score_here(
    reward: Reward, samples: Sequence[Sample], *, max_failures: float | None = 1.0
) -> Scored:
    """Scores sample by sample in the calling thread, without a time limit.

    For quick rewards and notebooks; failures are counted as in `RewardPool`.

    Raises:
        RewardError: if the share `max_failures` of the samples failed.
    """
    calls = [[row] for row in range(len(samples))]
    answers = [evaluate(reward, [sample]) for sample in samples]
    return _bounded(_gather(samples, calls, answers), max_failures)


def _bounded(scored: Scored, max_failures: float | None) -> Scored:
    count, failed = len(scored.reward), len(scored.failures)
    if max_failures is not None and count and failed / count >= max_failures:
        raise RewardError(
            f"{failed} of {count} samples could not be scored (max_failures is "
            f"{max_failures:g}).\n{scored.report(1)}"
        )
    return scored


def _gather(
    samples: Sequence[Sample], calls: list[list[int]], answers: list[dict[str, Any]]
) -> Scored:
    failures: dict[int, Failure] = {}
    parts: Parts = {}
    total = np.full(len(samples), np.nan, np.float32)

    def fail(row: int, kind: str, detail: str) -> None:
        failures[row] = Failure(row, samples[row].task.id, kind, detail)

    for rows, answer in zip(calls, answers, strict=True):
        kind, value = next(iter(answer.items()))
        if kind == "parts":
            try:
                given = _numbers(value, len(rows))
                own = reward_of(given)
            except ValueError as error:
                kind, value = "invalid", str(error)
        if kind != "parts":
            for row in rows:
                fail(row, kind, value)
            continue
        for name, numbers in given.items():
            if name not in parts:
                parts[name] = np.full(len(samples), np.nan, np.float32)
            parts[name][rows] = numbers
        total[rows] = own
        for row, number in zip(rows, own, strict=True):
            if np.isnan(number):
                fail(row, "unscorable", "the reward is nan or None")
    if len(parts) != 1:  # none, or such as some samples have and others have not
        parts["reward"] = total
    return Scored(parts, tuple(failures[row] for row in sorted(failures)))


def _numbers(given: Mapping[str, Any], count: int) -> Parts:
    """{name: f32[count]}; ValueError where a part is anything else, or infinite."""
    if not given:
        raise ValueError("the reward returned no parts")
    parts = {}
    for name, value in given.items():
        try:
            numbers = np.asarray(value, np.float32)
        except (TypeError, ValueError) as error:
            raise ValueError(f"part {name!r} is no array of numbers: {error}") from None
        if numbers.shape != (count,):
            raise ValueError(
                f"part {name!r} has shape {list(numbers.shape)}, expected one number a "
                f"sample, [{count}]"
            )
        if np.isinf(numbers).any():
            raise ValueError(f"part {name!r} is infinite")
        parts[name] = numbers
    return parts


def _path_of(reward: Reward) -> str:
    """The "module:name" of a function at the top of a module."""
    module, name = (getattr(reward, key, "") for key in ("__module__", "__qualname__"))
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if module == "__main__" and spec is not None:
        module = spec.name  # as started by python -m experiments.x
        found = getattr(main, name, None)
    elif not name or "<" in name or module == "__main__":
        found = None
    else:
        found = functools.reduce(
            lambda owner, key: getattr(owner, key, None),
            name.split("."),
            sys.modules.get(module),
        )
    if found is not reward:
        raise ValueError(
            f"a worker process cannot import {reward!r}: give 'module:name' (with "
            "`arguments` if it is made by a factory), or use threads=True"
        )
    return f"{module}:{name}"


def _close(workers: Sequence[ProcessWorker | ThreadWorker]) -> None:
    for worker in workers:
        worker.close()
