"""The parts that a decoder is made of; a family of models is a choice of them.

A part is a pair of pure functions. `init(key, spec)` gives the parameters of all layers
at once, leading with [L]; `apply` sees those of one layer. Another mixture of experts,
norm or block is another part, and no code branches on the name of a family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from rlpost.models import attention as attention_lib
from rlpost.models.linear import linear
from rlpost.types import Array, Params

if TYPE_CHECKING:
    from rlpost.models.decoder import DecoderSpec


class Part(NamedTuple):
    """`init(key, spec) -> params` of all layers; `apply`, which sees one layer's."""

    init: Callable[[Array, DecoderSpec], Params]
    apply: Callable[..., Any]


class Place(NamedTuple):
    """Where the tokens of a call stand, and what one layer may know of it.

    Attributes:
        position: i32[B, T], negative where there is no token.
        segment: i32[B, T], or None.
        cosine, sine: f32[B, T, size / 2], the rotation of this layer.
        window: i32[], how far back this layer sees.
        cached: the layer's keys of earlier calls, or None.
    """

    position: Array
    segment: Array | None
    cosine: Array
    sine: Array
    window: Array
    cached: attention_lib.Keys | None


def matrix(key: Array, *shape: int, gain: float = 1.0) -> Array:
    """f32[..., in, out], normal with variance gain^2 / in."""
    return jax.random.normal(key, shape) * gain * shape[-2] ** -0.5


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / rms(x) * weight over the last axis, in float32; x's dtype.

    References:
        Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv:1910.07467.
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight.astype(jnp.float32)).astype(x.dtype)


def _norm_init(key: Array, spec: DecoderSpec) -> Params:
    return jnp.ones((spec.depth, spec.width))


def _norm_apply(spec: DecoderSpec, params: Params, x: Array) -> Array:
    return rms_norm(x, params, spec.eps)


RMS_NORM = Part(_norm_init, _norm_apply)


def gated_mlp(activation: Callable[[Array], Array] = jax.nn.silu) -> Part:
    """down(activation(gate(x)) * up(x)), [B, T, D] to [B, T, D].

    References:
        Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202, eq. 6.
    """

    def init(key: Array, spec: DecoderSpec) -> Params:
        gate, up, down = jax.random.split(key, 3)
        depth, width, inner = spec.depth, spec.width, spec.ff
        return {
            "gate": matrix(gate, depth, width, inner),
            "up": matrix(up, depth, width, inner),
            "down": matrix(down, depth, inner, width, gain=(2 * depth) ** -0.5),
        }

    def apply(spec: DecoderSpec, params: Params, x: Array) -> Array:
        gate = activation(linear(x, params["gate"]))
        return linear(gate * linear(x, params["up"]), params["down"])

    return Part(init, apply)


GATED_MLP = gated_mlp()


def _attention_init(key: Array, spec: DecoderSpec) -> Params:
    q, k, v, o = jax.random.split(key, 4)
    depth, width, size = spec.depth, spec.width, spec.head_size
    wide, narrow = spec.heads * size, spec.kv_heads * size
    params = {
        "q": matrix(q, depth, width, wide),
        "k": matrix(k, depth, width, narrow),
        "v": matrix(v, depth, width, narrow),
        "o": matrix(o, depth, wide, width, gain=(2 * depth) ** -0.5),
    }
    if spec.qkv_bias:
        params |= {
            "q_bias": jnp.zeros((depth, wide)),
            "k_bias": jnp.zeros((depth, narrow)),
            "v_bias": jnp.zeros((depth, narrow)),
        }
    if spec.qk_norm:
        params |= {
            "q_norm": jnp.ones((depth, size)),
            "k_norm": jnp.ones((depth, size)),
        }
    return params


def _attention_apply(
    spec: DecoderSpec, params: Params, x: Array, place: Place
) -> tuple[Array, tuple[Array, Array]]:
    """[B, T, D] to ([B, T, D], the new keys and values [B, T, K, size])."""

    def heads(name: str) -> Array:
        y = linear(x, params[name])
        if f"{name}_bias" in params:
            y = y + params[f"{name}_bias"].astype(y.dtype)
        y = y.reshape(*y.shape[:2], -1, spec.head_size)
        if f"{name}_norm" in params:
            y = rms_norm(y, params[f"{name}_norm"], spec.eps)
        return y

    query = attention_lib.rotate(heads("q"), place.cosine, place.sine)
    key = attention_lib.rotate(heads("k"), place.cosine, place.sine)
    value = heads("v")
    new = attention_lib.Keys(key, value, place.position, place.segment)
    mixed = attention_lib.attend(
        query,
        place.position,
        [new] if place.cached is None else [place.cached, new],
        window=place.window,
        segment=place.segment,
    )
    return linear(mixed.reshape(*x.shape[:2], -1), params["o"]), (key, value)


ATTENTION = Part(_attention_init, _attention_apply)


def _pre_norm_init(key: Array, spec: DecoderSpec) -> Params:
    mixer, mlp, first, second = jax.random.split(key, 4)
    return {
        "attention": spec.attention.init(mixer, spec),
        "attention_norm": spec.norm.init(first, spec),
        "mlp": spec.mlp.init(mlp, spec),
        "mlp_norm": spec.norm.init(second, spec),
    }


def _pre_norm_apply(
    spec: DecoderSpec, params: Params, x: Array, place: Place
) -> tuple[Array, tuple[Array, Array]]:
    normed = spec.norm.apply(spec, params["attention_norm"], x)
    mixed, new = spec.attention.apply(spec, params["attention"], normed, place)
    x = x + mixed
    normed = spec.norm.apply(spec, params["mlp_norm"], x)
    return x + spec.mlp.apply(spec, params["mlp"], normed), new


PRE_NORM = Part(_pre_norm_init, _pre_norm_apply)
