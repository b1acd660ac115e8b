"""REINFORCE: by hand, in float64, exactly unbiased by enumeration, what must hold."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.advantages import batch_centered, monte_carlo
from rlpost.losses import drift, truncated_importance
from rlpost.methods import reinforce
from rlpost.types import Batch, Scores, total
from tests import twins
from tests.invariants import check_objective, rollouts


def test_a_number_worked_by_hand():
    # Reward 2 on log-probs -1, -3: 8. Reward -1 on -2: -2. Mean of two rows: 3.
    objective = reinforce()
    batch = Batch(
        mask=jnp.array([[True, True], [True, False]]), reward=jnp.array([2.0, -1.0])
    )
    scores = Scores(logp=jnp.array([[-1.0, -3.0], [-2.0, -9.0]]))
    terms, _ = objective.loss(scores, objective.prepare(batch))
    np.testing.assert_allclose(total(terms), 3.0)


@pytest.mark.parametrize("baseline", [0.0, 0.4])
def test_matches_a_plain_loop_in_value_and_gradient(baseline):
    data = twins.rows()
    usable = [i for i in range(twins.B) if np.isfinite(data.reward[i])]

    def loop(logp, logp_all):
        loss = bonus = divergence = 0.0
        for i in usable:
            for t in np.flatnonzero(data.mask[i]):
                loss -= (data.reward[i] - baseline) * logp[i, t]
                bonus -= (np.exp(logp_all[i, t]) * logp_all[i, t]).sum()
                x = logp[i, t] - data.reference[i, t]
                divergence += np.exp(-x) - 1 + x
        return (loss - 0.1 * bonus + 0.2 * divergence) / len(usable)

    objective = reinforce(advantage=monte_carlo(baseline), entropy=0.1, kl=0.2)
    twins.check_twin(objective, loop, data)


def every_response(logits):
    """All 9 responses of two tokens from a law that looks one token back."""
    tokens = np.array(list(itertools.product(range(3), repeat=2)))
    table = jax.nn.log_softmax(logits)  # [4, 3]: after nothing, after each id
    first = table[3][tokens[:, 0]]
    second = table[tokens[:, 0], tokens[:, 1]]
    return tokens, jnp.stack([first, second], axis=1)


@pytest.mark.parametrize(
    "advantage", [monte_carlo(), monte_carlo(3.0)], ids=["raw", "baseline"]
)
def test_the_expected_gradient_is_that_of_the_expected_reward(advantage):
    # The batch holds each response once; its probability enters through the reward
    # of the loss, which is linear in it: with a constant baseline b, p (r - b).
    logits = jnp.array(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    tokens, logp = every_response(logits)
    reward = jnp.array(tokens[:, 0] * 2.0 - tokens[:, 1] ** 2)
    prob = jnp.exp(logp.sum(-1))
    objective = reinforce(advantage=advantage)
    mask = jnp.ones(tokens.shape, bool)
    prepared = objective.prepare(Batch(mask=mask, reward=reward))
    weighed = prepared.replace(advantage=prepared.advantage * prob[:, None])

    def loss(logits):
        scores = Scores(logp=every_response(logits)[1])
        # The objective takes the mean of 9 rows, the expectation their sum.
        return len(tokens) * total(objective.loss(scores, weighed)[0])

    def expected(logits):
        return -jnp.sum(jnp.exp(every_response(logits)[1].sum(-1)) * reward)

    np.testing.assert_allclose(
        jax.grad(loss)(logits), jax.grad(expected)(logits), atol=1e-6
    )


def traced(baseline, kl, entropy):
    return reinforce(advantage=monte_carlo(baseline), kl=kl, entropy=entropy)


@pytest.mark.slow
def test_invariants():
    numbers = {"baseline": 0.3, "kl": 0.1, "entropy": 0.05}
    check_objective(traced, batch=rollouts(), numbers=numbers)


def off_policy(cap):
    weight = truncated_importance(cap, ratio=drift)
    return reinforce(advantage=batch_centered(), weights=[weight])


@pytest.mark.slow
def test_invariants_of_the_weighted_form():
    check_objective(off_policy, batch=rollouts(), numbers={"cap": 1.1})
