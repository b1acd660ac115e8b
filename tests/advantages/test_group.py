"""Group advantages by hand, against NumPy, and the ways a group can be odd."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.advantages import (
    batch_centered,
    batch_std,
    group_mean,
    group_relative,
    group_std,
    leave_one_out,
)
from rlpost.types import Batch
from tests.conformance import case


def rows(reward, group=None, lengths=None, dtype=jnp.float32):
    reward = np.array(reward, float)
    lengths = np.full(len(reward), 1) if lengths is None else np.array(lengths)
    group = np.zeros(len(reward), int) if group is None else np.array(group)
    width = max(1, lengths.max())
    return Batch(
        mask=jnp.array(np.arange(width) < lengths[:, None]),
        reward=jnp.array(reward, dtype),
        group=jnp.array(group, jnp.int32),
    )


CONVENTIONS = {
    "population_ddof0": group_relative(group_std(ddof=0, epsilon=0.0)),
    "sample_ddof1": group_relative(group_std(ddof=1, epsilon=0.0)),
    "center_only": group_relative(None),
    "rloo": leave_one_out(),
    "maxrl_divide_by_mean": group_relative(group_mean),
}


@pytest.mark.parametrize("name", CONVENTIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_peer_case_each_convention_of_the_group_std(name, dtype):
    data = case("group_advantage_std_convention")
    batch = rows(data["inputs"]["rewards"], dtype=dtype)
    actual = CONVENTIONS[name](batch)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(
        actual[:, 0], data["expected"][name], atol=data["tolerance"]
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_peer_case_unscorable_rewards_leave_the_baseline(dtype):
    data = case("unscorable_reward_excluded_from_baseline")
    reward = [np.nan if r is None else r for r in data["inputs"]["rewards"]]
    batch = rows(reward, dtype=dtype)
    for advantage, name in [
        (group_relative(None), "centered_advantage"),
        (group_relative(group_std(epsilon=0.0)), "normalised_ddof1"),
    ]:
        np.testing.assert_allclose(
            advantage(batch)[:, 0], data["expected"][name], atol=data["tolerance"]
        )


def numpy_advantages(reward, group, scale):
    """Row by row, the mates looked up in plain Python."""
    result = np.zeros(len(reward))
    scorable = [i for i in range(len(reward)) if np.isfinite(reward[i])]
    for i in scorable:
        mates = [reward[j] for j in scorable if group[j] == group[i]]
        others = [reward[j] for j in scorable if group[j] == group[i] and j != i]
        centered = reward[i] - np.mean(mates)
        everyone = [reward[j] for j in scorable]
        if scale == "loo":
            result[i] = reward[i] - np.mean(others) if others else 0.0
        elif scale == "none":
            result[i] = centered
        elif scale == "group":
            std = np.std(mates, ddof=1) if others else 0.0
            result[i] = centered / (std + 1e-4)
        elif scale == "batch":
            result[i] = centered / (np.std(everyone, ddof=1) + 1e-4)
        elif scale == "mean":
            result[i] = centered / np.mean(mates) if np.mean(mates) > 0 else 0.0
        elif scale == "all":
            result[i] = reward[i] - np.mean(everyone)
    return result


SCALES = {
    "none": group_relative(None),
    "group": group_relative(),
    "batch": group_relative(batch_std()),
    "mean": group_relative(group_mean),
    "loo": leave_one_out(),
    "all": batch_centered(),
}


@pytest.mark.parametrize("name", SCALES)
def test_ragged_groups_in_any_order_match_numpy(name):
    rng = np.random.default_rng(0)
    group = rng.permutation([5, 5, 5, 9, 9, -1, 2, 2, 2, 2])
    reward = rng.uniform(0, 2, 10)
    reward[[1, 6]] = np.nan, np.inf
    expected = numpy_advantages(reward, group, name)
    actual = jax.jit(SCALES[name])(rows(reward, group))[:, 0]
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)

    order = rng.permutation(10)
    moved = SCALES[name](rows(reward[order], group[order]))[:, 0]
    np.testing.assert_allclose(moved, actual[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SCALES)
def test_every_token_of_a_response_gets_its_row(name):
    batch = rows([1.0, 0.0, 0.5], lengths=[3, 1, 2])
    actual = np.asarray(SCALES[name](batch))
    np.testing.assert_array_equal(actual[~np.asarray(batch.mask)], 0.0)
    for row in (0, 1, 2):
        assert len(np.unique(actual[row][np.asarray(batch.mask[row])])) == 1
    assert np.abs(actual).max() > 0.1


@pytest.mark.parametrize("name", ["none", "group", "batch", "mean", "loo"])
@pytest.mark.parametrize("reward", [0.1, 1e4 + 0.1, -0.7, 0.0])
def test_equal_rewards_and_lone_rows_give_exactly_zero(name, reward):
    # In float32 the mean of three times 0.1 is not 0.1; with epsilon 0 its rounding
    # divided by its own std would read as an advantage of about 1.
    tight = {"group": group_relative(group_std(epsilon=0.0))}
    tight |= {"batch": group_relative(batch_std(epsilon=0.0))}
    advantage = tight.get(name, SCALES[name])
    batch = rows([reward] * 3 + [5.0], group=[0, 0, 0, 1])
    np.testing.assert_array_equal(advantage(batch), 0.0)


def test_a_large_offset_does_not_drown_the_differences():
    near = group_relative(None)(rows([4096.25, 4096.0, 4096.0]))
    np.testing.assert_allclose(near[:, 0], [1 / 6, -1 / 12, -1 / 12], rtol=1e-5)


def test_leave_one_out_is_the_centered_reward_times_n_over_n_minus_1():
    batch = rows([1.0, 0.0, 0.3, 0.8, 0.1], group=[0, 1, 0, 0, 1])
    size = np.array([3, 2, 3, 3, 2])
    centered = group_relative(None)(batch)[:, 0]
    np.testing.assert_allclose(
        leave_one_out()(batch)[:, 0], centered * size / (size - 1), rtol=1e-5
    )


def test_a_row_without_tokens_is_nobodys_mate():
    batch = rows([1.0, 0.0, 100.0], lengths=[2, 1, 0])
    np.testing.assert_allclose(group_relative(None)(batch)[:2, 0], [0.5, -0.5])


def test_missing_groups_and_wrong_numbers_are_named():
    batch = rows([1.0, 0.0]).replace(group=None)
    with pytest.raises(ValueError, match=r"batch\.group"):
        group_relative()(batch)
    with pytest.raises(ValueError, match="epsilon"):
        group_std(epsilon=-1.0)
    with pytest.raises(ValueError, match="ddof"):
        batch_std(ddof=2)
