"""Credit for each token: `(Batch) -> f32[B, T]`, computed once on a whole batch."""

from rlpost.advantages.group import (
    batch_centered,
    batch_std,
    group_mean,
    group_relative,
    group_std,
    leave_one_out,
)
from rlpost.advantages.returns import given, monte_carlo, value_baseline

__all__ = [
    "batch_centered",
    "batch_std",
    "given",
    "group_mean",
    "group_relative",
    "group_std",
    "leave_one_out",
    "monte_carlo",
    "value_baseline",
]
