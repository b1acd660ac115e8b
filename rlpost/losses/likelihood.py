"""Likelihood of given tokens."""

from __future__ import annotations

import jax.numpy as jnp

from rlpost.types import Array, Batch, Scores


def negative_log_likelihood(scores: Scores, batch: Batch) -> Array:
    """`-logp` of each token of the mask, f32[B, T], nats; 0 off it."""
    return -jnp.where(batch.mask, scores.logp.astype(jnp.float32), 0.0)
