"""Rewards for the form of a response: a pattern, a length."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from rlpost.rewards.types import Parts, Reward, Sample, each


def format_match(pattern: str) -> Reward:
    """1 where the whole response has a form.

    Args:
        pattern: a regular expression; `.` also matches line ends. Blanks around the
            response are not part of it. Mind patterns that take exponential time: a
            pool's time limit is what stops one.

    Returns:
        A reward giving {"format": f32[B]}, 0 or 1.

    Raises:
        ValueError: if the pattern is not a regular expression.
    """
    try:
        form = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error

    def reward(samples: Sequence[Sample]) -> Parts:
        def score(sample: Sample) -> float:
            return float(form.fullmatch(sample.text.strip()) is not None)

        return each("format", samples, score)

    return reward


def overlong(limit: int, margin: int) -> Reward:
    """A soft penalty for responses near or beyond a length.

    With n tokens: 0 up to `limit - margin`, then falling linearly to -1 at `limit`, and
    -1 beyond.

    Args:
        limit: tokens at which the penalty is full, the stop token counted.
        margin: tokens before it at which the penalty begins; 0 makes it a step.

    Returns:
        A reward giving {"length": f32[B]}, in [-1, 0].

    Raises:
        ValueError: unless 0 <= margin <= limit.

    References:
        Yu et al., DAPO, arXiv:2503.14476, eq. 13.
    """
    if not 0 <= margin <= limit:
        raise ValueError(f"need 0 <= margin <= limit, got {margin} and {limit}")

    def reward(samples: Sequence[Sample]) -> Parts:
        length = np.array([len(sample.response_ids) for sample in samples], np.float32)
        excess = length - (limit - margin)
        penalty = np.clip(excess / margin, 0, 1) if margin else excess > 0
        return {"length": np.asarray(-1.0 * penalty, np.float32)}

    return reward


def finished(samples: Sequence[Sample]) -> Parts:
    """1 where a response ended by itself, 0 where it was cut.

    Returns:
        {"finished": f32[B]}; a condition for `gate`.
    """
    return each("finished", samples, lambda sample: float(sample.finished))
