"""SFT: by hand, in float64, packed rows equal to unpacked ones, what must hold."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.aggregates import sequence_mean
from rlpost.distributions import Categorical
from rlpost.methods import sft
from rlpost.types import Batch, Scores, total
from tests import twins
from tests.conformance import case
from tests.invariants import check_objective, rollouts


def test_a_number_worked_by_hand():
    # Four log-probs, mean -(1 + 2 + 3 + 4) / 4; by example ((1 + 2 + 3) / 3 + 4) / 2.
    batch = Batch(mask=jnp.array([[True, True, True], [True, False, False]]))
    scores = Scores(logp=jnp.array([[-1.0, -2.0, -3.0], [-4.0, -9.0, -9.0]]))
    for aggregate, expected in [({}, 2.5), ({"aggregate": sequence_mean}, 3.0)]:
        objective = sft(**aggregate)
        terms, _ = objective.loss(scores, objective.prepare(batch))
        np.testing.assert_allclose(total(terms), expected, rtol=1e-6)


def test_matches_numpy_in_value_and_gradient():
    # The reward of likelihood data means nothing: the row without one trains too.
    data = twins.rows()
    weight = np.array([1.0, 2.0, 0.5, 1.0, 0.0, 3.0])
    batch = twins.batch_of(data, extras={"weight": weight.astype(np.float32)})
    twins.check_twin(sft(), lambda logp, _: -logp[data.mask].mean(), data, batch)
    twins.check_twin(
        sft(row_weight=lambda batch: batch.extras["weight"]),
        lambda logp, _: -(logp * weight[:, None])[data.mask].mean(),
        data,
        batch,
    )


def test_packed_rows_give_the_loss_of_the_sequences_apart():
    data = case("packed_next_token_labels")
    given, expected = data["inputs"], data["expected"]
    bounds = given["cu_seqlens"]
    ids = np.array(given["packed_token_ids"])
    raw = np.array(given["logits_row_t_predicts_t_plus_1"])
    objective = sft()

    def loss(tokens, logits, segment=None):
        mask = np.ones((1, len(tokens)), bool)
        mask[0, 0] = False  # nothing stands before the first token of a row
        batch = objective.prepare(
            Batch(
                mask=jnp.array(mask),
                segment=None if segment is None else jnp.array(segment)[None],
            )
        )
        law = Categorical(logits=jnp.array(logits)[None]).shift()
        scores = Scores(logp=law.logp(jnp.array(tokens)[None]))
        return objective.loss(scores, batch)[0]["likelihood"]

    packed = loss(ids, raw, np.repeat([1, 2], np.diff(bounds)))
    apart = [loss(ids[a:b], raw[a:b]) for a, b in itertools.pairwise(bounds)]
    np.testing.assert_allclose(packed.value, (apart[0] + apart[1]).value, rtol=1e-6)
    np.testing.assert_allclose(
        packed.total, -sum(expected["sum_logp_per_sequence"]), atol=data["tolerance"]
    )


def weighted():
    return sft(row_weight=lambda batch: batch.extras["weight"])


@pytest.mark.slow
@pytest.mark.parametrize("make", [sft, weighted])
def test_invariants(make):
    check_objective(make, batch=rollouts())
