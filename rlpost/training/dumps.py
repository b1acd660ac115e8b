"""Pytrees put aside for a post-mortem, readable without the code that made them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlpost.training import processes
from rlpost.training.metrics import plain


def dump(folder: Path, step: int, tree: Any) -> Path:
    """Write a pytree of arrays as .npz, and shapes and ranges as JSON beside it.

    Each process writes what it holds: of an array sharded over processes its own
    shards, named by their place.

    Returns:
        The path of the .npz file.
    """
    arrays: dict[str, np.ndarray] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator=".") or "array"
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            for shard in leaf.addressable_shards:
                starts = ",".join(str(s.start or 0) for s in shard.index)
                arrays[f"{name}@{starts}"] = _storable(shard.data)
        else:
            arrays[name] = _storable(leaf)
    folder.mkdir(parents=True, exist_ok=True)
    which = "" if processes.is_first() else f".{jax.process_index()}"
    target = folder / f"step-{step:08d}{which}.npz"
    np.savez_compressed(target, **arrays)  # type: ignore[arg-type]
    told = {name: _range(value) for name, value in arrays.items()}
    target.with_suffix(".json").write_text(json.dumps(plain(told), indent=1))
    return target


def _storable(leaf: Any) -> np.ndarray:
    value = np.asarray(leaf)
    # NumPy's format has no name for bfloat16 and would store bare bytes.
    return value if value.dtype.kind in "biufc" else value.astype(np.float32)


def _range(value: np.ndarray) -> dict[str, Any]:
    told: dict[str, Any] = {"shape": value.shape, "dtype": str(value.dtype)}
    if np.issubdtype(value.dtype, np.number) and value.size:
        finite = value[np.isfinite(value)]
        told["not finite"] = value.size - finite.size
        if finite.size:
            told |= {"least": finite.min(), "most": finite.max()}
    return told
