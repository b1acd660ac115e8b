"""Rewards as advantages."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.advantages import given, monte_carlo
from rlpost.types import Batch

MASK = jnp.array([[True, True], [True, False], [False, False]])


def test_the_reward_stands_on_every_token():
    batch = Batch(mask=MASK, reward=jnp.array([2.0, jnp.nan, 7.0]))
    expected = [[1.5, 1.5], [0.0, 0.0], [0.0, 0.0]]
    np.testing.assert_allclose(monte_carlo(0.5)(batch), expected)


def test_a_given_advantage_comes_as_it_is_in_float32():
    batch = Batch(mask=MASK, advantage=jnp.ones((3, 2), jnp.bfloat16))
    assert given(batch).dtype == jnp.float32
    np.testing.assert_array_equal(given(batch), 1.0)
    with pytest.raises(ValueError, match=r"batch\.advantage"):
        given(Batch(mask=MASK))
