"""A baseline kept over the run: the mean reward of each prompt, task or domain."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlpost.types import Array, Controller, check_range


class BaselineState(NamedTuple):
    """Sums of a debiased moving average.

    Attributes:
        total: f32[K], decayed sum of mean rewards.
        weight: f32[K], decayed sum of ones; 0 for a key that was never seen.
    """

    total: Array
    weight: Array


def moving_baseline(
    size: int, decay: float | Array = 0.9, *, initial: float | Array = 0.0
) -> Controller:
    """An exponential moving average of the reward of each of `size` keys.

    For a key with rewards in a batch, m their mean, `total <- d total + (1 - d) m` and
    `weight <- d weight + (1 - d)`; its baseline is `total / weight`. That is the usual
    average without its pull towards 0: after the first batch it is that batch's mean.
    The other keys stay as they are. That an average advances once per batch, however
    many rewards there were, is our choice.

    Args:
        size: number of keys K.
        decay: d in [0, 1), per batch in which a key has a reward.
        initial: the baseline of a key that was never seen, in units of reward.

    Returns:
        A controller. `decide(state, context, key)` maps context i32[...], keys, to
        baselines f32[...]; a key outside [0, K) has the initial one.
        `update(state, (keys, reward))` takes i32[B] and f32[B]; rewards that are nan
        (unscorable) and keys outside [0, K) are left out.

    Raises:
        ValueError: if `size` is below 1 or a concrete `decay` outside [0, 1).

    References:
        Debiasing: Kingma and Ba, Adam, arXiv:1412.6980, section 3.
    """
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    check_range("decay", decay, 0.0, 1.0)
    if not isinstance(decay, jax.core.Tracer) and float(decay) == 1.0:
        raise ValueError("decay must be below 1: at 1 nothing is ever learnt")

    def init() -> BaselineState:
        return BaselineState(jnp.zeros(size), jnp.zeros(size))

    def decide(state: BaselineState, context: Array, key: Array) -> Array:
        inside = (context >= 0) & (context < size)
        at = jnp.where(inside, context, 0)
        total, weight = state.total[at], state.weight[at]
        seen = inside & (weight > 0)
        return jnp.where(seen, total / jnp.where(seen, weight, 1.0), initial)

    def update(state: BaselineState, feedback: tuple[Array, Array]) -> BaselineState:
        keys, reward = feedback
        counts = jnp.isfinite(reward) & (keys >= 0) & (keys < size)
        at = jnp.where(counts, keys, 0)
        number = jnp.zeros(size).at[at].add(counts.astype(jnp.float32))
        sums = jnp.zeros(size).at[at].add(jnp.where(counts, reward, 0.0))
        seen = number > 0
        mean = sums / jnp.where(seen, number, 1.0)
        return BaselineState(
            total=jnp.where(
                seen, decay * state.total + (1.0 - decay) * mean, state.total
            ),
            weight=jnp.where(seen, decay * state.weight + (1.0 - decay), state.weight),
        )

    return Controller(init, decide, update)
