"""What networks say of the decisions of a batch: Policy -> Score."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from rlpost.types import Array, Batch, Params, Policy, Score, Scores


def token_scores(policy: Policy, frozen: Mapping[str, Policy] | None = None) -> Score:
    """Score tokens by a policy, and by frozen networks beside it.

    The laws come at the row's sampling temperature. Padding is never read: ids and
    values beyond a row's length change nothing.

    Args:
        policy: the network that learns.
        frozen: networks by name ("reference", "old", a teacher); their parameters are
            passed to the score under the same names, and no gradient reaches them.

    Returns:
        `score(params, frozen_params, batch) -> Scores`, with log-probs f32[B, T] in
        nats and the lazy distribution of every token; 0 off the mask.

    Raises:
        ValueError: when scoring without the parameters of a frozen network.
    """
    frozen = dict(frozen or {})

    def score(params: Params, frozen_params: Mapping[str, Params], batch: Batch):
        missing = sorted(set(frozen) - set(frozen_params))
        if missing:
            raise ValueError(f"no parameters given for the frozen networks {missing}")
        others = {
            name: jax.lax.stop_gradient(
                _read(network, jax.lax.stop_gradient(frozen_params[name]), batch)
            )
            for name, network in frozen.items()
        }
        return _read(policy, params, batch).replace(frozen=others)

    return score


def value_scores(policy: Policy) -> Score:
    """Score by a policy with a value head on its last hidden state.

    Parameters are `{"policy": ..., "value": {"w": [D, 1], "b": [1]}}`. The value at
    slot t is read from the hidden state of slot t - 1, the state before the decision.

    Returns:
        A Score whose `value` is f32[B, T] in units of reward, 0 off the mask.
    """

    def score(params: Params, frozen_params: Mapping[str, Params], batch: Batch):
        scores = _read(policy, params["policy"], batch)
        hidden = scores.distribution.hidden if scores.distribution else None
        if hidden is None:
            raise ValueError("a value head needs a policy that returns hidden states")
        head = params["value"]
        value = (hidden.astype(jnp.float32) @ head["w"])[..., 0] + head["b"][0]
        return scores.replace(value=jnp.where(batch.mask, value, 0.0))

    return score


def _read(policy: Policy, params: Params, batch: Batch) -> Scores:
    tokens = jnp.where(real_slots(batch), batch.need("tokens"), 0)
    law, _ = policy.apply(
        params, tokens, positions=_positions(batch), segments=batch.segment
    )
    law = law.shift().tempered(batch.temperature).only(batch.mask)
    logp = jnp.where(batch.mask, law.logp(tokens), 0.0)
    return Scores(logp=logp, distribution=law)


def real_slots(batch: Batch) -> Array:
    """bool[B, T]: slots in use, from `segment`, `length`, or the end of the mask."""
    if batch.segment is not None:
        return batch.segment > 0
    slots = jnp.arange(batch.mask.shape[1])
    if batch.length is not None:
        return slots < batch.length[:, None]
    after = jnp.cumsum(batch.mask[:, ::-1], axis=1)[:, ::-1]
    return after > 0


def _positions(batch: Batch) -> Array:
    slots = jnp.broadcast_to(jnp.arange(batch.mask.shape[1]), batch.mask.shape)
    if batch.segment is not None:
        first = batch.segment != jnp.pad(batch.segment, ((0, 0), (1, 0)))[:, :-1]
        start = jax.lax.cummax(jnp.where(first, slots, 0), axis=1)
        slots = slots - start
    return jnp.where(real_slots(batch), slots, -1)
