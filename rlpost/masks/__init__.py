"""Which tokens a loss keeps: `(Scores, Batch) -> bool[B, T]`, without gradient."""

from rlpost.masks.length import drop_truncated

__all__ = ["drop_truncated"]
