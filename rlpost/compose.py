"""The ways to assemble an Objective from parts.

`policy_gradient` learns from rewards, `likelihood` from given tokens, `preference` from
pairs; `combine` adds objectives up. What a part is handed has been selected already: a
surrogate sees a batch whose mask holds only the tokens that are kept, so whatever
stands at dropped or padded ones never reaches an exponential.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from rlpost.advantages.returns import to_tokens
from rlpost.aggregates import PER_TOKEN, token_mean
from rlpost.combine import combine
from rlpost.losses.likelihood import negative_log_likelihood
from rlpost.losses.preference import UnitLoss, pairs
from rlpost.losses.ratio import drift, log_ratio
from rlpost.types import (
    Advantage,
    Aggregate,
    Array,
    Batch,
    Mean,
    Metrics,
    Objective,
    Scores,
    Terms,
    TokenLoss,
    TokenMask,
    TokenWeight,
    check_batch,
)

__all__ = ["combine", "likelihood", "policy_gradient", "preference", "regression"]

Regularizers = Mapping[str, tuple[Any, TokenLoss]]  # name -> (coefficient, term)


def policy_gradient(
    *,
    advantage: Advantage,
    surrogate: TokenLoss,
    masks: Sequence[TokenMask] = (),
    weights: Sequence[TokenWeight] = (),
    regularizers: Regularizers | None = None,
    metrics: Mapping[str, TokenLoss] | None = None,
    aggregate: Aggregate = token_mean,
) -> Objective:
    """A policy gradient: an advantage, a surrogate of it, and what surrounds them.

    The loss is `aggregate(w * surrogate) + sum_k c_k aggregate(regularizer_k)` over the
    tokens that every mask keeps, w the product of the weights.

    Args:
        advantage: Batch to f32[B, T], computed once on the whole batch. A row whose
            reward is not finite has left the mask by then.
        surrogate: the term that carries the gradient of the advantage.
        masks: which tokens to keep; each sees the whole mask, without gradient.
        weights: factors of the surrogate, without gradient.
        regularizers: {name: (coefficient, term)}, each a term of the loss of its own,
            on the kept tokens. One whose coefficient is the number 0 is left out, and
            so is what it would need; a traced coefficient keeps it.
        metrics: {name: term} to report beside the loss, over kept tokens.
        aggregate: how tokens become a mean; each term is normalised by itself.

    Returns:
        An Objective with the terms "policy" and the regularizers' names, and the
        metrics "kept" (share of tokens), "advantage" (mean over kept tokens), "signal"
        (share of rows with an advantage other than 0) and, without its coefficient,
        each regularizer. Where the batch has behavior or old log-probs also "ratio"
        (mean), "ratio_row_max" (mean over rows of each row's largest) and, of the
        behavior, "kl_behavior" (k3 estimate of KL(behavior || current), nats a token).

    Raises:
        ValueError: from `prepare`, for arrays of wrong shapes, a field that is missing,
            or packed rows (`segment`): an advantage belongs to one response per row.
    """
    assemble = _assemble(
        "policy", surrogate, masks, weights, regularizers, metrics, aggregate
    )

    def prepare(batch: Batch) -> Batch:
        check_batch(batch)
        _refuse_packed(batch, "a policy gradient has one response per row")
        batch = _scorable(batch)
        return _with_advantage(batch, advantage(batch))

    def loss(scores: Scores, batch: Batch) -> tuple[Terms, Metrics]:
        terms, report, kept = assemble(scores, batch)
        return terms, report | _ratio_metrics(scores, kept) | _signal_metrics(kept)

    return Objective(prepare, loss)


def likelihood(
    *,
    row_weight: Callable[[Batch], Array] | None = None,
    masks: Sequence[TokenMask] = (),
    regularizers: Regularizers | None = None,
    metrics: Mapping[str, TokenLoss] | None = None,
    aggregate: Aggregate = token_mean,
) -> Objective:
    """Negative log-likelihood of the tokens on the mask.

    Rows may be packed: with `batch.segment` the first token of each sequence leaves the
    mask in `prepare`, since what stands before it is another sequence's.

    Args:
        row_weight: Batch to f32[B], constants that multiply the rows' losses (not the
            denominator). A row whose weight is not finite leaves the mask.
        masks, regularizers, metrics, aggregate: as for `policy_gradient`.

    Returns:
        An Objective with the terms "likelihood" and the regularizers' names, and the
        metrics "kept" (share of tokens), "nll" (mean over kept tokens, unweighted,
        nats) and, without its coefficient, each regularizer.

    Raises:
        ValueError: from `prepare`, for arrays of wrong shapes, or where rows are packed
            and a `row_weight` or an aggregate over rows is asked for.
    """

    def surrogate(scores: Scores, batch: Batch) -> Array:
        x = negative_log_likelihood(scores, batch)
        return x if row_weight is None else x * batch.need("advantage")

    report = {"nll": negative_log_likelihood, **(metrics or {})}
    assemble = _assemble(
        "likelihood", surrogate, masks, (), regularizers, report, aggregate
    )

    def prepare(batch: Batch) -> Batch:
        check_batch(batch)
        if row_weight is not None:
            _refuse_packed(batch, "row_weight has one number a row")
            weight = row_weight(batch).astype(jnp.float32)
            finite = jnp.isfinite(weight)
            batch = batch.replace(mask=batch.mask & finite[:, None])
            return _with_advantage(batch, to_tokens(weight, batch))
        if batch.segment is not None:
            if aggregate not in PER_TOKEN:
                _refuse_packed(batch, "this aggregate takes a mean over rows")
            before = jnp.pad(batch.segment[:, :-1], ((0, 0), (1, 0)))
            inside = (batch.segment == before) & (batch.segment != 0)
            batch = batch.replace(mask=batch.mask & inside)
        return batch

    def loss(scores: Scores, batch: Batch) -> tuple[Terms, Metrics]:
        return assemble(scores, batch)[:2]

    return Objective(prepare, loss)


def preference(
    loss: UnitLoss, *, metrics: Mapping[str, UnitLoss] | None = None
) -> Objective:
    """The mean over preference pairs of a loss that couples their two rows.

    Args:
        loss: (Scores, Batch) to f32[B], a pair's loss on its preferred row.
        metrics: {name: (Scores, Batch) to f32[B]} likewise, to report beside it.

    Returns:
        An Objective with the term "preference", the metrics named, and "paired" (share
        of the rows with tokens that are in a pair; below 1 the units are wrong).

    Raises:
        ValueError: from `prepare`, for arrays of wrong shapes, packed rows, missing
            `unit` or `preferred`, or (outside jit) a row with tokens that is in no
            pair; under jit, as in a train step, such a row counts in "paired" alone.
    """

    def prepare(batch: Batch) -> Batch:
        check_batch(batch)
        _refuse_packed(batch, "a pair is two rows")
        mate = pairs(batch)
        if not isinstance(mate, jax.core.Tracer):
            paired = mate.any(axis=0) | mate.any(axis=1)
            lone = batch.mask.any(axis=-1) & ~paired
            if lone.any():
                unit = batch.need("unit")[jnp.argmax(lone)]
                raise ValueError(
                    f"batch.unit {unit} is not one preferred and one rejected row, "
                    f"each with tokens on the mask"
                )
        return batch

    def mean(of: UnitLoss, scores: Scores, batch: Batch) -> Mean:
        chosen = jnp.any(pairs(batch), axis=-1)
        total = jnp.sum(jnp.where(chosen, of(scores, batch), 0.0))
        return Mean(total, jnp.sum(chosen, dtype=jnp.float32))

    def couple(scores: Scores, batch: Batch) -> tuple[Terms, Metrics]:
        constant = jax.lax.stop_gradient(scores)
        report = {
            name: mean(metric, constant, batch)
            for name, metric in (metrics or {}).items()
        }
        mate = pairs(batch)
        paired = jnp.any(mate, axis=0) | jnp.any(mate, axis=1)
        report["paired"] = _row_mean(paired.astype(jnp.float32), batch.mask)
        return {"preference": mean(loss, scores, batch)}, report

    return Objective(prepare, couple)


def regression(loss: TokenLoss, *, aggregate: Aggregate = token_mean) -> Objective:
    """The mean over tokens of how far an estimate is off: a value head's, say.

    Args:
        loss: a term per token, such as `losses.value_error`.
        aggregate: how tokens become a mean.

    Returns:
        An Objective with the term "error"; rows without a finite reward leave the mask.

    Raises:
        ValueError: from `prepare`, for arrays of wrong shapes or packed rows.
    """
    assemble = _assemble("error", loss, (), (), None, None, aggregate)

    def prepare(batch: Batch) -> Batch:
        check_batch(batch)
        _refuse_packed(batch, "an estimate is of one response per row")
        return _scorable(batch)

    def error(scores: Scores, batch: Batch) -> tuple[Terms, Metrics]:
        return assemble(scores, batch)[:2]

    return Objective(prepare, error)


# A loss that distils teachers (`distillation`) joins here: like `likelihood`, with
# `scores.frozen` in place of given tokens.


def _assemble(
    name: str,
    surrogate: TokenLoss,
    masks: Sequence[TokenMask],
    weights: Sequence[TokenWeight],
    regularizers: Regularizers | None,
    metrics: Mapping[str, TokenLoss] | None,
    aggregate: Aggregate,
) -> Callable[[Scores, Batch], tuple[Terms, Metrics, Batch]]:
    """What a per-token loss does with its parts; also returns the batch as kept."""
    active = {
        key: (coefficient, term)
        for key, (coefficient, term) in (regularizers or {}).items()
        if not _is_zero(coefficient)
    }
    if name in active:
        raise ValueError(f"a regularizer cannot be called {name!r}: the main term is")

    def assemble(scores: Scores, batch: Batch) -> tuple[Terms, Metrics, Batch]:
        # On the inputs, not the outputs: a mask may be a kernel without derivative.
        constant = jax.lax.stop_gradient(scores)
        keep = batch.mask
        for mask in masks:
            keep = keep & mask(constant, batch)
        kept = batch.replace(mask=keep)
        x = surrogate(scores, kept)
        for weight in weights:
            x = x * jax.lax.stop_gradient(weight(constant, kept))
        terms = {name: aggregate(x, keep, batch.mask)}
        report = {"kept": token_mean(jnp.ones_like(x), keep, batch.mask)}
        for key, (coefficient, term) in active.items():
            mean = aggregate(term(scores, kept), keep, batch.mask)
            terms[key] = Mean(coefficient * mean.total, mean.weight)
            report[key] = jax.lax.stop_gradient(mean)
        for key, metric in (metrics or {}).items():
            report[key] = token_mean(metric(constant, kept), keep, keep)
        return terms, report, kept

    return assemble


def _ratio_metrics(scores: Scores, kept: Batch) -> Metrics:
    scores, report = jax.lax.stop_gradient(scores), {}
    if kept.behavior_logp is not None:
        x = drift(scores, kept)
        k3 = jnp.expm1(x) - x
        report["kl_behavior"] = token_mean(k3, kept.mask, kept.mask)
    if kept.behavior_logp is not None or kept.old_logp is not None:
        ratio = jnp.exp(log_ratio(scores, kept))
        largest = jnp.max(jnp.where(kept.mask, ratio, 0.0), axis=-1)
        report["ratio"] = token_mean(ratio, kept.mask, kept.mask)
        report["ratio_row_max"] = _row_mean(largest, kept.mask)
    return report


def _signal_metrics(kept: Batch) -> Metrics:
    advantage = kept.need("advantage")
    signal = jnp.any(jnp.where(kept.mask, advantage != 0, False), axis=-1)
    return {
        "advantage": token_mean(advantage, kept.mask, kept.mask),
        "signal": _row_mean(signal.astype(jnp.float32), kept.mask),
    }


def _row_mean(x: Array, mask: Array) -> Mean:
    real = jnp.any(mask, axis=-1)
    return Mean(jnp.sum(jnp.where(real, x, 0.0)), jnp.sum(real, dtype=jnp.float32))


def _scorable(batch: Batch) -> Batch:
    """The batch without the tokens of rows that could not be scored."""
    if batch.reward is None:
        return batch
    return batch.replace(mask=batch.mask & jnp.isfinite(batch.reward)[:, None])


def _with_advantage(batch: Batch, value: Array) -> Batch:
    if value.shape != batch.mask.shape:
        raise ValueError(
            f"the advantage must have the mask's shape {list(batch.mask.shape)}, "
            f"got {list(value.shape)}"
        )
    value = jax.lax.stop_gradient(value).astype(jnp.float32)
    return batch.replace(advantage=jnp.where(batch.mask, value, 0.0))


def _refuse_packed(batch: Batch, why: str) -> None:
    if batch.segment is not None:
        raise ValueError(
            f"batch.segment says that rows are packed, but {why}: unpack them, one "
            f"sequence a row (only a likelihood over tokens may be packed)"
        )


def _is_zero(coefficient: Any) -> bool:
    return not isinstance(coefficient, jax.core.Tracer) and float(coefficient) == 0.0
