"""Users' flax modules as Policies: parameters and laws of tokens, no other state."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlpost.distributions import Categorical
from rlpost.models.linear import dense, is_matrix
from rlpost.types import Array, Cache, Params, Policy


def from_linen(module: Any, *, length: int = 2) -> Policy:
    """The Policy of a flax.linen module that maps tokens to logits.

    The module is called with tokens i32[B, T], and gives logits [B, T, V] (or a
    `Categorical`) for the token after each; it must be causal. If it has an argument
    `positions` or `segments` (i32[B, T]), they are handed over; packed rows need both.

    Tokens are placed by their position, so absent tokens and ragged rows work for any
    module. The cache holds the tokens themselves and every call runs the module over
    all of them: right, and as slow as that sounds. Low-rank pairs and quantised
    matrices are formed to arrays before the call.

    Args:
        module: the module, in the mode it is to be trained in.
        length: tokens of the row that `init` shows it.

    Raises:
        ValueError: from `init`, if the module makes variables that are not parameters.
    """

    def init(key: Array) -> Params:
        variables = module.init(key, jnp.zeros((1, length), jnp.int32))
        others = sorted(set(variables) - {"params"})
        if others:
            raise ValueError(
                f"{type(module).__name__} keeps state beside its parameters, in "
                f"{', '.join(others)}: a Policy has parameters only, so remove it (or "
                "call the module in a mode that does not use it)"
            )
        return variables["params"]

    def call(params: Params, *args: Any, **kwargs: Any) -> Any:
        return module.apply({"params": params}, *args, **kwargs)

    return _policy(init, call, _accepted(type(module).__call__))


def from_nnx(make: Callable[[Any], Any]) -> Policy:
    """The Policy of a flax.nnx module; see `from_linen` for what it must do.

    Args:
        make: `rngs -> module`, say `lambda rngs: Net(width=64, rngs=rngs)`.

    Raises:
        ValueError: if the module keeps variables that are not `nnx.Param`, such as the
            statistics of a batch norm or the random state of a dropout.
    """
    from flax import nnx

    abstract = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    graph = nnx.graphdef(abstract)
    shapes, rest = nnx.state(abstract, nnx.Param, ...)
    others = ["/".join(map(str, path)) for path, _ in nnx.to_flat_state(rest)]
    if others:
        raise ValueError(
            f"{type(abstract).__name__} keeps state beside its parameters, in "
            f"{', '.join(others)}: a Policy has parameters only, so remove it"
        )

    def init(key: Array) -> Params:
        return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(key)), nnx.Param))

    def call(params: Params, *args: Any, **kwargs: Any) -> Any:
        state = jax.tree.map(lambda x: x, shapes)  # a copy: replacing writes in place
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(*args, **kwargs)

    return _policy(init, call, _accepted(type(abstract).__call__))


def _accepted(call: Callable[..., Any]) -> set[str]:
    return {"positions", "segments"} & set(inspect.signature(call).parameters)


def _policy(
    init: Callable[[Array], Params], call: Callable[..., Any], accepted: set[str]
) -> Policy:
    def run(params: Params, tokens: Array, **known: Array) -> Categorical:
        params = jax.tree.map(
            lambda w: dense(w) if is_matrix(w) else w,
            params,
            is_leaf=is_matrix,
        )
        law = call(params, tokens, **{k: known[k] for k in accepted & set(known)})
        if isinstance(law, Categorical):
            return law
        if not hasattr(law, "shape") or law.shape[:-1] != tokens.shape:
            found = getattr(law, "shape", type(law).__name__)
            raise ValueError(
                f"the module must give logits [B, T, V] for tokens of shape "
                f"{tokens.shape}, it gave {found}"
            )
        return Categorical(logits=law)

    def apply(
        params: Params,
        tokens: Array,
        positions: Array | None = None,
        cache: Cache = None,
        segments: Array | None = None,
    ) -> tuple[Categorical, Cache]:
        batch, length = tokens.shape
        counted = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), tokens.shape)
        if segments is not None:
            if cache is not None or accepted != {"positions", "segments"}:
                raise ValueError(
                    "packed sequences need a module that takes positions and segments, "
                    "and no cache"
                )
            positions = counted if positions is None else positions
            law = run(params, tokens, positions=positions, segments=segments)
            return law, cache
        if positions is None and cache is None:
            return run(params, tokens, positions=counted), cache
        positions = jnp.broadcast_to(
            counted if positions is None else positions, tokens.shape
        )
        row = jnp.zeros((batch, length), jnp.int32) if cache is None else cache[0]
        slots = row.shape[1]
        if cache is None and not isinstance(positions, jax.core.Tracer):
            largest = int(jnp.max(positions))
            if largest >= slots:
                raise ValueError(
                    f"position {largest} in a row of {slots} tokens: without a cache "
                    "the tokens of a row stand at 0 .. T-1"
                )
        # Everyone to the slot of its position; a negative index would wrap.
        where = jnp.where(positions < 0, slots, positions)
        row = row.at[jnp.arange(batch)[:, None], where].set(tokens, mode="drop")
        counted = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), row.shape)
        law = run(params, row, positions=counted)
        at = jnp.clip(positions, 0, slots - 1)[..., None]

        def pick(x: Array | None) -> Array | None:
            return None if x is None else jnp.take_along_axis(x, at, axis=1)

        law = dataclasses.replace(law, logits=pick(law.logits), hidden=pick(law.hidden))
        return law, None if cache is None else row[None]

    def init_cache(batch: int, length: int) -> Cache:
        return jnp.zeros((1, batch, length), jnp.int32)

    return Policy(init, apply, init_cache)
