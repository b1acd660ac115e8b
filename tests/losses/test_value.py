"""The critic: its loss by hand, its advantage, and two train states that learn."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlpost.advantages import monte_carlo, value_baseline
from rlpost.compose import regression
from rlpost.losses import value_error
from rlpost.models import DecoderSpec, decoder
from rlpost.scores import value_scores
from rlpost.training import microbatches
from rlpost.training.step import learner
from rlpost.types import Batch, Scores, total


def batch():
    """Rewards 1, 0 and unscorable; responses of 2, 3 and 1 tokens after one prompt."""
    mask = np.array([[0, 1, 1, 0], [0, 1, 1, 1], [0, 1, 0, 0]], bool)
    return Batch(
        mask=mask,
        tokens=np.array([[1, 2, 3, 99], [1, 4, 2, 3], [1, 2, 99, 99]], np.int32),
        length=np.array([3, 4, 2], np.int32),
        reward=np.array([1.0, 0.0, np.nan], np.float32),
    )


def test_error_by_hand():
    # Values .5 everywhere: (.5 - 1)^2 / 2 and (.5 - 0)^2 / 2 are both .125; the row
    # that could not be scored and the nan in padding count nowhere.
    objective = regression(value_error)
    data = objective.prepare(batch())
    value = jnp.where(batch().mask, 0.5, jnp.nan)
    terms, _ = objective.loss(Scores(logp=value, value=value), data)
    np.testing.assert_allclose(total(terms), 0.125)
    assert terms["error"].weight == 5


def test_gradient_is_the_error_over_the_count():
    objective = regression(value_error)
    data = objective.prepare(batch())

    def loss(value):
        return total(objective.loss(Scores(logp=value, value=value), data)[0])

    value = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    expected = np.where(data.mask, value - np.array([[1.0], [0.0], [0.0]]), 0) / 5
    np.testing.assert_allclose(jax.grad(loss)(jnp.array(value)), expected, rtol=1e-6)


def test_advantage_is_what_the_critic_did_not_expect():
    data = batch().replace(extras={"value": np.full((3, 4), 0.25, np.float32)})
    expected = [[0, 0.75, 0.75, 0], [0, -0.25, -0.25, -0.25], [0, 0, 0, 0]]
    np.testing.assert_allclose(value_baseline(data), expected)
    # A critic that knows nothing leaves the raw reward.
    blank = batch().replace(extras={"value": np.zeros((3, 4), np.float32)})
    np.testing.assert_allclose(value_baseline(blank), monte_carlo()(batch()))


def test_a_head_learns_the_mean_reward_in_any_split():
    policy = decoder(DecoderSpec(vocab=8, width=8, depth=1, heads=2))
    frozen = {"policy": policy.init(jax.random.key(0))}
    head = {"w": jnp.zeros((8, 1)), "b": jnp.zeros(1)}
    learn = learner(regression(value_error), value_scores(policy), optax.adam(0.1))
    data = jax.device_get(learn.prepare(batch()))
    heads = []
    for rows in (1, 3):
        state = learn.init(head)
        for _ in range(60):
            parts = microbatches.split(data, rows=rows, buckets=[])
            state, metrics = learn.update(state, {}, frozen, parts)
        heads.append(state.params)
        # The best constant has an error of .4 * .6 / 2 = .12; a head does better.
        assert metrics["loss/error"] < 0.1
    np.testing.assert_allclose(heads[0]["w"], heads[1]["w"], atol=1e-4)


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match=r"scores\.value"):
        value_error(Scores(logp=jnp.zeros((3, 4))), batch())
    with pytest.raises(ValueError, match=r'extras\["value"\]'):
        value_baseline(batch())
