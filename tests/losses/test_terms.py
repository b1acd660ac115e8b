"""The plainer terms and weights: score function, likelihood, entropy, truncation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.distributions import Categorical
from rlpost.losses import (
    drift,
    entropy,
    entropy_bonus,
    negative_log_likelihood,
    score_function,
    truncated_importance,
)
from rlpost.types import Batch, Scores

MASK = jnp.array([[True, True], [True, False]])
LOGP = jnp.array([[-1.0, -2.0], [-3.0, jnp.nan]])


def test_score_function_and_likelihood_by_hand():
    batch = Batch(mask=MASK, advantage=jnp.array([[2.0, 2.0], [-1.0, 0.0]]))
    scores = Scores(logp=LOGP)
    np.testing.assert_allclose(score_function(scores, batch), [[2, 4], [-3, 0]])
    np.testing.assert_allclose(negative_log_likelihood(scores, batch), [[1, 2], [3, 0]])


@pytest.mark.parametrize("term", [score_function, negative_log_likelihood])
def test_the_expected_gradient_of_the_score_is_that_of_the_expectation(term):
    # Over all actions, by probability: d/dlogits sum_a p(a) A(a) for the score
    # function; 0 for the likelihood of one's own samples.
    logits = jnp.array([0.3, -0.4, 0.9])
    advantage = jnp.array([1.0, -2.0, 0.5])
    prob = jax.nn.softmax(logits)
    batch = Batch(mask=jnp.ones((3, 1), bool), advantage=advantage[:, None])

    def loss(logits):
        logp = jax.nn.log_softmax(logits)[:, None]
        return jnp.sum(prob * term(Scores(logp=logp), batch)[:, 0])

    expected = -jax.grad(lambda x: jnp.sum(jax.nn.softmax(x) * advantage))(logits)
    if term is negative_log_likelihood:
        expected = jnp.zeros(3)
    np.testing.assert_allclose(jax.grad(loss)(logits), expected, atol=1e-6)


def test_entropy_by_hand_and_off_the_mask():
    # Odds 1:1:2 have entropy 2 (1/4 ln 4) + 1/2 ln 2 = 1.5 ln 2.
    logits = jnp.broadcast_to(jnp.log(jnp.array([1.0, 1.0, 2.0])), (2, 2, 3))
    scores = Scores(logp=LOGP, distribution=Categorical(logits=logits))
    expected = np.where(MASK, 1.5 * np.log(2), 0.0)
    batch = Batch(mask=MASK)
    np.testing.assert_allclose(entropy(scores, batch), expected, rtol=1e-6)
    np.testing.assert_allclose(entropy_bonus(scores, batch), -expected, rtol=1e-6)
    with pytest.raises(ValueError, match=r"scores\.distribution"):
        entropy(Scores(logp=LOGP), batch)


def test_truncated_weights_by_hand():
    # old / behavior = 3, capped at 2; 1/2 as it is; 1 off the mask.
    batch = Batch(
        mask=jnp.array([[True, True, False]]),
        old_logp=jnp.log(jnp.array([[0.3, 0.1, 0.5]])),
        behavior_logp=jnp.log(jnp.array([[0.1, 0.2, jnp.nan]])),
    )
    scores = Scores(logp=jnp.log(jnp.array([[0.15, 0.1, 0.5]])))
    weight = truncated_importance(2.0)(scores, batch)
    np.testing.assert_allclose(weight, [[2.0, 0.5, 1.0]], rtol=1e-6)
    # Of the current policy instead: 0.15 / 0.1 and 0.1 / 0.2.
    weight = truncated_importance(2.0, ratio=drift)(scores, batch)
    np.testing.assert_allclose(weight, [[1.5, 0.5, 1.0]], rtol=1e-6)
    huge = batch.replace(behavior_logp=batch.behavior_logp - 500.0)
    np.testing.assert_allclose(
        truncated_importance(2.0)(scores, huge)[0, :2], 2.0, rtol=1e-6
    )


def test_truncated_weights_name_what_they_lack():
    with pytest.raises(ValueError, match="cap must be in"):
        truncated_importance(0.0)
    batch = Batch(mask=MASK, behavior_logp=LOGP)
    with pytest.raises(ValueError, match=r"batch\.old_logp"):
        truncated_importance()(Scores(logp=LOGP), batch)


def test_with_a_cap_wide_open_the_weight_undoes_the_sampler():
    # Actions drawn from b, weighed by p / b: the mean of A is the one under p.
    p, b = np.array([0.2, 0.3, 0.5]), np.array([0.5, 0.25, 0.25])
    advantage = np.array([1.0, 4.0, -2.0])
    batch = Batch(
        mask=jnp.ones((3, 1), bool),
        old_logp=jnp.log(p)[:, None],
        behavior_logp=jnp.log(b)[:, None],
    )
    scores = Scores(logp=batch.old_logp)
    weight = truncated_importance(100.0)(scores, batch)[:, 0]
    np.testing.assert_allclose(
        np.sum(b * weight * advantage), np.sum(p * advantage), rtol=1e-5
    )
