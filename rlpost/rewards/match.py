"""Rewards that compare a response with the task's reference answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Decimal

from rlpost.rewards.combine import gate
from rlpost.rewards.shape import finished
from rlpost.rewards.types import Parts, Sample, each

# 1,234.5 and -7 and .5 and 3e8, not the 4 of "x4" nor the sign of "3-4"; exponents of
# at most three digits, since a response may not make the comparison overflow.
_NUMBER = re.compile(
    r"(?<![\w.])[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?"
    r"(?:[eE][-+]?\d{1,3}(?!\d))?"
)


def exact_match(
    samples: Sequence[Sample], *, extract: Callable[[str], str | None] = str.strip
) -> Parts:
    """1 where the extracted response equals the answer, blanks around both aside.

    Args:
        samples: B of them, each with `task.answer`.
        extract: finds the answer in a response; None for there is none, which scores 0.

    Returns:
        {"exact": f32[B]}, 0 or 1.

    Raises:
        ValueError: if a task has no answer.
    """

    def score(sample: Sample) -> float:
        found = extract(sample.text)
        return float(found is not None and found.strip() == answer_of(sample).strip())

    return each("exact", samples, score)


def number_match(samples: Sequence[Sample], *, tolerance: float = 0.0) -> Parts:
    """1 where the last number of the response is the answer's.

    Args:
        samples: B of them, each with a number in `task.answer` (the last one counts, so
            that "#### 42" serves).
        tolerance: largest difference that still counts, in the answer's unit. Numbers
            are compared in decimal, so 0 asks for equal values: 0.5 = .50.

    Returns:
        {"number": f32[B]}, 0 or 1; a response without a number scores 0.

    Raises:
        ValueError: if a task's answer has no number.
    """

    def score(sample: Sample) -> float:
        wanted, found = last_number(answer_of(sample)), last_number(sample.text)
        if wanted is None:
            raise ValueError(
                f"the answer of task {sample.task.id!r} holds no number: "
                f"{sample.task.answer!r}"
            )
        if found is None:
            return 0.0
        if tolerance == 0:  # exact, where a difference would round to 28 digits
            return float(found == wanted)
        return float(abs(found - wanted) <= Decimal(tolerance))

    return each("number", samples, score)


def final_number(samples: Sequence[Sample]) -> Parts:
    """1 where the response ended by itself and its last number is the answer's.

    Returns:
        {"reward", "gate", "number"}: f32[B], see `gate`; "number" only of those that
        ended.

    Raises:
        ValueError: if a task's answer has no number.
    """
    return dict(gate(finished, number_match)(samples))


def last_number(text: str) -> Decimal | None:
    """The last number written in a text, thousands commas allowed, or None."""
    found = _NUMBER.findall(text)
    return Decimal(found[-1].replace(",", "")) if found else None


def answer_of(sample: Sample) -> str:
    """The task's reference answer, or an error that names the task."""
    if sample.task.answer is None:
        raise ValueError(f"task {sample.task.id!r} has no answer to compare with")
    return sample.task.answer
