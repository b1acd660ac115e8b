"""Controllers that look at nothing but the count of updates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from rlpost.types import Array, Controller


def constant(decision: Any) -> Controller:
    """The same decision always.

    Args:
        decision: any pytree; what the experiment's `decision -> Objective` takes.
    """
    return Controller(
        init=lambda: (),
        decide=lambda state, context, key: decision,
        update=lambda state, feedback: state,
    )


def schedule(value: Callable[[Array], Any]) -> Controller:
    """A decision that depends on how many updates are done: any optax schedule.

    Args:
        value: count, i32[] from 0, to a number or a pytree of numbers. Several optax
            schedules make one decision by
            `lambda n: {"clip": clip(n), "temperature": temperature(n)}`.

    Returns:
        A controller whose state is the count; `update` ignores its feedback and adds 1.
    """
    return Controller(
        init=lambda: jnp.zeros((), jnp.int32),
        decide=lambda count, context, key: value(count),
        update=lambda count, feedback: count + 1,
    )
