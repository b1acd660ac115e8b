"""Entropy of the policy, exact over the vocabulary."""

from __future__ import annotations

import jax.numpy as jnp

from rlpost.losses.kl import need_distribution
from rlpost.types import Array, Batch, Scores


def entropy(scores: Scores, batch: Batch) -> Array:
    """f32[B, T], the entropy of each token's law, nats; 0 off the mask."""
    law = need_distribution(scores).only(batch.mask)
    return jnp.where(batch.mask, law.entropy(), 0.0)


def entropy_bonus(scores: Scores, batch: Batch) -> Array:
    """Minus the entropy, so that a positive coefficient in the loss raises entropy.

    References:
        Williams and Peng, Function optimization using connectionist reinforcement
        learning algorithms, 1991; Mnih et al., A3C, arXiv:1602.01783.
    """
    return -entropy(scores, batch)
