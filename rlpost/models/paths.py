"""Parameter paths, and which of them train."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlpost.types import Params

Rule = str | Callable[[str, Any], bool]


def path_name(path: Any) -> str:
    """A key path of jax.tree_util as "layers/mlp/up"; fields of nodes by their name."""
    return "/".join(
        str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))))
        for key in path
    )


def paths(tree: Params) -> list[str]:
    """The paths of all leaves, in the order of `jax.tree.leaves`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [path_name(path) for path, _ in leaves]


def partition(params: Params, trains: Rule) -> tuple[Params, Params]:
    """Split parameters into those that train and those that are held.

    Args:
        params: any pytree of arrays.
        trains: a pattern searched in each path ("" matches all, `r"/(a|b)$"` the
            adapters), or `(path, leaf) -> bool`. Integer leaves, such as quantised
            weights, never train.

    Returns:
        Two trees of the same structure, each with None where the other has the leaf.

    Raises:
        ValueError: if nothing would train; names some of the paths there are.
    """

    def chosen(path: Any, leaf: Any) -> bool:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return False
        name = path_name(path)
        if isinstance(trains, str):
            return re.search(trains, name) is not None
        return trains(name, leaf)

    picked = jax.tree_util.tree_map_with_path(chosen, params)
    if not any(jax.tree.leaves(picked)):
        names = paths(params)
        raise ValueError(
            f"no parameter that could train matches {trains!r}; the paths are "
            f"{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        )
    trained = jax.tree.map(lambda leaf, yes: leaf if yes else None, params, picked)
    held = jax.tree.map(lambda leaf, yes: None if yes else leaf, params, picked)
    return trained, held


def join(trained: Params, held: Params) -> Params:
    """The tree of which `partition` made two; `held` may be {} if all of it trains.

    Raises:
        ValueError: if the trees do not complement each other.
    """
    if not jax.tree.leaves(held):
        return trained
    mine, structure = jax.tree.flatten(trained, is_leaf=lambda x: x is None)
    theirs, other = jax.tree.flatten(held, is_leaf=lambda x: x is None)
    if structure != other:  # type: ignore[operator]
        raise ValueError("trained and held parameters are not of one tree")
    both = []
    for a, b in zip(mine, theirs, strict=True):
        if (a is None) == (b is None):
            raise ValueError("trained and held parameters overlap or leave a gap")
        both.append(b if a is None else a)
    return jax.tree.unflatten(structure, both)
