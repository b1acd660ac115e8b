"""A pytree of arrays in a folder, through Orbax, and back onto devices.

Orbax is given a flat dict, so that its files do not depend on the classes of a tree.
What it has no form for is ours to bring: typed keys, and arrays without entries.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

FULL = os.strerror(errno.ENOSPC)
LATE = 0.5  # seconds in which the threads of a failed save come to their end


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, or is not what the run needs."""


def leaves_of(state: Any) -> tuple[list[str], list[Any]]:
    """The paths ("policy/params/w") and the leaves of a tree.

    Raises:
        ValueError: naming a leaf that is not an array, or a path that two leaves have.
    """
    pairs, _ = jax.tree_util.tree_flatten_with_path(state)
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in pairs]
    leaves = [leaf for _, leaf in pairs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two leaves of the state have the path {twice}")
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
            raise ValueError(
                f"state/{name} is a {type(leaf).__name__}, not an array: make it one "
                "(jnp.asarray), or keep it in the host state"
            )
    return names, leaves


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def describe(names: list[str], leaves: list[Any]) -> dict[str, dict[str, Any]]:
    """Shape, dtype and kind of key by path, as JSON."""
    described: dict[str, dict[str, Any]] = {}
    for name, leaf in zip(names, leaves, strict=True):
        described[name] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        if _is_key(leaf) and isinstance(leaf, jax.Array):
            described[name]["impl"] = str(jax.random.key_impl(leaf))
    return described


def environment() -> str:
    """What a bitwise resume takes for granted."""
    devices = jax.devices()
    return f"jax {jax.__version__} on {len(devices)} x {devices[0].device_kind}"


def _file_name(path: str) -> str:
    # Orbax makes a folder of every "/", and "%" keeps the names distinct.
    return path.replace("%", "%25").replace("/", "%2F") or "state"


def _is_global(leaf: Any) -> bool:
    """Whether Orbax should write and place it as a sharded array.

    What is not bound to devices stays so: a key bound to one device when it comes back
    could no longer enter a computation over a mesh. In a run of several processes an
    array of this process alone is the same on all of them.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf.sharding is not None
    return isinstance(leaf, jax.Array) and (
        leaf.committed and (jax.process_count() == 1 or not leaf.is_fully_addressable)
    )


def write(folder: Path, names: list[str], leaves: list[Any]) -> None:
    """Write the leaves into a new folder."""
    import orbax.checkpoint as ocp

    arrays = {}
    for name, leaf in zip(names, leaves, strict=True):
        if leaf.size == 0:  # Orbax has no such arrays; tree.json is all there is of one
            continue
        data = jax.random.key_data(leaf) if _is_key(leaf) else leaf
        arrays[_file_name(name)] = data if _is_global(data) else np.asarray(data)
    if not arrays:  # a state without entries, which Orbax has no form for either
        return
    handler = ocp.PyTreeCheckpointHandler()
    with _quiet(), _unheard(), ocp.Checkpointer(handler) as writer:
        writer.save(folder, args=ocp.args.PyTreeSave(arrays))


def read(folder: Path, described: dict[str, dict[str, Any]], like: Any) -> Any:
    """The tree of `<folder>/state`, with the structure and shardings of `like`.

    Args:
        folder: of a checkpoint.
        described: what `describe` said of the leaves when they were written.
        like: a tree of arrays or `jax.ShapeDtypeStruct`.

    Raises:
        CheckpointError: if the trees differ, or the files cannot be read.
    """
    import orbax.checkpoint as ocp

    names, leaves = leaves_of(like)
    _same_tree(folder, described, describe(names, leaves))
    restore_args, wanted = {}, {}
    for name, leaf in zip(names, leaves, strict=True):
        if leaf.size == 0:
            continue
        key = _file_name(name)
        wanted[key] = 0
        if _is_global(leaf):
            concrete = _is_key(leaf) and isinstance(leaf, jax.Array)
            placed = jax.random.key_data(leaf) if concrete else leaf
            restore_args[key] = ocp.ArrayRestoreArgs(
                sharding=placed.sharding, strict=True
            )
        else:
            restore_args[key] = ocp.RestoreArgs(restore_type=np.ndarray)
    arrays: dict[str, Any] = {}
    try:
        with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            arrays = wanted and reader.restore(
                folder / "state",
                args=ocp.args.PyTreeRestore(item=wanted, restore_args=restore_args),
            )
    except Exception as error:
        raise CheckpointError(f"{folder} cannot be read: {reason(error)}") from error
    restored = [
        _place(arrays.get(_file_name(name)), leaf, described[name].get("impl"))
        for name, leaf in zip(names, leaves, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(like), restored)


def _place(data: Any, leaf: Any, impl: str | None) -> Any:
    if data is None:  # no entries, so nothing to read
        struct = isinstance(leaf, jax.ShapeDtypeStruct)
        return jnp.zeros(leaf.shape, leaf.dtype) if struct else leaf
    if impl is not None:
        return jax.random.wrap_key_data(data, impl=impl)
    if isinstance(leaf, np.ndarray):
        return data
    if _is_global(leaf) or not getattr(leaf, "committed", False):
        return jnp.asarray(data)
    return jax.device_put(data, leaf.sharding)


def _same_tree(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    absent = [path for path in wanted if path not in found]
    extra = [path for path in found if path not in wanted]
    lines = [f"{path}: missing in the checkpoint" for path in absent]
    lines += [f"{path}: not part of this run" for path in extra]
    for path, leaf in wanted.items():
        other = found.get(path, leaf)
        if (other["dtype"], other["shape"]) != (leaf["dtype"], leaf["shape"]):
            lines.append(
                f"{path}: expected {leaf['dtype']}{leaf['shape']}, "
                f"found {other['dtype']}{other['shape']}"
            )
    if lines:
        more = [f"and {len(lines) - 8} more"] if len(lines) > 8 else []
        raise CheckpointError(
            f"{folder} holds another state than this run:\n  "
            + "\n  ".join(lines[:8] + more)
        )


def reason(error: Exception | None) -> str:
    """The error in one short line."""
    if error is None:
        return "another process failed"
    text = f"{type(error).__name__}: {error}"
    if FULL in text:  # deep within what Orbax tells, if at all within what is shown
        return FULL
    return text if len(text) < 500 else text[:250] + " ... " + text[-250:]


@contextmanager
def _unheard() -> Iterator[None]:
    """Of a save that fails the other writes go on, and report to a loop that is closed:
    a traceback each, which says nothing that was not raised.
    """
    before = sys.unraisablehook

    def hook(told: Any) -> None:
        if "Event loop is closed" not in str(told.exc_value):
            before(told)

    sys.unraisablehook = hook
    try:
        yield
    except Exception:
        time.sleep(LATE)
        raise
    finally:
        sys.unraisablehook = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs a failure several times over; it is raised, so once is enough."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
