"""DPO: by hand, in float64, its limits, what must hold of a loss that couples rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.methods import dpo
from rlpost.types import Batch, Scores, total
from tests import twins
from tests.invariants import check_objective, preference_pairs

UNIT = np.array([4, 9, 9, 1, 1, 4], np.int32)
PREFERRED = np.array([True, False, True, True, False, False])


def batch_of(data):
    fields = {"unit": UNIT, "preferred": PREFERRED}
    return twins.batch_of(data, **fields).replace(reward=None)


def test_a_number_worked_by_hand():
    # Chosen +1 over the reference, rejected -0.5: margin 1.5, beta 2, ln(1 + e^-3).
    objective = dpo(beta=2.0)
    batch = Batch(
        mask=jnp.ones((2, 1), bool),
        unit=jnp.array([3, 3]),
        preferred=jnp.array([True, False]),
    )
    scores = Scores(
        logp=jnp.array([[-1.0], [-4.0]]),
        frozen={"reference": Scores(logp=jnp.array([[-2.0], [-3.5]]))},
    )
    terms, metrics = objective.loss(scores, objective.prepare(batch))
    np.testing.assert_allclose(total(terms), np.log1p(np.exp(-3.0)), rtol=1e-5)
    assert metrics["margin"].value == pytest.approx(1.5)
    assert metrics["accuracy"].value == 1.0


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_matches_a_plain_loop_in_value_and_gradient(beta):
    data = twins.rows()

    def loop(logp, _):
        x = ((logp - data.reference) * data.mask).sum(-1)
        losses = []
        for unit in np.unique(UNIT):
            chosen = np.flatnonzero((unit == UNIT) & PREFERRED)[0]
            rejected = np.flatnonzero((unit == UNIT) & ~PREFERRED)[0]
            losses.append(np.log1p(np.exp(-beta * (x[chosen] - x[rejected]))))
        return np.mean(losses)

    twins.check_twin(dpo(beta=beta), loop, data, batch_of(data))


def test_at_the_reference_the_loss_is_ln_2():
    data = twins.rows()
    logp = jnp.array(data.reference, jnp.float32)
    scores = Scores(logp=logp, frozen={"reference": Scores(logp=logp)})
    objective = dpo(beta=0.7)
    terms, _ = objective.loss(scores, objective.prepare(batch_of(data)))
    np.testing.assert_allclose(total(terms), np.log(2.0), rtol=1e-6)


def test_a_huge_margin_stays_finite():
    objective = dpo(beta=1.0)
    batch = Batch(
        mask=jnp.ones((2, 1), bool),
        unit=jnp.array([3, 3]),
        preferred=jnp.array([False, True]),
    )
    scores = Scores(
        logp=jnp.array([[0.0], [-1e4]]),
        frozen={"reference": Scores(logp=jnp.zeros((2, 1)))},
    )
    terms, _ = objective.loss(scores, objective.prepare(batch))
    np.testing.assert_allclose(total(terms), 1e4, rtol=1e-6)


def test_a_negative_beta_is_named():
    with pytest.raises(ValueError, match="beta must be in"):
        dpo(beta=-0.1)


@pytest.mark.slow
def test_invariants():
    check_objective(dpo, batch=preference_pairs(), numbers={"beta": 0.3})
