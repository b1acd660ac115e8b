"""What to measure beside the loss, in NumPy on the host."""

from rlpost.diagnostics.accuracy import constant_answer, pass_at_k

__all__ = ["constant_answer", "pass_at_k"]
