"""Regression of a value head on what responses earned."""

from __future__ import annotations

import jax.numpy as jnp

from rlpost.types import Array, Batch, Scores


def value_error(scores: Scores, batch: Batch) -> Array:
    """Half the squared error of the value, `(V - r)^2 / 2`, f32[B, T]; 0 off the mask.

    The target of each token is the reward of its response, the return at discount 1.

    References:
        Schulman et al., Proximal Policy Optimization, arXiv:1707.06347, eq. 9.
    """
    if scores.value is None:
        raise ValueError("this loss needs scores.value: score with a value head")
    reward = jnp.where(batch.mask, batch.need("reward")[:, None], 0.0)
    value = jnp.where(batch.mask, scores.value.astype(jnp.float32), 0.0)
    return 0.5 * (value - reward) ** 2
