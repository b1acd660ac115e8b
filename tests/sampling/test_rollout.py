import numpy as np
import pytest

from rlpost.sampling.rollout import completion_mask, to_batch
from rlpost.types import Finish, Rollout
from tests.conformance import case


def rollout(**changes):
    """Two rows: a prompt of 1 and of 2 tokens, two drawn tokens each."""
    fields = {
        "tokens": np.array([[1, 5, 6, 0], [1, 2, 7, 8]], np.int32),
        "mask": np.array([[0, 1, 1, 0], [0, 0, 1, 1]], bool),
        "behavior_logp": np.array([[0, -1.0, -2.0, 0], [0, 0, -0.5, -3.0]], np.float32),
        "kept": np.array([[1, 0.5, 1, 1], [1, 1, 0.25, 1]], np.float32),
        "prompt_length": np.array([1, 2], np.int32),
        "length": np.array([3, 4], np.int32),
        "temperature": np.array([0.7, 1.0], np.float32),
        "version": np.array([3, 3], np.int32),
        "finish": np.array([Finish.STOP, Finish.LENGTH], np.int32),
    }
    return Rollout(**(fields | changes))


def test_kept_mass_is_multiplied_back():
    batch = to_batch(rollout())
    expected = [[0, -1 + np.log(0.5), -2, 0], [0, 0, -0.5 + np.log(0.25), -3]]
    np.testing.assert_allclose(batch.behavior_logp, expected, rtol=1e-6)


def test_the_ratio_of_an_unchanged_policy_is_one_conformance():
    peer = case("sampler_trainer_logprob_temperature_and_nucleus")
    values = peer["expected"]
    one = {
        "behavior_logp": np.full((2, 4), values["behaviour_logp"], np.float32),
        "kept": np.full((2, 4), values["kept_mass"], np.float32),
    }
    batch = to_batch(rollout(**one))
    ratio = np.exp(values["full_vocab_logp_at_T"] - batch.behavior_logp)
    wanted = values["importance_ratio_unchanged_policy"]
    np.testing.assert_allclose(ratio[batch.mask], wanted, atol=peer["tolerance"])


def test_rows_carry_what_losses_ask_for():
    batch = to_batch(
        rollout(), reward=[1.0, np.nan], group=[4, 4], extras={"score": np.ones((2, 3))}
    )
    assert batch.truncated.tolist() == [False, True]
    assert batch.length.tolist() == [3, 4]
    assert batch.version.tolist() == [3, 3]
    assert batch.group.tolist() == [4, 4]
    np.testing.assert_array_equal(batch.reward, np.float32([1, np.nan]))
    np.testing.assert_allclose(batch.temperature, [0.7, 1.0])
    assert batch.extras["score"].shape == (2, 3)


def test_padding_to_a_multiple_is_off_the_mask():
    extras = {"law": np.ones((2, 4, 3)), "row": np.ones(2), "few": np.ones((2, 3))}
    batch = to_batch(rollout(), multiple=16, extras=extras)
    # What belongs to the tokens keeps to them.
    shapes = {name: x.shape for name, x in batch.extras.items()}
    assert shapes == {"law": (2, 16, 3), "row": (2,), "few": (2, 3)}
    assert batch.tokens.shape == batch.mask.shape == (2, 16)
    assert not batch.mask[:, 4:].any()
    assert not batch.behavior_logp[:, 4:].any()


def test_a_failed_environment_is_never_a_reward_of_zero():
    finish = np.array([Finish.ERROR, Finish.STOP], np.int32)
    batch = to_batch(rollout(finish=finish), reward=[0.0, 0.0])
    assert np.isnan(batch.reward[0])
    assert batch.reward[1] == 0


def test_greedy_rows_are_refused():
    cold = np.array([1.0, 0.0], np.float32)
    with pytest.raises(ValueError, match=r"row 1 was sampled at temperature 0"):
        to_batch(rollout(temperature=cold))


def test_wrong_shapes_are_named():
    with pytest.raises(ValueError, match=r"reward"):
        to_batch(rollout(), reward=[1.0, 2.0, 3.0])


def test_completion_mask_conformance():
    peer = case("completion_mask_when_pad_equals_eos_and_many_eos")
    given, expected = peer["inputs"], peer["expected"]
    ids = np.array(given["completion_ids"])
    for name in "ab":
        mask, truncated = completion_mask(ids, given[f"case_{name}_eos_ids"])
        np.testing.assert_array_equal(mask, np.array(expected[f"mask_case_{name}"]) > 0)
        np.testing.assert_array_equal(truncated, expected[f"truncated_case_{name}"])
