"""Losses of preference pairs, per unit: `(Scores, Batch) -> f32[B]`.

A pair is two rows of one `batch.unit` with opposite `batch.preferred`. What belongs to
the pair stands on its preferred row; all other rows hold 0.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from rlpost.losses.ratio import masked_difference
from rlpost.types import Array, Batch, Scores, check_range

UnitLoss = Callable[[Scores, Batch], Array]  # -> f32[B]


def pairs(batch: Batch) -> Array:
    """bool[B, B]: row i is preferred, and j is its rejected mate.

    Rows without a token on the mask are padding and mate with nobody; a unit that is
    not one preferred and one rejected row is no pair.
    """
    unit, preferred = batch.need("unit"), batch.need("preferred")
    real = jnp.any(batch.mask, axis=-1)
    same = (unit[:, None] == unit[None, :]) & real[:, None] & real[None, :]
    chosen = jnp.sum(same & preferred[None, :], axis=-1)
    rejected = jnp.sum(same & ~preferred[None, :], axis=-1)
    whole = (chosen == 1) & (rejected == 1)
    return same & preferred[:, None] & ~preferred[None, :] & whole[:, None]


def dpo_margin(*, frozen: str = "reference") -> UnitLoss:
    """By how much the policy favours the chosen response more than the reference does.

    `sum_t (logp - reference_logp)` of the chosen row less that of the rejected row,
    f32[B], nats.
    """

    def margin(scores: Scores, batch: Batch) -> Array:
        other = scores.need(frozen).logp
        x = jnp.sum(masked_difference(scores.logp, other, batch.mask), axis=-1)
        mate = pairs(batch)
        difference = x - jnp.sum(jnp.where(mate, x[None, :], 0.0), axis=-1)
        return jnp.where(jnp.any(mate, axis=-1), difference, 0.0)

    return margin


def dpo_loss(beta: float = 0.1, *, frozen: str = "reference") -> UnitLoss:
    """`-log sigmoid(beta margin)` of each pair, f32[B], nats.

    Args:
        beta: inverse temperature of the implied reward, at least 0, per nat.
        frozen: the name of the reference in `scores.frozen`.

    References:
        Rafailov et al., Direct Preference Optimization, arXiv:2305.18290, eq. 7.
    """
    check_range("beta", beta, 0.0)
    margin = dpo_margin(frozen=frozen)

    def loss(scores: Scores, batch: Batch) -> Array:
        value = -jax.nn.log_sigmoid(beta * margin(scores, batch))
        return jnp.where(jnp.any(pairs(batch), axis=-1), value, 0.0)

    return loss
