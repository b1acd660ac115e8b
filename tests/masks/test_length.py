"""Truncated responses leave the loss; what that does to its denominator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.advantages import given
from rlpost.aggregates import (
    kept_sequence_mean,
    kept_token_mean,
    sequence_mean,
    token_mean,
)
from rlpost.compose import policy_gradient
from rlpost.masks import drop_truncated
from rlpost.types import Batch, Scores, total
from tests.conformance import case

DATA = case("masked_truncated_completion_denominator")
GIVEN, EXPECTED = DATA["inputs"], DATA["expected"]


def loss_of(aggregate, truncated, dtype=jnp.float32):
    """The case's losses, as -A logp with logp -1; also the gradient by logp."""
    objective = policy_gradient(
        advantage=given,
        surrogate=lambda scores, batch: scores.logp * -batch.advantage,
        masks=[drop_truncated],
        aggregate=aggregate,
    )
    mask = jnp.array(GIVEN["mask"], bool)
    batch = objective.prepare(
        Batch(
            mask=mask,
            advantage=jnp.array(GIVEN["per_token_loss"], dtype),
            truncated=jnp.array(truncated, bool),
        )
    )

    def loss(logp):
        return total(objective.loss(Scores(logp=logp), batch)[0])

    return jax.value_and_grad(loss)(jnp.full(mask.shape, -1.0, dtype))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_peer_case_a_dropped_completion_leaves_both_sides(dtype):
    for aggregate, name in [
        (kept_token_mean, "token_mean"),
        (kept_sequence_mean, "seq_mean_token_mean_over_kept"),
    ]:
        value, gradient = loss_of(aggregate, GIVEN["truncated"], dtype)
        np.testing.assert_allclose(value, EXPECTED[name], atol=DATA["tolerance"])
        np.testing.assert_array_equal(gradient[2], 0.0)
    unfiltered = DATA["known_wrong"]["token_mean_with_unfiltered_denominator"]
    value, _ = loss_of(token_mean, GIVEN["truncated"], dtype)
    np.testing.assert_allclose(value, unfiltered, atol=DATA["tolerance"])


@pytest.mark.parametrize(
    "aggregate", [kept_token_mean, kept_sequence_mean, token_mean, sequence_mean]
)
def test_peer_case_when_all_are_dropped_nothing_moves(aggregate):
    value, gradient = loss_of(aggregate, [1, 1, 1])
    np.testing.assert_array_equal(value, EXPECTED["all_truncated_batch_loss"])
    np.testing.assert_array_equal(gradient, 0.0)


def test_what_is_missing_is_named():
    batch = Batch(mask=jnp.ones((1, 1), bool))
    with pytest.raises(ValueError, match=r"batch\.truncated"):
        drop_truncated(Scores(logp=jnp.zeros((1, 1))), batch)
