"""Procedural arithmetic on single characters, for models made on the spot."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
import random
from collections.abc import Iterator

from rlpost.data.task import Task

ALPHABET = "0123456789+-*="
_LISTED = 1_000_000  # combinations of operands that are listed rather than drawn
_SMALLEST = 1e-3  # share of a split, below which drawing would all but never end


@dataclasses.dataclass(frozen=True)
class _Sums:
    """Tasks made on demand from a list of operands."""

    operands: tuple[tuple[int, ...], ...]
    operator: str

    def __len__(self) -> int:
        return len(self.operands)

    def __getitem__(self, index: int) -> Task:
        numbers = self.operands[index]
        text = self.operator.join(map(str, numbers))
        return Task(
            prompt=f"{text}=", answer=str(_value(self.operator, numbers)), id=text
        )


def sums(
    *,
    digits: int = 1,
    operands: int = 2,
    operator: str = "+",
    split: str = "train",
    held_out: float = 0.2,
    size: int | None = None,
    seed: int = 0,
) -> _Sums:
    """Tasks such as "3+4=", answered by "7", over the characters of `ALPHABET`.

    Whether a task is held out depends on a hash of its operands in ascending order
    alone, so "train" and "test" share no task, nor one the mirror of another, whatever
    the seed and size.

    Args:
        digits: operands are 0 .. 10^digits - 1.
        operands: numbers in a task, at least 2.
        operator: "+", "-" (from left to right) or "*".
        split: "train" or "test".
        held_out: the share of tasks in "test", about; in [0, 1].
        size: how many tasks to draw, with repetition; None lists each task once.
        seed: of the draw.

    Returns:
        A `Source` of tasks, in ascending order of operands unless drawn.

    Raises:
        ValueError: on an unknown operator or split, or where None lists too many.
    """
    if operator not in ("+", "-", "*"):
        raise ValueError(f"operator must be one of + - *, got {operator!r}")
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    if not 0 <= held_out <= 1:
        raise ValueError(f"held_out must be in [0, 1], got {held_out}")
    if digits < 1 or operands < 2:
        raise ValueError(
            f"a sum needs digits >= 1 and operands >= 2, got {digits} and {operands}"
        )
    if size is None and (10**digits) ** operands > _LISTED:
        raise ValueError(
            f"there are {(10**digits) ** operands} sums of {operands} numbers of "
            f"{digits} digits: give a size to draw from them"
        )
    share = held_out if split == "test" else 1 - held_out
    if share < _SMALLEST:
        raise ValueError(
            f"with held_out={held_out} the split {split!r} is all but empty"
        )

    def wanted(numbers: tuple[int, ...]) -> bool:
        return _held_out(numbers, held_out) == (split == "test")

    rng = random.Random(seed)
    if (10**digits) ** operands <= _LISTED:
        every = itertools.product(range(10**digits), repeat=operands)
        chosen = tuple(filter(wanted, every))
        if size is not None and chosen:
            chosen = tuple(rng.choices(chosen, k=size))
    else:
        draws = (tuple(_draw(rng, digits, operands)) for _ in itertools.count())
        chosen = tuple(itertools.islice(filter(wanted, draws), size))
    return _Sums(chosen, operator)


def _draw(rng: random.Random, digits: int, operands: int) -> Iterator[int]:
    return (rng.randrange(10**digits) for _ in range(operands))


def _held_out(numbers: tuple[int, ...], share: float) -> bool:
    # Not hash(): that of strings differs from process to process.
    digest = hashlib.blake2b(repr(sorted(numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def _value(operator: str, numbers: tuple[int, ...]) -> int:
    if operator == "*":
        return math.prod(numbers)
    first, *rest = numbers
    return first + (sum(rest) if operator == "+" else -sum(rest))
