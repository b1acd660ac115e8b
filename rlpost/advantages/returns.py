"""The reward of a response, credited to all of its tokens."""

from __future__ import annotations

import jax.numpy as jnp

from rlpost.types import Advantage, Array, Batch


def rewards(batch: Batch) -> tuple[Array, Array]:
    """(reward f32[B], scorable bool[B]); the reward is 0 where it is not scorable.

    A row is scorable if its reward is finite and it has a token to learn from: so nan
    (could not be scored) and padding rows stay out of every statistic.
    """
    reward = batch.need("reward").astype(jnp.float32)
    scorable = jnp.isfinite(reward) & jnp.any(batch.mask, axis=-1)
    return jnp.where(scorable, reward, 0.0), scorable


def to_tokens(per_row: Array, batch: Batch) -> Array:
    """f32[B] to f32[B, T]: the row's number on each token of the mask, 0 elsewhere."""
    return jnp.where(batch.mask, per_row[:, None], 0.0)


def monte_carlo(baseline: float = 0.0) -> Advantage:
    """The raw reward less a constant, `r - baseline`, on every token of the response.

    Args:
        baseline: in units of reward; any number that does not depend on the sampled
            response leaves the expected gradient as it is.

    References:
        Williams, Simple statistical gradient-following algorithms, Machine Learning
        8, 1992, section 4.
    """

    def advantage(batch: Batch) -> Array:
        reward, scorable = rewards(batch)
        return to_tokens(jnp.where(scorable, reward - baseline, 0.0), batch)

    return advantage


def given(batch: Batch) -> Array:
    """The advantage f32[B, T] that the batch already carries (of a critic, say)."""
    return batch.need("advantage").astype(jnp.float32)


def value_baseline(batch: Batch) -> Array:
    """The reward less what a critic expected before each token, `r - V_t`, f32[B, T].

    The values are those of the rollout, `batch.extras["value"]`, f32[B, T] in units of
    reward. It is generalised advantage estimation at lambda = gamma = 1 for a reward
    that comes at the end.

    References:
        Schulman et al., arXiv:1506.02438, eq. 18.
    """
    if "value" not in batch.extras:
        raise ValueError('this advantage needs batch.extras["value"]: run a critic')
    reward, scorable = rewards(batch)
    value = jnp.where(batch.mask, batch.extras["value"], 0.0)
    return jnp.where(scorable[:, None], to_tokens(reward, batch) - value, 0.0)
