"""Pairs by unit, wherever they stand, and the DPO loss of each."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.losses import dpo_loss, dpo_margin, pairs
from rlpost.types import Batch, Scores


def batch_of(unit, preferred, mask=None):
    rows = len(unit)
    return Batch(
        mask=jnp.ones((rows, 2), bool) if mask is None else jnp.array(mask),
        unit=jnp.array(unit),
        preferred=jnp.array(preferred, bool),
    )


def test_mates_are_found_in_any_order():
    batch = batch_of([7, 3, 3, 7], [0, 1, 0, 1])
    expected = np.zeros((4, 4), bool)
    expected[1, 2] = expected[3, 0] = True
    np.testing.assert_array_equal(pairs(batch), expected)


def test_what_is_no_pair_has_no_mate():
    # Unit 0: two preferred; unit 1: a lone row; unit 2: its rejected row is padding;
    # unit 3: one preferred, two rejected.
    batch = batch_of(
        [0, 0, 1, 2, 2, 3, 3, 3],
        [1, 1, 1, 1, 0, 1, 0, 0],
        mask=np.array([1, 1, 1, 1, 0, 1, 1, 1], bool)[:, None],
    )
    assert not pairs(batch).any()


def test_margin_and_loss_by_hand():
    # Chosen: policy sums to -1, reference -2: +1. Rejected: -4 against -3.5: -0.5.
    # Margin 1.5; with beta 2 the loss is ln(1 + exp(-3)).
    batch = batch_of([5, 5], [0, 1])
    scores = Scores(
        logp=jnp.array([[-3.0, -1.0], [-0.5, -0.5]]),
        frozen={"reference": Scores(logp=jnp.array([[-3.0, -0.5], [-1.0, -1.0]]))},
    )
    np.testing.assert_allclose(dpo_margin()(scores, batch), [0.0, 1.5], rtol=1e-6)
    expected = [0.0, np.log1p(np.exp(-3.0))]
    np.testing.assert_allclose(dpo_loss(2.0)(scores, batch), expected, rtol=1e-5)
    with pytest.raises(ValueError, match="beta must be in"):
        dpo_loss(-1.0)
