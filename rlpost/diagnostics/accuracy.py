"""Accuracy of verifiable answers, and the baseline that asks for no model."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np


def pass_at_k(correct: Any, k: int) -> float:
    """The chance that at least one of k answers to a prompt is right, over prompts.

    Without bias: `1 - C(n - c, k) / C(n, k)` of the n answers, c of them right.

    Args:
        correct: [prompts, n], 0 or 1; nan marks an answer that could not be scored, and
            a prompt with fewer than k scored answers counts nowhere.
        k: at least 1.

    Returns:
        A share in [0, 1]; nan if no prompt has k scored answers.

    References:
        Chen et al., Evaluating Large Language Models Trained on Code,
        arXiv:2107.03374, eq. 1.
    """
    correct = np.asarray(correct, np.float64)
    if correct.ndim != 2 or k < 1:
        raise ValueError(f"pass@{k} needs [prompts, answers], got {correct.shape}")
    scored = ~np.isnan(correct)
    n, c = scored.sum(axis=1), np.nansum(correct, axis=1)
    n, c = n[n >= k], c[n >= k]
    if not len(n):
        return float("nan")
    # C(n - c, k) / C(n, k) as a product; a factor below 0 means it is 0.
    j = np.arange(k)
    factors = (n[:, None] - c[:, None] - j) / (n[:, None] - j)
    return float(np.mean(1.0 - np.prod(np.maximum(factors, 0.0), axis=1)))


def constant_answer(known: Sequence[str], held_out: Sequence[str]) -> tuple[str, float]:
    """The most frequent answer, and how often it alone is right on held-out tasks.

    Args:
        known: answers of training tasks, from which the constant is chosen.
        held_out: answers of the tasks that are measured.

    Returns:
        (the constant, its share in [0, 1]).

    Raises:
        ValueError: if either is empty.
    """
    if not len(known) or not len(held_out):
        raise ValueError("a constant answer needs known and held-out answers")
    answer = collections.Counter(known).most_common(1)[0][0]
    return answer, float(np.mean([a == answer for a in held_out]))
