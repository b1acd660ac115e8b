"""RLOO: by hand, in float64, its identity with the centered reward, what must hold."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.advantages import group_relative
from rlpost.methods import reinforce, rloo
from rlpost.types import Batch, Scores, total
from tests import twins
from tests.invariants import check_objective, rollouts


def test_a_number_worked_by_hand():
    # Rewards 1, 0, 0.5 of one prompt: A = 1 - 0.25, 0 - 0.75, 0.5 - 0.5. Log-probs -1,
    # -2, -3: (0.75 - 1.5 + 0) / 3.
    objective = rloo()
    batch = Batch(
        mask=jnp.ones((3, 1), bool),
        reward=jnp.array([1.0, 0.0, 0.5]),
        group=jnp.zeros(3, jnp.int32),
    )
    scores = Scores(logp=jnp.array([[-1.0], [-2.0], [-3.0]]))
    terms, _ = objective.loss(scores, objective.prepare(batch))
    np.testing.assert_allclose(total(terms), -0.25, rtol=1e-6)


@pytest.mark.parametrize("seed", [0, 1])
def test_matches_a_plain_loop_in_value_and_gradient(seed):
    data = twins.rows(seed)
    usable = [i for i in range(twins.B) if np.isfinite(data.reward[i])]

    def loop(logp, _):
        loss = 0.0
        for i in usable:
            others = [
                data.reward[j]
                for j in usable
                if j != i and data.group[j] == data.group[i]
            ]
            loss -= (data.reward[i] - np.mean(others)) * logp[i][data.mask[i]].sum()
        return loss / len(usable)

    twins.check_twin(rloo(), loop, data)


def test_in_equal_groups_it_is_the_centered_reward_times_n_over_n_minus_1():
    rng = np.random.default_rng(0)
    mask = jnp.ones((8, 3), bool)
    batch = Batch(
        mask=mask,
        reward=jnp.array(rng.uniform(size=8), jnp.float32),
        group=jnp.array([0, 1, 0, 1, 0, 1, 0, 1]),
    )
    scores = Scores(logp=jnp.array(rng.normal(size=(8, 3)), jnp.float32))
    ours, centered = (
        total(objective.loss(scores, objective.prepare(batch))[0])
        for objective in (rloo(), reinforce(advantage=group_relative(None)))
    )
    np.testing.assert_allclose(ours, centered * 4 / 3, rtol=1e-5)


@pytest.mark.slow
def test_invariants():
    check_objective(rloo, batch=rollouts(), numbers={"kl": 0.1})
