"""Advantages relative to the other responses to the same prompt.

Groups are ids, ragged and in any order: row i is compared with every row j through a
matrix bool[B, B] (a batch of 4096 rows costs 64 MiB for a moment). Rows that could not
be scored are in no group. A row with no mate to be compared with, and all rows of a
group with equal rewards, get exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from rlpost.advantages.returns import rewards, to_tokens
from rlpost.types import Advantage, Array, Batch, check_range

# (reward f32[B], mates bool[B, B]) -> f32[B], what to divide by; 0 gives advantage 0.
# `mates[i, j]`: j is compared with i; every scorable row is its own mate.
Scale = Callable[[Array, Array], Array]


def group_std(ddof: int = 1, epsilon: float = 1e-4) -> Scale:
    """The standard deviation of the row's group, plus epsilon.

    Args:
        ddof: 1 divides the squares by G - 1 (the usual choice), 0 by G; published
            code differs, by a factor sqrt(G / (G - 1)) on every advantage.
        epsilon: added after the root, in units of reward; at least 0.

    Raises:
        ValueError: if a concrete `epsilon` is negative or `ddof` not in [0, 1].

    References:
        Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.2 (which leaves ddof
        and epsilon open; the defaults here are our choice).
    """
    check_range("ddof", ddof, 0, 1)
    check_range("epsilon", epsilon, 0.0)

    def scale(reward: Array, mates: Array) -> Array:
        return _std(reward, mates, ddof) + epsilon

    return scale


GROUP_STD = group_std()


def batch_std(ddof: int = 1, epsilon: float = 1e-4) -> Scale:
    """The standard deviation of all scorable rewards of the batch, plus epsilon.

    Arguments as for `group_std`.

    References:
        Liu et al., Tricks or Traps? (Lite PPO), arXiv:2508.08221.
    """
    check_range("ddof", ddof, 0, 1)
    check_range("epsilon", epsilon, 0.0)

    def scale(reward: Array, mates: Array) -> Array:
        return _std(reward, _all(_scorable(mates)), ddof) + epsilon

    return scale


def group_mean(reward: Array, mates: Array) -> Array:
    """The mean reward of the row's group; a `Scale`. For rewards of at least 0.

    With rewards in {0, 1} the advantage is `(r - p) / p`, p the share of correct
    responses: the estimator of the gradient of log p. A mean of 0 (or below, where
    the method means nothing) gives advantage 0.

    References:
        Tajwar et al., Maximum Likelihood Reinforcement Learning, arXiv:2602.02710.
    """
    return jnp.maximum(_mean(reward, mates), 0.0)


def group_relative(scale: Scale | None = GROUP_STD) -> Advantage:
    """The reward less its group's mean, divided by a scale.

    `A_i = (r_i - mean_j r_j) / scale_i`, j over the scorable rows with i's group id,
    on every token of the response.

    Args:
        scale: `group_std(...)`, `batch_std(...)`, `group_mean`, or None for no
            division (Dr.GRPO).

    Returns:
        Batch to f32[B, T]; needs batch.reward and batch.group.

    References:
        Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1.2.
        Without the division: Liu et al., arXiv:2503.20783, section 3.2.
    """

    def advantage(batch: Batch) -> Array:
        reward, scorable = rewards(batch)
        mates = _same_group(batch.need("group"), scorable)
        return to_tokens(_scaled(reward, mates, scale), batch)

    return advantage


def batch_centered(scale: Scale | None = None) -> Advantage:
    """The reward less the mean of the whole batch, the prompts mixed.

    Arguments as for `group_relative`; needs no group ids.
    """

    def advantage(batch: Batch) -> Array:
        reward, scorable = rewards(batch)
        return to_tokens(_scaled(reward, _all(scorable), scale), batch)

    return advantage


def leave_one_out() -> Advantage:
    """The reward less the mean reward of the other responses to the prompt.

    `A_i = r_i - mean_{j != i} r_j`, which is n / (n - 1) times the centered reward of
    a group of n; 0 for a response that is alone.

    References:
        Ahmadian et al., Back to Basics, arXiv:2402.14740, section 3.2.
        Kool, van Hoof, Welling, Buy 4 REINFORCE Samples, 2019.
    """

    def advantage(batch: Batch) -> Array:
        reward, scorable = rewards(batch)
        mates = _same_group(batch.need("group"), scorable)
        size = jnp.sum(mates, axis=-1)
        factor = size / jnp.maximum(size - 1, 1)
        return to_tokens(factor * _centered(reward, mates), batch)

    return advantage


def _same_group(group: Array, scorable: Array) -> Array:
    return (group[:, None] == group[None, :]) & _all(scorable)


def _all(scorable: Array) -> Array:
    return scorable[:, None] & scorable[None, :]


def _scorable(mates: Array) -> Array:
    return jnp.diagonal(mates)


def _scaled(reward: Array, mates: Array, scale: Scale | None) -> Array:
    centered = _centered(reward, mates)
    if scale is None:
        return centered
    by = scale(reward, mates)
    return jnp.where(by > 0, centered / jnp.where(by > 0, by, 1.0), 0.0)


def _mean(x: Array, mates: Array) -> Array:
    count = jnp.maximum(jnp.sum(mates, axis=-1), 1)
    return jnp.sum(jnp.where(mates, x[None, :], 0.0), axis=-1) / count


def _centered(reward: Array, mates: Array) -> Array:
    # Counted from the least reward of the group, so that equal rewards give exactly 0:
    # float32 rounding of their mean, divided by a small std, would read as signal.
    least = jnp.min(jnp.where(mates, reward[None, :], jnp.inf), axis=-1)
    above = jnp.where(mates, reward[None, :] - least[:, None], 0.0)
    mean = jnp.sum(above, axis=-1) / jnp.maximum(jnp.sum(mates, axis=-1), 1)
    return jnp.where(_scorable(mates), jnp.diagonal(above) - mean, 0.0)


def _std(reward: Array, mates: Array, ddof: int) -> Array:
    centered = _centered(reward, mates)
    # All rows of a group hold the same mean, so each may bring its own deviation.
    squares = jnp.sum(jnp.where(mates, centered[None, :] ** 2, 0.0), axis=-1)
    return jnp.sqrt(squares / jnp.maximum(jnp.sum(mates, axis=-1) - ddof, 1))
