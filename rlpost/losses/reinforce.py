"""The score-function surrogate."""

from __future__ import annotations

import jax.numpy as jnp

from rlpost.types import Array, Batch, Scores


def score_function(scores: Scores, batch: Batch) -> Array:
    """`-A logp` of each token, f32[B, T], in units of advantage times nats.

    Its gradient on tokens drawn from the current policy is that of the expected
    advantage; its value means nothing.

    References:
        Williams, Simple statistical gradient-following algorithms, Machine Learning
        8, 1992, eq. 4.
    """
    logp = jnp.where(batch.mask, scores.logp.astype(jnp.float32), 0.0)
    return -logp * batch.need("advantage")
