"""Weights of tokens: `(Scores, Batch) -> f32[B, T]`, constants of the gradient."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp

from rlpost.losses.ratio import mismatch
from rlpost.types import Array, Batch, Scores, TokenWeight, check_range


def truncated_importance(
    cap: float = 2.0, *, ratio: Callable[[Scores, Batch], Array] = mismatch
) -> TokenWeight:
    """Importance weight of each token, never above a cap: `min(exp(log ratio), cap)`.

    It corrects for tokens that another program (or older weights) drew, at the price of
    a bias where the ratio is large, which the cap bounds together with the variance.

    Args:
        cap: the largest weight, a ratio above 0.
        ratio: the log-ratio, (Scores, Batch) to f32[B, T] nats. `mismatch` (default),
            old over behavior, corrects the sampler beside a surrogate that holds
            current over old, and needs `batch.old_logp`; `drift`, current over
            behavior, corrects both in front of a score function.

    Returns:
        A weight mapping (Scores, Batch) to f32[B, T]; 1 off the mask.

    Raises:
        ValueError: if a concrete `cap` is not positive.

    References:
        Ionides, Truncated importance sampling, J. Comput. Graph. Stat. 17, 2008.
        Espeholt et al., IMPALA, arXiv:1802.01561, section 4.1 (of old policies).
        Yao et al., Your efficient RL framework secretly brings you off-policy RL
        training, 2025 (of samplers).
    """
    check_range("cap", cap, 1e-9)

    def weight(scores: Scores, batch: Batch) -> Array:
        return jnp.exp(jnp.minimum(ratio(scores, batch), jnp.log(cap)))

    return weight
