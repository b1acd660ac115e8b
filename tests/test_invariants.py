"""The invariants bite: objectives with one fault each are refused, by its name."""

import jax
import jax.numpy as jnp
import pytest

from rlpost.advantages import group_relative
from rlpost.compose import policy_gradient
from rlpost.losses import score_function
from rlpost.types import Mean, Objective
from tests.invariants import check_objective, rollouts


def multiplied_padding():
    """Exponentiates what stands in padding and multiplies it away."""

    def surrogate(scores, batch):
        ratio = jnp.exp(scores.logp - batch.behavior_logp) * batch.mask
        return -ratio * batch.advantage

    return policy_gradient(advantage=group_relative(), surrogate=surrogate)


def mean_of_means():
    """Takes the mean of each microbatch by itself."""
    inner = policy_gradient(advantage=group_relative(), surrogate=score_function)

    def loss(scores, batch):
        terms, metrics = inner.loss(scores, batch)
        weight = (terms["policy"].weight > 0).astype(jnp.float32)
        return {"policy": Mean(terms["policy"].value, weight)}, metrics

    return Objective(inner.prepare, loss)


def groups_by_position():
    """Believes that rows 0-3, 4-7, ... answer one prompt."""

    def advantage(batch):
        reward = jnp.where(jnp.isfinite(batch.reward), batch.reward, 0.0)
        mean = jnp.mean(reward[: len(reward) // 4 * 4].reshape(-1, 4), axis=1)
        centered = reward - jnp.repeat(mean, 4, total_repeat_length=len(reward))
        return jnp.broadcast_to(centered[:, None], batch.mask.shape)

    return policy_gradient(advantage=advantage, surrogate=score_function)


def half_precision():
    """Computes in whatever dtype it is handed."""

    def loss(scores, batch):
        x = jnp.where(batch.mask, scores.logp - batch.behavior_logp, 0.0)
        return {"policy": Mean(-jnp.sum(x), jnp.sum(batch.mask * 1.0))}, {}

    return Objective(lambda batch: batch, loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make, message",
    [
        (multiplied_padding, "nan off the mask of raw scores"),
        (mean_of_means, r"\d parts of 1 rows"),
        (groups_by_position, "another order of rows"),
        (half_precision, "bfloat16"),
    ],
)
def test_a_fault_is_found(make, message):
    with pytest.raises(AssertionError, match=message):
        check_objective(make, batch=rollouts())


@pytest.mark.slow
def test_a_number_that_cannot_be_traced_is_found():
    def branching(clip):
        assert clip > 0.1
        return policy_gradient(advantage=group_relative(), surrogate=score_function)

    with pytest.raises(jax.errors.TracerBoolConversionError):
        check_objective(branching, batch=rollouts(), numbers={"clip": 0.2})
