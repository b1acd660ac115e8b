"""DPO: direct preference optimization."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from rlpost.compose import preference
from rlpost.losses.preference import dpo_loss, dpo_margin
from rlpost.types import Array, Batch, Objective, Scores


def dpo(*, beta: Any = 0.1) -> Objective:
    """Learns from pairs, with the policy's own log-ratio as the reward.

        loss = mean_pairs -log sigmoid(beta [log p/q (chosen) - log p/q (rejected)])

    p the policy, q the reference, both of whole responses (sums over tokens).

    Args:
        beta: at least 0, per nat; the paper has 0.1. Small lets the policy move far.

    Returns:
        An Objective; needs batch.unit and batch.preferred (a pair is two rows of one
        unit) and `scores.frozen["reference"]`. Metrics: "margin" (nats) and "accuracy"
        (share of pairs whose margin is above 0).

    Raises:
        ValueError: if a concrete `beta` is negative.

    References:
        Rafailov et al., Direct Preference Optimization, arXiv:2305.18290, eq. 7.
    """
    margin = dpo_margin()

    def accuracy(scores: Scores, batch: Batch) -> Array:
        return (margin(scores, batch) > 0).astype(jnp.float32)

    return preference(dpo_loss(beta), metrics={"margin": margin, "accuracy": accuracy})
