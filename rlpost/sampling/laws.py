"""What the sampler draws from: noise, cut support, and the draw itself.

Temperature comes first, then top-k, top-p on what top-k left, and min-p: the order of
Hugging Face's generation (vLLM applies min-p before the two; the sets differ only where
min-p cuts more than they do, since then top-p counts other mass).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rlpost.types import Array


class Drawn(NamedTuple):
    """One token of each row: ids i32[B], log-probs f32[B] in nats, kept mass f32[B]."""

    token: Array
    logp: Array
    kept: Array


def uniforms(seed: Array, position: Array) -> Array:
    """f32[B, 2] in [0, 1): the noise of the token at a row's position.

    It depends on the row's seed and position alone. The generator is named, since with
    others (`rbg`) a row's noise would change with its neighbours under `vmap`.

    Args:
        seed: u32[B, 2], high and low words of a 64-bit seed.
        position: i32[B].
    """

    def one(words: Array, position: Array) -> Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, position), (2,))

    return jax.vmap(one)(seed, position)


def support(
    logits: Array, top_k: Array, top_p: Array, min_p: Array, *, ranked: bool = True
) -> Array:
    """bool[B, V]: the ids that the filters leave; the likeliest one always stays.

    Of ids equally likely, the lower ids stay, so that top-k keeps k of them.

    Args:
        logits: f32[B, V], at the temperature.
        top_k: i32[B], how many ids stay; 0 means all.
        top_p: f32[B] in (0, 1], the likeliest ids stay until their mass reaches it.
        min_p: f32[B] in [0, 1], ids less likely than this times the likeliest go.
        ranked: static; False leaves out top-k and top-p, and the sort that they need.

    References:
        Fan et al., Hierarchical Neural Story Generation, arXiv:1805.04833 (top-k);
        Holtzman et al., The Curious Case of Neural Text Degeneration, arXiv:1904.09751
        (top-p); Nguyen et al., Turning Up the Heat, arXiv:2407.01082 (min-p).
    """
    top = jnp.max(logits, axis=-1, keepdims=True)
    keep = logits >= top + jnp.log(min_p)[:, None]
    if not ranked:
        return keep
    size = logits.shape[-1]
    ids = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), logits.shape)
    falling, order = jax.lax.sort((-logits, ids), num_keys=1, is_stable=True)
    allowed = jnp.where(top_k > 0, top_k, size)[:, None]
    weight = jnp.where(ids < allowed, jnp.exp(-falling - top), 0.0)
    mass = jnp.cumsum(weight, axis=-1)
    before = mass - weight  # of the likelier ids
    top_p = top_p[:, None]
    stays = (ids < allowed) & ((before < top_p * mass[:, -1:]) | (top_p >= 1.0))
    last = jnp.maximum(jnp.sum(stays, axis=-1, keepdims=True) - 1, 0)
    edge = -jnp.take_along_axis(falling, last, axis=-1)
    edge_id = jnp.take_along_axis(order, last, axis=-1)
    return keep & ((logits > edge) | ((logits == edge) & (ids <= edge_id)))


def draw(logits: Array, uniform: Array, keep: Array | None = None) -> Drawn:
    """Draw an id of each row by inverting the distribution function, in two levels.

    A first number picks a block of ids by the blocks' mass, a second an id within it:
    no sort, no noise over the vocabulary, and an id in the far tail is found as
    precisely as any other (one float32 number has too few bits for 10^5 ids). An id of
    probability 0 is never drawn.

    Args:
        logits: f32[B, V], at the temperature.
        uniform: f32[B, 2] in [0, 1).
        keep: bool[B, V], the support; None means all ids.

    Returns:
        Ids, their log-probs under the law drawn from (that of the support), and the
        share of probability that the support holds.
    """
    top = jnp.max(logits, axis=-1)
    weight = jnp.exp(logits - top[:, None])
    kept = jnp.ones_like(top)
    if keep is not None:
        whole = jnp.sum(weight, axis=-1)
        cut = jnp.any(~keep & (weight > 0), axis=-1)
        weight = jnp.where(keep, weight, 0.0)
        # Selected, so that it is 1 and not nearly 1 where nothing was cut.
        kept = jnp.where(cut, jnp.sum(weight, axis=-1) / whole, 1.0)
    size = logits.shape[-1]
    width = 2 ** ((size - 1).bit_length() // 2)  # about the square root
    blocks = -(-size // width)
    grid = jnp.pad(weight, ((0, 0), (0, blocks * width - size)))
    grid = grid.reshape(-1, blocks, width)
    mass = jnp.sum(grid, axis=-1)
    block = _invert(mass, uniform[:, 0])
    inside = _invert(
        jnp.take_along_axis(grid, block[:, None, None], axis=1)[:, 0], uniform[:, 1]
    )
    # Logits that are not numbers give some id of the vocabulary, and a nan log-prob.
    token = jnp.minimum(block * width + inside, size - 1)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return Drawn(token, chosen - top - jnp.log(jnp.sum(mass, axis=-1)), kept)


def greedy(logits: Array) -> Drawn:
    """The likeliest id of each row, the lowest of equals, drawn with certainty."""
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    zero = jnp.zeros(token.shape, jnp.float32)
    return Drawn(token, zero, zero + 1.0)


def _invert(weight: Array, uniform: Array) -> Array:
    """i32[B]: the first entry at which the sum of weights [B, n] passes its share."""
    below = jnp.cumsum(weight, axis=-1)
    positive = weight > 0
    passed = (below > uniform[:, None] * below[:, -1:]) & positive
    # Rounding may leave none: then it is the last one that has any weight.
    last = weight.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    first = jnp.argmax(passed, axis=-1)
    return jnp.where(jnp.any(passed, axis=-1), first, last).astype(jnp.int32)
