"""GRPO: by hand, against a plain loop in float64, its limits, and what must hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.advantages import batch_std, group_mean, group_relative, group_std
from rlpost.aggregates import token_mean
from rlpost.losses import k2, truncated_importance, unbiased_k3
from rlpost.masks import drop_truncated
from rlpost.methods import grpo, reinforce
from rlpost.types import Batch, Scores, total
from tests import twins
from tests.invariants import check_objective, rollouts


def test_a_number_worked_by_hand():
    # Rewards 1 and 0: mean 1/2, std (ddof 1) sqrt(1/2), A = +-1/sqrt(2) (epsilon 0).
    # Row 0, one token, ratio 1.5, clipped at 1.2: -1.2 A. Row 1, two tokens of ratio
    # 1.1 and 0.5, the second raised to 0.8: mean(1.1, 0.8) |A|.
    # Mean over rows: (-1.2 + 0.95) / 2 / sqrt(2).
    objective = grpo(scale=group_std(epsilon=0.0))
    batch = Batch(
        mask=jnp.array([[True, False], [True, True]]),
        reward=jnp.array([1.0, 0.0]),
        group=jnp.array([4, 4]),
        behavior_logp=jnp.zeros((2, 2)),
    )
    scores = Scores(logp=jnp.log(jnp.array([[1.5, 7.0], [1.1, 0.5]])))
    terms, metrics = objective.loss(scores, objective.prepare(batch))
    np.testing.assert_allclose(total(terms), -0.125 / np.sqrt(2), rtol=1e-5)
    np.testing.assert_allclose(metrics["clip_fraction"].value, 2 / 3, rtol=1e-6)


def loop(data, logp, *, old, clip, beta, divisor, estimator):
    """Equation 3 of the paper, row by row."""
    usable = [i for i in range(len(data.reward)) if np.isfinite(data.reward[i])]
    loss = 0.0
    for i in usable:
        mates = [data.reward[j] for j in usable if data.group[j] == data.group[i]]
        advantage = (data.reward[i] - np.mean(mates)) / divisor(mates)
        per_token = []
        for t in np.flatnonzero(data.mask[i]):
            ratio = np.exp(logp[i, t] - old[i, t])
            bounded = min(max(ratio, 1 - clip[0]), 1 + clip[1])
            x = logp[i, t] - data.reference[i, t]
            surrogate = min(ratio * advantage, bounded * advantage)
            per_token.append(-surrogate + beta * estimator(x))
        loss += np.mean(per_token) / len(usable)
    return loss


def sample_std(mates):
    return np.std(mates, ddof=1) + 1e-4


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "options, parts",
    [
        ({}, {}),
        ({"clip": (0.1, 0.5)}, {"clip": (0.1, 0.5)}),
        ({"kl": 0.04}, {"beta": 0.04}),
        (
            {"kl": 0.3, "kl_estimator": k2},
            {"beta": 0.3, "estimator": lambda x: x * x / 2},
        ),
        (
            {"scale": group_std(ddof=0, epsilon=0.01)},
            {"divisor": lambda mates: np.std(mates) + 0.01},
        ),
        ({"scale": group_mean}, {"divisor": np.mean}),
        ({"scale": None}, {"divisor": lambda mates: 1.0}),
        (
            {"scale": batch_std()},
            {"divisor": lambda mates: np.std([1.0, 0, 0.5, 1, 0], ddof=1) + 1e-4},
        ),
    ],
)
def test_matches_a_plain_loop_in_value_and_gradient(options, parts, seed):
    data = twins.rows(seed)
    parts = {
        "old": data.behavior,
        "clip": (0.2, 0.2),
        "beta": 0.0,
        "divisor": sample_std,
        "estimator": lambda x: np.exp(-x) - 1 + x,
    } | parts
    twins.check_twin(grpo(**options), lambda logp, _: loop(data, logp, **parts), data)


def test_the_trainers_own_old_policy_takes_the_samplers_place():
    data = twins.rows()
    batch = twins.batch_of(data, old_logp=data.old.astype(np.float32))
    parts = {"clip": (0.2, 0.2), "beta": 0.0, "divisor": sample_std}

    def twin(logp, _):
        return loop(data, logp, old=data.old, estimator=np.zeros_like, **parts)

    twins.check_twin(grpo(), twin, data, batch)


def test_truncated_importance_matches_a_plain_loop_in_value_and_gradient():
    # A sampler further off, so that some weights are above the cap and some below.
    data = twins.rows()
    data.behavior = data.old + np.random.default_rng(5).normal(size=data.old.shape)
    batch = twins.batch_of(data, old_logp=data.old.astype(np.float32))
    mismatch = np.exp(data.old - data.behavior)
    kept = data.mask & np.isfinite(data.reward)[:, None]
    assert 0.2 < np.mean(mismatch[kept] > 1.3) < 0.8

    def twin(logp, _):
        loss = 0.0
        for i in np.flatnonzero(kept.any(-1)):
            mates = data.reward[kept.any(-1) & (data.group == data.group[i])]
            advantage = (data.reward[i] - np.mean(mates)) / sample_std(mates)
            for t in np.flatnonzero(kept[i]):
                ratio = np.exp(logp[i, t] - data.old[i, t])
                bounded = min(max(ratio, 0.8), 1.2)
                surrogate = min(ratio * advantage, bounded * advantage)
                loss -= min(mismatch[i, t], 1.3) * surrogate
        return loss / kept.sum()

    objective = grpo(weights=[truncated_importance(1.3)], aggregate=token_mean)
    twins.check_twin(objective, twin, data, batch)


def test_on_policy_with_a_wide_band_it_is_reinforce_with_a_group_baseline():
    data = twins.rows()
    logits = jnp.array(data.logits, jnp.float32)
    logp = twins.scores_of(logits, data).logp
    batch = twins.batch_of(data, behavior_logp=logp)

    def gradient(objective):
        prepared = objective.prepare(batch)
        return jax.grad(
            lambda x: total(objective.loss(twins.scores_of(x, data), prepared)[0])
        )(logits)

    wide = grpo(clip=(1.0, 1e6), aggregate=token_mean)
    plain = reinforce(advantage=group_relative(), aggregate=token_mean)
    np.testing.assert_allclose(gradient(wide), gradient(plain), atol=1e-7)


def test_equal_rewards_move_nothing():
    data = twins.rows()
    batch = twins.batch_of(data, reward=np.full(twins.B, 0.1, np.float32))
    objective = grpo()
    prepared = objective.prepare(batch)
    gradient = jax.grad(
        lambda x: total(objective.loss(twins.scores_of(x, data), prepared)[0])
    )(jnp.array(data.logits, jnp.float32))
    np.testing.assert_array_equal(gradient, 0.0)


def test_wrong_numbers_are_named():
    with pytest.raises(ValueError, match="low must be in"):
        grpo(clip=(2.0, 0.2))
    with pytest.raises(ValueError, match="kl must be in"):
        grpo(kl=-0.1)


def traced(low, high, kl):
    return grpo(
        clip=(low, high), kl=kl, kl_estimator=unbiased_k3, masks=[drop_truncated]
    )


@pytest.mark.slow
def test_invariants():
    numbers = {"low": 0.2, "high": 0.3, "kl": 0.1}
    check_objective(traced, batch=rollouts(), numbers=numbers)
