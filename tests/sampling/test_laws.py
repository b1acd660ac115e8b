"""What is drawn from, against float64 calculations on small vocabularies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.sampling import laws
from tests.conformance import case


def seeds(count, start=0):
    return np.stack([np.zeros(count), np.arange(start, start + count)], -1).astype(
        np.uint32
    )


def draw_many(logits, count, **filters):
    """Ids of `count` rows that share their logits [V], and the Drawn."""
    logits = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits)))
    keep = cut(logits, **filters) if filters else None
    uniform = laws.uniforms(seeds(count), np.arange(count, dtype=np.int32) % 7)
    return jax.jit(laws.draw)(logits, uniform, keep)


def cut(logits, top_k=0, top_p=1.0, min_p=0.0, ranked=True):
    full = lambda x, dtype: jnp.full(logits.shape[0], x, dtype)  # noqa: E731
    return laws.support(
        logits,
        full(top_k, jnp.int32),
        full(top_p, jnp.float32),
        full(min_p, jnp.float32),
        ranked=ranked,
    )


def chi_square(ids, probs):
    counts = np.bincount(ids, minlength=len(probs))
    assert not counts[probs == 0].any()
    expected = probs[probs > 0] * len(ids)
    return ((counts[probs > 0] - expected) ** 2 / expected).sum()


def softmax(logits):
    weight = np.exp(np.float64(logits) - np.max(logits))
    return weight / weight.sum()


@pytest.mark.parametrize("size", [1, 2, 5, 16, 37])
def test_draws_follow_the_law(size):
    logits = np.random.default_rng(size).normal(size=size) * 1.5
    drawn = draw_many(logits, 20000)
    probs = softmax(logits)
    # The statistic has mean n - 1 and variance 2 (n - 1): five deviations above.
    freedom = size - 1
    assert chi_square(drawn.token, probs) <= freedom + 5 * np.sqrt(2 * freedom)
    np.testing.assert_allclose(drawn.logp, np.log(probs)[drawn.token], atol=1e-6)
    np.testing.assert_array_equal(drawn.kept, 1.0)


def test_draws_follow_the_law_that_filters_leave():
    logits = np.random.default_rng(0).normal(size=12) * 2
    drawn = draw_many(logits, 20000, top_k=6, top_p=0.8, min_p=0.05)
    # Independently: likeliest first, k of them, mass 0.8 of theirs, ratio 0.05.
    probs = softmax(logits)
    order = np.argsort(-probs)[:6]
    mass = np.cumsum(probs[order]) / probs[order].sum()
    order = order[: np.searchsorted(mass, 0.8) + 1]
    order = order[probs[order] >= 0.05 * probs.max()]
    kept = probs[order].sum()
    law = np.zeros(12)
    law[order] = probs[order] / kept
    freedom = len(order) - 1
    assert 1 < len(order) < 6
    assert chi_square(drawn.token, law) <= freedom + 5 * np.sqrt(2 * freedom)
    np.testing.assert_allclose(drawn.logp, np.log(law[drawn.token]), atol=1e-6)
    np.testing.assert_allclose(drawn.kept, kept, rtol=1e-6)


def test_temperature_and_nucleus_conformance():
    peer = case("sampler_trainer_logprob_temperature_and_nucleus")
    given, expected = peer["inputs"], peer["expected"]
    logits = jnp.asarray([given["logits"]], jnp.float32) / given["temperature"]
    keep = cut(logits, top_p=given["top_p"])
    np.testing.assert_array_equal(np.flatnonzero(keep[0]), expected["kept_tokens"])
    # Numbers that pick the sampled token: block 0 holds it, past the first id's share.
    drawn = laws.draw(logits, jnp.array([[0.0, 0.999]]), keep)
    assert drawn.token[0] == given["sampled_token"]
    np.testing.assert_allclose(drawn.logp, expected["behaviour_logp"], atol=1e-6)
    np.testing.assert_allclose(drawn.kept, expected["kept_mass"], atol=1e-6)
    full = drawn.logp + jnp.log(drawn.kept)
    np.testing.assert_allclose(full, expected["full_vocab_logp_at_T"], atol=1e-6)


def test_filters_one_by_one():
    # Probabilities 0.4, 0.3, 0.2, 0.1.
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3]]))

    def left(**filters):
        return np.flatnonzero(cut(logits, **filters)[0]).tolist()

    assert left() == [0, 1, 2, 3]
    assert left(top_k=1) == [1]
    assert left(top_k=3) == [1, 2, 3]
    assert left(top_k=99) == [0, 1, 2, 3]
    assert left(top_p=0.39) == [1]
    assert left(top_p=0.41) == [1, 3]
    assert left(top_p=0.89) == [1, 2, 3]
    assert left(top_p=1e-9) == [1]
    assert left(min_p=0.51) == [1, 3]
    assert left(min_p=0.26) == [1, 2, 3]
    assert left(min_p=1.0, ranked=False) == [1]
    # Top-p counts mass within what top-k left: 0.4 of 0.7 is 0.571.
    assert left(top_k=2, top_p=0.57) == [1]
    assert left(top_k=2, top_p=0.58) == [1, 3]


def test_of_equals_the_lower_ids_stay():
    logits = jnp.zeros((1, 5))
    assert np.flatnonzero(cut(logits, top_k=2)[0]).tolist() == [0, 1]
    assert np.flatnonzero(cut(logits, top_p=0.5)[0]).tolist() == [0, 1, 2]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_an_id_of_probability_zero_is_never_drawn(uniform):
    # Zeros at both ends of the vocabulary and of blocks (4 wide), and a block of them.
    live = [1, 2, 9, 10]
    logits = np.full(13, -np.inf, np.float32)
    logits[live] = 0.0
    for inner in (0.0, 0.5, 1 - 2**-24):
        drawn = laws.draw(jnp.asarray(logits)[None], jnp.array([[uniform, inner]]))
        assert int(drawn.token[0]) in live
        np.testing.assert_allclose(drawn.logp, -np.log(4), rtol=1e-6)


def test_the_tail_of_a_large_vocabulary_is_within_reach():
    # Odd ids have 1 / 999 of the mass of even ones: 1.5e-8 each, far below the step of
    # one float32 uniform (6e-8). Within a block of 2^8 ids the odd id 2k + 1 owns the
    # shares [(1000 k + 999) / 128000, (k + 1) / 128).
    logits = np.zeros(2**17, np.float32)
    logits[::2] = np.log(999.0)
    k = np.arange(0, 128, 8)
    inner = (1000 * k + 999.5) / 128000
    uniform = np.stack([np.full(len(k), 0.5), inner], -1).astype(np.float32)
    drawn = laws.draw(jnp.broadcast_to(logits, (len(k), len(logits))), uniform)
    np.testing.assert_array_equal(drawn.token, 2**16 + 2 * k + 1)


def test_logits_that_are_no_numbers_give_an_id_and_a_nan():
    logits = jnp.full((1, 10), jnp.nan)
    drawn = laws.draw(logits, jnp.array([[0.3, 0.3]]))
    assert 0 <= int(drawn.token[0]) < 10
    assert np.isnan(drawn.logp[0])


def test_noise_depends_on_seed_and_position_alone():
    some = laws.uniforms(seeds(4), np.arange(4, dtype=np.int32))
    order = np.array([2, 0, 3, 1])
    other = laws.uniforms(seeds(4)[order], np.arange(4, dtype=np.int32)[order])
    np.testing.assert_array_equal(other, some[order])
    alone = laws.uniforms(seeds(4)[2:3], np.array([2], np.int32))
    np.testing.assert_array_equal(alone, some[2:3])
    assert len(np.unique(some)) == 8


def test_greedy_takes_the_lowest_of_equals():
    drawn = laws.greedy(jnp.array([[0.0, 2.0, 2.0]]))
    assert (int(drawn.token[0]), float(drawn.logp[0]), float(drawn.kept[0])) == (
        1,
        0,
        1,
    )
