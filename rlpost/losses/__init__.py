"""Terms of a loss, per token: `(Scores, Batch) -> f32[B, T]`."""

from rlpost.losses.entropy import entropy, entropy_bonus
from rlpost.losses.kl import (
    exact_kl,
    k1,
    k2,
    k3,
    kl,
    unbiased,
    unbiased_k1,
    unbiased_k3,
)
from rlpost.losses.likelihood import negative_log_likelihood
from rlpost.losses.preference import dpo_loss, dpo_margin, pairs
from rlpost.losses.ratio import (
    clip_fraction,
    clipped_ratio,
    drift,
    importance,
    log_ratio,
    mismatch,
)
from rlpost.losses.reinforce import score_function
from rlpost.losses.value import value_error
from rlpost.losses.weights import truncated_importance

__all__ = [
    "clip_fraction",
    "clipped_ratio",
    "dpo_loss",
    "dpo_margin",
    "drift",
    "entropy",
    "entropy_bonus",
    "exact_kl",
    "importance",
    "k1",
    "k2",
    "k3",
    "kl",
    "log_ratio",
    "mismatch",
    "negative_log_likelihood",
    "pairs",
    "score_function",
    "truncated_importance",
    "unbiased",
    "unbiased_k1",
    "unbiased_k3",
    "value_error",
]
