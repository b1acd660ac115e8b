"""Rewards by other people's verifiers: reasoning-gym's scorers and math-verify."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from rlpost.data.reasoning import load, score_answer
from rlpost.rewards.match import answer_of
from rlpost.rewards.types import Parts, Sample, each


def reasoning_score(
    samples: Sequence[Sample], *, extract: Callable[[str], str | None] = str.strip
) -> Parts:
    """What the scorer of a task's reasoning-gym family says of the response.

    Args:
        samples: B of them, of tasks from `data.reasoning`.
        extract: finds the answer in a response. The scorers expect the bare answer, and
            most give little for one inside a sentence.

    Returns:
        {"reasoning": f32[B]}, in [0, 1] for most families; where nothing was extracted
        it is what the family gives for no answer.

    Raises:
        ValueError: if a task is not of reasoning-gym.
    """

    load()

    def score(sample: Sample) -> float:
        return score_answer(sample.task, extract(sample.text))

    return each("reasoning", samples, score)


def math_equal(
    samples: Sequence[Sample], *, digits: int = 6, gold_latex: bool = True
) -> Parts:
    """1 where math-verify finds the response's answer equal to the reference.

    Its own time limits rest on signals, which only a main thread may use; they are off,
    and an expression that takes for ever is stopped by the pool (`rewards.pool`).

    Args:
        samples: B of them; the answers are LaTeX or plain expressions.
        digits: decimal places to which floats are compared.
        gold_latex: put an answer that has no delimiters between dollar signs, so that
            LaTeX in it is read as such.

    Returns:
        {"math": f32[B]}, 0 or 1; a response in which nothing parses scores 0.

    Raises:
        ValueError: if a reference answer does not parse.
    """
    import math_verify  # half a second: only for those who use it

    # It warns once in each process that its limits are off; they are off on purpose.
    for module in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(module).setLevel(logging.ERROR)

    def parse(text: str) -> list[Any]:
        return math_verify.parse(text, parsing_timeout=None)

    def score(sample: Sample) -> float:
        answer = answer_of(sample)
        bare = gold_latex and not any(sign in answer for sign in ("$", "\\(", "\\["))
        gold = (parse(f"${answer}$") if bare else []) or parse(answer)
        if not gold:
            raise ValueError(
                f"the answer of task {sample.task.id!r} is no expression: {answer!r}"
            )
        equal = math_verify.verify(
            gold, parse(sample.text), float_rounding=digits, timeout_seconds=None
        )
        return float(equal)

    return each("math", samples, score)
