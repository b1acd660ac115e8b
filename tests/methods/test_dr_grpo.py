"""Dr.GRPO: by hand, against a plain loop in float64, its limit, what must hold."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.aggregates import fixed_length
from rlpost.methods import dr_grpo, grpo
from rlpost.types import Batch, Scores, total
from tests import twins
from tests.invariants import check_objective, rollouts


def test_a_number_worked_by_hand():
    # A = +-1/2. Row 0, one token of ratio 1.5 clipped to 1.2: -0.6. Row 1, two tokens
    # of ratio 1.1 and 0.8: 0.55 + 0.4. Over 4 tokens at most and 2 rows: 0.35 / 8.
    objective = dr_grpo(max_length=4)
    batch = Batch(
        mask=jnp.array([[True, False], [True, True]]),
        reward=jnp.array([1.0, 0.0]),
        group=jnp.array([4, 4]),
        behavior_logp=jnp.zeros((2, 2)),
    )
    scores = Scores(logp=jnp.log(jnp.array([[1.5, 7.0], [1.1, 0.8]])))
    terms, _ = objective.loss(scores, objective.prepare(batch))
    np.testing.assert_allclose(total(terms), 0.35 / 8, rtol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_matches_a_plain_loop_in_value_and_gradient(seed):
    data = twins.rows(seed)
    usable = [i for i in range(twins.B) if np.isfinite(data.reward[i])]

    def loop(logp, _):
        loss = 0.0
        for i in usable:
            mates = [data.reward[j] for j in usable if data.group[j] == data.group[i]]
            advantage = data.reward[i] - np.mean(mates)
            for t in np.flatnonzero(data.mask[i]):
                ratio = np.exp(logp[i, t] - data.behavior[i, t])
                bounded = min(max(ratio, 0.8), 1.2)
                loss -= min(ratio * advantage, bounded * advantage)
        return loss / (10 * len(usable))

    twins.check_twin(dr_grpo(max_length=10), loop, data)


def test_it_is_grpo_without_its_two_divisions():
    data = twins.rows()
    scores = twins.scores_of(jnp.array(data.logits, jnp.float32), data)
    losses = [
        total(objective.loss(scores, objective.prepare(twins.batch_of(data)))[0])
        for objective in (
            dr_grpo(max_length=7, kl=0.1),
            grpo(scale=None, aggregate=fixed_length(7), kl=0.1),
        )
    ]
    np.testing.assert_array_equal(losses[0], losses[1])


def test_a_length_must_be_one():
    with pytest.raises(ValueError, match="length must be in"):
        dr_grpo(max_length=0)


def traced(max_length, low, high):
    return dr_grpo(max_length=max_length, clip=(low, high))


@pytest.mark.slow
def test_invariants():
    numbers = {"max_length": 9.0, "low": 0.2, "high": 0.2}
    check_objective(traced, batch=rollouts(), numbers=numbers)
