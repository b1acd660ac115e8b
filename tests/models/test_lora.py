import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlpost.models import DecoderSpec, decoder
from rlpost.models.linear import LowRank, Quantised, is_matrix, quantise
from rlpost.models.lora import PAIRS, add_lora, lora, merge
from rlpost.models.paths import join, partition, paths

SPEC = DecoderSpec(vocab=19, width=16, depth=2, heads=4, kv_heads=2, ff=24)
POLICY = decoder(SPEC)
TOKENS = np.random.default_rng(0).integers(0, 19, (2, 7))


@functools.cache
def base():
    return jax.jit(POLICY.init)(jax.random.key(0))


@functools.cache
def adapted():
    """A pair on every matrix, b moved off zero."""
    params = add_lora(base(), jax.random.key(1), 2, alpha=3.0)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: x + 0.1 if path[-1] == jax.tree_util.GetAttrKey("b") else x,
        params,
    )


def quantised(params, bits=8):
    def some(w):
        return quantise(w, bits, 4) if w.ndim == 3 else w

    return jax.tree.map(some, params)


@jax.jit
def logits(params):
    return POLICY.apply(params, TOKENS)[0].all_logits()


def test_a_new_pair_changes_nothing():
    params = lora(POLICY, 2).init(jax.random.key(0))
    alone = POLICY.init(jax.random.split(jax.random.key(0))[0])
    np.testing.assert_array_equal(logits(params), logits(alone))
    layer = params["layers"]["attention"]["q"]
    assert isinstance(layer, LowRank)
    assert layer.a.shape == (2, 16, 2)
    assert layer.b.shape == (2, 2, 16)
    assert layer.scale == 1.0


def test_merging_is_the_same_network():
    merged = merge(adapted())
    assert not any(map(is_matrix, jax.tree.leaves(merged, is_leaf=is_matrix)))
    assert jax.tree.structure(merged) == jax.tree.structure(base())
    np.testing.assert_allclose(logits(merged), logits(adapted()), atol=1e-5)
    assert np.max(np.abs(logits(merged) - logits(base()))) > 0.1


def test_merging_is_exact_by_hand():
    # 1 + 3/2 * (1, 2) . (0.5, 0.25) = 1 + 1.5 * 1.0
    a, b = jnp.array([[1.0, 2.0]]), jnp.array([[0.5], [0.25]])
    found = merge({"q": LowRank(jnp.ones((1, 1)), a, b, 1.5)})
    np.testing.assert_array_equal(found["q"], [[2.5]])


def test_pairs_stay_float32_on_a_half_precision_base():
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), base())
    params = add_lora(half, jax.random.key(1), 2)
    q = params["layers"]["attention"]["q"]
    assert (q.base.dtype, q.a.dtype, q.b.dtype) == (jnp.bfloat16, *[jnp.float32] * 2)
    assert merge(params)["layers"]["attention"]["q"].dtype == jnp.bfloat16
    wide = merge(params, jnp.float32)["layers"]["attention"]["q"]
    assert wide.dtype == jnp.float32


@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_decoder_with_pairs_decodes_as_it_scores(bits):
    params = jax.tree.map(
        lambda w: w.replace(base=quantise(w.base, bits, 4)) if is_matrix(w) else w,
        adapted(),
        is_leaf=is_matrix,
    )
    assert isinstance(params["layers"]["mlp"]["up"].base, Quantised)
    whole = logits(params)
    cache, step = POLICY.init_cache(2, 7), jax.jit(POLICY.apply)
    law, cache = step(params, TOKENS[:, :4], None, cache)
    pieces = [law.all_logits()]
    for t in range(4, 7):
        law, cache = step(params, TOKENS[:, t : t + 1], jnp.full((2, 1), t), cache)
        pieces.append(law.all_logits())
    np.testing.assert_allclose(np.concatenate(pieces, 1), whole, atol=1e-5)
    np.testing.assert_allclose(logits(merge(params)), whole, atol=1e-5)


def test_quantised_weights_change_little():
    exact = logits(base())
    eight, four = (np.abs(logits(quantised(base(), b)) - exact) for b in (8, 4))
    assert 0 < np.max(eight) < 0.05 * np.std(exact)
    assert np.max(eight) < np.max(four) < np.std(exact)


def test_only_pairs_train_and_their_gradient_is_that_of_the_merged_matrix():
    trained, held = partition(adapted(), PAIRS)
    assert all(re.search(r"/(a|b)$", name) for name in paths(trained))
    assert len(jax.tree.leaves(trained)) == 2 * 7

    def loss(logits):
        return jnp.sum(jnp.sin(logits))

    gradient = jax.jit(jax.grad(lambda mine, rest: loss(logits(join(mine, rest)))))
    found = gradient(trained, held)
    through = jax.jit(jax.grad(lambda p: loss(logits(p))))(merge(adapted()))
    pair, matrix = found["layers"]["mlp"]["down"], through["layers"]["mlp"]["down"]
    a = np.asarray(adapted()["layers"]["mlp"]["down"].a)
    expected = 1.5 * np.einsum("lir,lio->lro", a, matrix)
    np.testing.assert_allclose(pair.b, expected, rtol=1e-3, atol=1e-4)


def test_an_embedding_takes_a_pair_too():
    params = add_lora(base(), jax.random.key(1), 2, targets="^embed$")
    params["embed"] = params["embed"].replace(b=params["embed"].b + 0.1)
    np.testing.assert_allclose(logits(params), logits(merge(params)), atol=1e-5)


def test_pairs_by_key():
    one, two = (add_lora(base(), jax.random.key(k), 2) for k in (1, 2))
    for name in ("attention", "mlp"):
        for a, b in zip(
            one["layers"][name].values(), two["layers"][name].values(), strict=True
        ):
            assert not np.any(np.asarray(a.a) == np.asarray(b.a))
    draws = [w.a for w in one["layers"]["attention"].values()]
    assert not np.any(draws[0] == draws[1])


@pytest.mark.parametrize(
    "targets, message",
    [("query", r"no parameter matches .* embed"), ("/q_norm|^norm$", "needs a matrix")],
)
def test_wrong_targets_are_named(targets, message):
    with pytest.raises(ValueError, match=message):
        add_lora(base(), jax.random.key(0), 2, targets=targets)


def test_rank_must_be_positive():
    with pytest.raises(ValueError, match="rank"):
        lora(POLICY, 0)
