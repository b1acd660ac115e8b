import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rlpost.models.from_flax import from_linen, from_nnx
from rlpost.models.lora import add_lora, merge
from rlpost.scores import token_scores
from rlpost.types import Batch

TOKENS = np.random.default_rng(0).integers(0, 11, (2, 6))


class Sums(nn.Module):
    """Causal by a running mean over embeddings."""

    stateful: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = jnp.cumsum(nn.Embed(11, 8)(tokens), axis=1)
        if self.stateful:
            x = nn.BatchNorm(use_running_average=False)(x)
        x = x / jnp.arange(1, x.shape[1] + 1)[:, None]
        return nn.Dense(11)(nn.tanh(nn.Dense(16)(x)))


class Marked(nn.Module):
    """Sees positions and segments: one-hot of both beside the token's."""

    @nn.compact
    def __call__(self, tokens, positions, segments=None):
        x = nn.Embed(11, 8)(tokens) + nn.Embed(11, 8)(positions)
        if segments is not None:
            x = x * segments[..., None]
        return nn.Dense(11)(x)


class Net(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.inner = nnx.List([nnx.Linear(8, 8, rngs=rngs)])
        self.out = nnx.Linear(8, 11, rngs=rngs)
        if dropout:
            self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, tokens):
        x = jnp.cumsum(self.embed(tokens), axis=1)
        for layer in self.inner:
            x = nnx.tanh(layer(x))
        return self.out(x)


POLICIES = {
    "linen": lambda: from_linen(Sums()),
    "nnx": lambda: from_nnx(lambda rngs: Net(rngs)),
}


@pytest.mark.parametrize("kind", POLICIES)
def test_absent_tokens_and_cache_equal_the_plain_call(kind):
    policy = POLICIES[kind]()
    params = policy.init(jax.random.key(0))
    apply = jax.jit(policy.apply)
    plain = apply(params, TOKENS)[0].all_logits()
    padded = np.concatenate([np.zeros((2, 2), int), TOKENS], 1)
    positions = np.concatenate([np.full(2, -1), np.arange(6)])
    found = policy.apply(params, padded, positions)[0].all_logits()
    np.testing.assert_allclose(found[:, 2:], plain, atol=1e-6)
    cache, pieces = policy.init_cache(2, 8), []
    assert all(leaf.shape[:3] == (1, 2, 8) for leaf in jax.tree.leaves(cache))
    for start, end in [(0, 3), (3, 4), (4, 5), (5, 6)]:
        at = jnp.arange(start, end)
        law, cache = apply(params, TOKENS[:, start:end], at, cache)
        pieces.append(law.all_logits())
    np.testing.assert_allclose(np.concatenate(pieces, 1), plain, atol=1e-6)


@pytest.mark.parametrize("kind", POLICIES)
def test_parameters_are_a_plain_tree_that_trains(kind):
    policy = POLICIES[kind]()
    params = policy.init(jax.random.key(0))
    assert type(params) is dict
    mask = jnp.ones(TOKENS.shape, bool).at[:, 0].set(False)
    batch = Batch(mask=mask, tokens=jnp.asarray(TOKENS))

    def loss(params):
        return -jnp.sum(token_scores(policy)(params, {}, batch).logp)

    gradient = jax.jit(jax.grad(loss))(params)
    better = jax.tree.map(lambda p, g: p - 0.01 * g, params, gradient)
    assert loss(better) < loss(params)


@pytest.mark.parametrize("kind, target", [("linen", "kernel"), ("nnx", "out/kernel")])
def test_pairs_on_a_module_merge(kind, target):
    policy = POLICIES[kind]()
    params = policy.init(jax.random.key(0))
    pairs = add_lora(params, jax.random.key(1), 2, targets=target)
    pairs = jax.tree_util.tree_map_with_path(
        lambda path, x: x + 0.1 if str(path[-1]) == ".b" else x, pairs
    )
    found = policy.apply(pairs, TOKENS)[0].all_logits()
    expected = policy.apply(merge(pairs), TOKENS)[0].all_logits()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    plain = policy.apply(params, TOKENS)[0].all_logits()
    assert np.max(np.abs(found - plain)) > 0.01


def test_positions_and_segments_are_handed_over():
    policy = from_linen(Marked())
    variables = {"params": {}}
    variables["params"] = Marked().init(jax.random.key(0), TOKENS, TOKENS)["params"]
    positions = np.array([[0, 1, 2, 0, 1, 2]] * 2)
    segments = np.array([[1, 1, 1, 2, 2, 2]] * 2)
    found, _ = policy.apply(variables["params"], TOKENS, positions, None, segments)
    expected = Marked().apply(variables, TOKENS, positions, segments)
    np.testing.assert_allclose(found.all_logits(), expected, atol=1e-6)


def test_other_state_is_refused_by_name():
    with pytest.raises(ValueError, match=r"Sums keeps state .* batch_stats"):
        from_linen(Sums(stateful=True)).init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"Net keeps state .* dropout"):
        from_nnx(lambda rngs: Net(rngs, dropout=0.5))


def test_wrong_calls_are_refused():
    policy = POLICIES["linen"]()
    params = policy.init(jax.random.key(0))
    with pytest.raises(ValueError, match="takes positions and segments"):
        policy.apply(params, TOKENS, None, None, np.ones_like(TOKENS))
    with pytest.raises(ValueError, match="position 8 in a row of 6"):
        policy.apply(params, TOKENS, np.arange(3, 9))

    class Flat(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            return nn.Embed(11, 8)(tokens).sum(1)

    flat = from_linen(Flat())
    params = flat.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"must give logits .* \(2, 8\)"):
        flat.apply(params, TOKENS)
