"""Supervised training as values: likelihood or preference data, one update a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import jax
import numpy as np
import optax

from rlpost.models.paths import join, partition
from rlpost.training import microbatches
from rlpost.training.guards import Guards
from rlpost.training.host_state import HostState
from rlpost.training.loop import Evaluation, Report
from rlpost.training.phases import Phases
from rlpost.training.run import Program
from rlpost.training.step import learner
from rlpost.types import Batch, Objective, Params, Score


class Batches(Iterator[Batch], HostState, Protocol):
    """An endless iterator of batches whose position is saved."""


def supervised(
    *,
    params: Params,
    score: Score,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    batches: Batches,
    rows: int,
    trains: str = "",
    frozen: Mapping[str, Params] | None = None,
    evaluate: Evaluation | None = None,
    phases: Phases | None = None,
    guards: Guards | None = None,
) -> Program:
    """A run that learns from data rather than from its own responses.

    Args:
        params: all of the policy's.
        score, objective, optimizer: as for `learner`.
        batches: what to learn from, one batch an optimiser step.
        rows: of a microbatch.
        trains: pattern of the parameter paths that train.
        frozen: parameters of frozen networks by name.
        evaluate: (state, step) -> Report; None evaluates nothing.
        phases, guards: as for `online`.

    Returns:
        A `Program` with the state `{"policy": TrainState}`.
    """
    phases, guards = phases or Phases(), guards or Guards()
    trained, held = partition(params, trains)
    learn = learner(objective, score, optimizer)
    frozen = dict(frozen or {})

    def all_params(state: dict[str, Any]) -> Params:
        return join(state["policy"].params, held)

    def iterate(state: dict[str, Any], step: int) -> tuple[dict[str, Any], Report]:
        with phases("data"):
            batch = next(batches)
        with phases("train") as ready:
            batch = jax.device_get(learn.prepare(batch))
            parts = microbatches.split(batch, rows=rows)
            train, metrics = learn.update(state["policy"], held, frozen, parts)
            metrics = jax.device_get(ready(metrics))
        watched = guards.update(step + 1, metrics["gradient/finite"] == 1.0, batch)
        numbers = {name: float(np.asarray(x)) for name, x in metrics.items()}
        return {"policy": train}, Report(numbers | watched, errors=guards.take_errors())

    def nothing(state: dict[str, Any], step: int) -> Report:
        return Report({})

    return Program(
        state={"policy": learn.init(trained)},
        iterate=iterate,
        evaluate=evaluate or nothing,
        params=all_params,
        host={"batches": batches, "guards": guards},
    )
