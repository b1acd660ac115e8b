"""The decoder: a transformer of chosen parts as a Policy over plain arrays.

Parameters: `embed` [V, D], `layers` (every leaf leads with [L]), `norm` [D], and `head`
[D, V] where it does not share the embedding. Layers are scanned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlpost.distributions import Categorical
from rlpost.models import attention, parts
from rlpost.models.linear import linear, linear_transposed, rows
from rlpost.types import Array, Cache, Params, Policy


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """What a decoder is made of: sizes, numbers, and parts.

    Attributes:
        vocab, width, depth, heads: V, D, L, H.
        kv_heads: K, heads of keys and values; 0 means H.
        head_size: 0 means D / H.
        ff: inner width of the MLP; 0 means 4 D.
        tied: the output head is the embedding.
        qkv_bias: queries, keys and values have a bias (Qwen2.5).
        qk_norm: each head of queries and keys is normalised (Qwen3).
        eps: of the norms.
        rope_base: of the rotary positions; a number, or one for each layer.
        rope_scaling: None, `Llama3Scaling` or `Divided`.
        window: how many positions back a layer sees, its own included; 0 means all; a
            number, or one for each layer.
        context: the longest row the weights were trained for; 0 means not known.
        norm, attention, mlp, block: the parts (see `rlpost.models.parts`).
    """

    vocab: int
    width: int
    depth: int
    heads: int
    kv_heads: int = 0
    head_size: int = 0
    ff: int = 0
    tied: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    eps: float = 1e-6
    rope_base: float | tuple[float, ...] = 10000.0
    rope_scaling: attention.Llama3Scaling | attention.Divided | None = None
    window: int | tuple[int, ...] = 0
    context: int = 0
    norm: parts.Part = dataclasses.field(default=parts.RMS_NORM, repr=False)
    attention: parts.Part = dataclasses.field(default=parts.ATTENTION, repr=False)
    mlp: parts.Part = dataclasses.field(default=parts.GATED_MLP, repr=False)
    block: parts.Part = dataclasses.field(default=parts.PRE_NORM, repr=False)

    def __post_init__(self) -> None:
        for name in ("vocab", "width", "depth", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1: {getattr(self, name)}")
        if not self.head_size and self.width % self.heads:
            raise ValueError(
                f"heads={self.heads} do not divide width={self.width}: set head_size"
            )
        sizes = {
            "kv_heads": self.kv_heads or self.heads,
            "head_size": self.head_size or self.width // self.heads,
            "ff": self.ff or 4 * self.width,
        }
        for name, size in sizes.items():
            object.__setattr__(self, name, size)
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads={self.kv_heads} must divide heads={self.heads}")
        if self.head_size % 2:
            raise ValueError(f"head_size={self.head_size} must be even to be rotated")
        for name in ("rope_base", "window"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, value := tuple(value))
            if isinstance(value, tuple) and len(value) != self.depth:
                raise ValueError(
                    f"{name} has {len(value)} entries for depth={self.depth} layers"
                )

    @property
    def rope_bases(self) -> tuple[float, ...]:
        """One for each layer."""
        base = self.rope_base
        return base if isinstance(base, tuple) else (base,) * self.depth

    @property
    def windows(self) -> tuple[int, ...]:
        """One for each layer; 0 means all positions."""
        window = self.window
        return window if isinstance(window, tuple) else (window,) * self.depth


def decoder(
    spec: DecoderSpec,
    *,
    dtype: Any = jnp.float32,
    param_dtype: Any = jnp.float32,
    remat: str | Callable[..., Any] | None = None,
) -> Policy:
    """The Policy of a decoder.

    Its law is lazy: hidden states and the output matrix, never logits. The cache is
    `{"key", "value"}` of [L, B, S, K, head_size] in `dtype`; a row's token at position
    p is written to slot p, positions outside [0, S) to none.

    Args:
        spec: its parts.
        dtype: of activations and cache; norms, softmax and rotation are float32.
        param_dtype: of the parameters that `init` makes (`apply` takes any).
        remat: None keeps what the backward pass needs, "full" only each layer's input;
            or a policy of `jax.checkpoint_policies`.

    Raises:
        ValueError: if `remat` is none of these.
    """
    if not (remat is None or remat == "full" or callable(remat)):
        raise ValueError(f"remat must be None, 'full' or a policy, got {remat!r}")

    def init(key: Array) -> Params:
        embed, layers, head = jax.random.split(key, 3)
        params = {
            "embed": jax.random.normal(embed, (spec.vocab, spec.width))
            * spec.width**-0.5,
            "layers": spec.block.init(layers, spec),
            # One norm more, of which there are depth.
            "norm": jax.tree.map(lambda x: x[0], spec.norm.init(key, spec)),
        }
        if not spec.tied:
            params["head"] = parts.matrix(head, spec.width, spec.vocab)
        return jax.tree.map(lambda x: x.astype(param_dtype), params)

    def apply(
        params: Params,
        tokens: Array,
        positions: Array | None = None,
        cache: Cache = None,
        segments: Array | None = None,
    ) -> tuple[Categorical, Cache]:
        if cache is not None and segments is not None:
            raise ValueError(
                "packed sequences (segments) and a cache do not go together"
            )
        if positions is None:
            positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        positions = jnp.broadcast_to(positions, tokens.shape)
        if cache is not None:
            # A token that has no slot is not there, in this call as in later ones.
            slots = cache["key"].shape[2]
            positions = jnp.where(positions < slots, positions, -1)
        x = rows(params["embed"], tokens, dtype)
        x, new = _layers(spec, params["layers"], x, positions, segments, cache, remat)
        if cache is not None:
            cache = jax.tree.map(lambda old, x: _write(old, x, positions), cache, new)
        hidden = spec.norm.apply(spec, params["norm"], x)
        if spec.tied:
            law = Categorical(hidden=hidden, head=params["embed"], project=tied_logits)
        else:
            law = Categorical(hidden=hidden, head=params["head"], project=logits)
        return law, cache

    def init_cache(batch: int, length: int) -> Cache:
        shape = (spec.depth, batch, length, spec.kv_heads, spec.head_size)
        return {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)}

    return Policy(init, apply, init_cache)


def logits(hidden: Array, head: Any) -> Array:
    """f32[..., V] of hidden states [..., D] and an output matrix [D, V]."""
    return linear(hidden, head, out=jnp.float32)


def tied_logits(hidden: Array, embedding: Any) -> Array:
    """f32[..., V] of hidden states [..., D] and an embedding [V, D]."""
    return linear_transposed(hidden, embedding, out=jnp.float32)


def check_tokens(tokens: Any, vocab: int) -> None:
    """Raise ValueError naming the first id outside [0, vocab); on the host only.

    Compiled code would clamp such an id, and learn from another token.
    """
    tokens = np.asarray(tokens)
    wrong = np.argwhere((tokens < 0) | (tokens >= vocab))
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        raise ValueError(
            f"token id {int(tokens[at])} at index {at} is outside the vocabulary of "
            f"{vocab} ids ({len(wrong)} such ids): do model and tokenizer match?"
        )


def _layers(
    spec: DecoderSpec,
    layers: Params,
    x: Array,
    positions: Array,
    segments: Array | None,
    cache: Cache,
    remat: str | Callable[..., Any] | None,
) -> tuple[Array, Cache]:
    """All blocks: ([B, T, D], new keys and values [L, B, T, K, size])."""
    bases = sorted(set(spec.rope_bases))
    turn = jnp.stack(
        [
            attention.frequencies(spec.head_size, base, spec.rope_scaling)
            for base in bases
        ]
    )
    # The rotations of each base once, [bases, B, T, size / 2]; layers pick theirs.
    angle = positions[None, :, :, None].astype(jnp.float32) * turn[:, None, None]
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    which = jnp.array([bases.index(base) for base in spec.rope_bases], jnp.int32)
    window = jnp.array([w or attention.FULL for w in spec.windows], jnp.int32)

    if cache is not None:
        kept = _kept_slots(cache["key"].shape[2], positions)

    def layer(x: Array, of_layer: Any) -> tuple[Array, Cache | None]:
        params, which, window, cached = of_layer
        if cache is not None:
            cached = attention.Keys(cached["key"], cached["value"], kept)
        place = parts.Place(
            positions, segments, cosine[which], sine[which], window, cached
        )
        x, (key, value) = spec.block.apply(spec, params, x, place)
        # Without a cache nobody asks for keys and values: let them go.
        return x, None if cache is None else {"key": key, "value": value}

    if remat is not None:
        policy = remat if callable(remat) else None
        layer = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    return jax.lax.scan(layer, x, (layers, which, window, cache))


def _kept_slots(slots: int, positions: Array) -> Array:
    """i32[B, S]: each slot's position, -1 for slots that this call writes anew.

    The cache is read as it was and the new tokens beside it, so that one write of all
    layers at the end serves, and no layer copies what it does not change.
    """
    kept = jnp.broadcast_to(jnp.arange(slots), (positions.shape[0], slots))
    row = jnp.arange(positions.shape[0])[:, None]
    where = jnp.where(positions < 0, slots, positions)  # a negative index would wrap
    return kept.at[row, where].set(-1, mode="drop")


def _write(old: Array, new: Array, positions: Array) -> Array:
    """[L, B, S, ...] with new [L, B, T, ...] at each row's positions."""
    row = jnp.arange(positions.shape[0])[:, None]
    where = jnp.where(positions < 0, old.shape[2], positions)
    return old.at[:, row, where].set(new.astype(old.dtype), mode="drop")
