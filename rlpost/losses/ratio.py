"""Importance ratios of the tokens, and the surrogates made of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from rlpost.types import Array, Batch, Scores, TokenLoss, check_range


def masked_difference(x: Array, y: Array, mask: Array) -> Array:
    """f32[B, T], x - y on the mask and 0 off it, whatever stands there; y is constant.

    Both sides are selected before they meet, so that neither the value nor the gradient
    of an exponential taken later can turn nan because of padding.
    """
    x = jnp.where(mask, x.astype(jnp.float32), 0.0)
    y = jnp.where(mask, y.astype(jnp.float32), 0.0)
    return x - jax.lax.stop_gradient(y)


def log_ratio(scores: Scores, batch: Batch) -> Array:
    """f32[B, T], log of the current over the old probability of each token, nats.

    The old policy is `batch.old_logp` where the batch has it (what the trainer's own
    network said at the weights of the rollout: the ratio then holds the policy's motion
    alone), and else `batch.behavior_logp` (of the sampler: the ratio then holds the
    difference of the two programs too). 0 off the mask.
    """
    old = batch.old_logp
    if old is None:
        old = batch.need("behavior_logp")
    return masked_difference(scores.logp, old, batch.mask)


def drift(scores: Scores, batch: Batch) -> Array:
    """f32[B, T], log of the current over the behavior probability, nats."""
    return masked_difference(scores.logp, batch.need("behavior_logp"), batch.mask)


def mismatch(scores: Scores, batch: Batch) -> Array:
    """f32[B, T], log of the trainer's over the sampler's probability, nats.

    Both at the weights of the rollout, `old_logp - behavior_logp`: what differs is the
    program (its precision, its kernels), not the policy.
    """
    old = batch.need("old_logp")
    return masked_difference(old, batch.need("behavior_logp"), batch.mask)


def importance(scores: Scores, batch: Batch) -> Array:
    """The unclipped surrogate, `-r A`; its gradient is that of the expected reward.

    References:
        Kakade and Langford, ICML 2002; Schulman et al., arXiv:1502.05477, eq. 14.
    """
    return -jnp.exp(log_ratio(scores, batch)) * batch.need("advantage")


def clipped_ratio(low: float = 0.2, high: float = 0.2) -> TokenLoss:
    """Pessimistic importance-weighted surrogate of PPO.

    Per token, `-min(r A, clip(r, 1 - low, 1 + high) A)` with `r` the ratio of the
    current to the old probability (`log_ratio`). Its gradient is zero once `r` has left
    the band in the direction that `A` favours.

    Args:
        low: distance of the lower bound below 1, a ratio in [0, 1].
        high: distance of the upper bound above 1, a ratio, at least 0.

    Returns:
        A term mapping (Scores, Batch) to f32[B, T], in units of advantage.

    Raises:
        ValueError: if a concrete `low` is outside [0, 1] or `high` is negative.

    References:
        Schulman et al., Proximal Policy Optimization, arXiv:1707.06347, eq. 7.
        Unequal bounds: Yu et al., DAPO, arXiv:2503.14476, eq. 10.
    """
    check_range("low", low, 0.0, 1.0)
    check_range("high", high, 0.0)

    def term(scores: Scores, batch: Batch) -> Array:
        advantage = batch.need("advantage")
        # min(r A, clip(r) A) is A min(r, 1 + high) for A >= 0 and A max(r, 1 - low)
        # else. Bounded in logs, a ratio too large for float32 is clipped like any
        # other, where exp before min would make its gradient 0 * inf.
        x = log_ratio(scores, batch)
        x = jnp.where(
            advantage >= 0, jnp.minimum(x, jnp.log1p(high)), jnp.maximum(x, _log1m(low))
        )
        return -jnp.exp(x) * advantage

    return term


def clip_fraction(low: float = 0.2, high: float = 0.2) -> TokenLoss:
    """Indicator f32[B, T] of tokens whose gradient `clipped_ratio(low, high)` cuts."""
    check_range("low", low, 0.0, 1.0)
    check_range("high", high, 0.0)

    def indicator(scores: Scores, batch: Batch) -> Array:
        x, advantage = log_ratio(scores, batch), batch.need("advantage")
        above = (advantage > 0) & (x > jnp.log1p(high))
        below = (advantage < 0) & (x < _log1m(low))
        return (above | below).astype(jnp.float32)

    return indicator


def _log1m(low: float) -> Array:
    return jnp.log1p(-jnp.asarray(low, jnp.float32))
