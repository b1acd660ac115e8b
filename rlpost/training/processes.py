"""What the processes of a run tell each other, so that all decide alike.

With one process each function is the identity and starts no collective.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_first() -> bool:
    """Whether this process writes what is written once (metrics, config, display)."""
    return jax.process_index() == 0


def any_of(flag: bool) -> bool:
    """True on every process if it is True on one: a signal, a failed save."""
    if jax.process_count() == 1:
        return flag
    return bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def from_first(value: int) -> int:
    """The integer of the first process, on every process."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.array(value, np.int32)))


def arrays_from_first(tree: Any) -> Any:
    """A pytree of NumPy arrays as the first process has it, on every process."""
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(np.asarray, multihost_utils.broadcast_one_to_all(tree))


def barrier(name: str) -> None:
    """Wait until every process is here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
