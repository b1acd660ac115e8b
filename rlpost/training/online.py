"""Online RL as values: what a run is made of, and its iteration and evaluation.

An iteration asks the policy, scores its answers, prepares the batch once, and updates
on microbatches of whole units. Everything that an experiment may want to change is a
field of `Run`; whoever needs another iteration writes one, and keeps the loop.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import optax

from rlpost.data.task import Task
from rlpost.diagnostics import pass_at_k
from rlpost.models.paths import join, partition
from rlpost.rewards.pool import RewardPool, Scored, score_here
from rlpost.rewards.types import Reward, Sample
from rlpost.sampling.rollout import to_batch
from rlpost.sampling.sampler import Request, Sampler
from rlpost.sampling.tokenizer import Tokenizer
from rlpost.training import microbatches
from rlpost.training.config import ConfigError
from rlpost.training.guards import Guards, check_padding, check_ratio
from rlpost.training.host_state import HostState
from rlpost.training.loop import Report
from rlpost.training.phases import Phases, throughput, train_flops
from rlpost.training.sharding import ROWS, shard_params, shard_rows
from rlpost.training.step import Learner, TrainState, learner
from rlpost.types import (
    Batch,
    Controller,
    Finish,
    Objective,
    Params,
    Policy,
    Rollout,
    Score,
)

FINISH = {
    Finish.STOP: "stop",
    Finish.LENGTH: "length",
    Finish.TEXT: "text",
    Finish.ENVIRONMENT: "environment",
    Finish.ERROR: "error",
}


class Prompts(Protocol):
    """An endless iterator of lists of tasks, whose position is saved."""

    def __next__(self) -> Sequence[Task]: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of an online run as values.

    Attributes:
        policy: what is sampled and trained.
        params: loads or draws all parameters; called once, in the run's process.
        trains: pattern of the parameter paths that train; the others are held.
        frozen: the parameters of frozen networks by name, from the initial ones.
        score: what the trainer says of a batch, frozen networks included.
        objective: an Objective, or `decision -> Objective` with a controller.
        optimizer: an optax transformation.
        tokenizer: decodes responses; its stop ids end them.
        encode: a task's prompt as token ids.
        prompts: the tasks of each iteration.
        held_out: tasks to evaluate on; equal noise at every evaluation.
        reward: scores responses; a pool keeps one failure from costing a batch.
        correct: the part of the reward that says whether an answer is right.
        group_size: responses to each prompt.
        sampling: fields of `Request` but prompt, seed and stop ids.
        answers: responses to each held-out prompt.
        slots, length: of the sampler.
        rows: of a microbatch.
        updates: optimiser steps on each rollout batch, on disjoint sets of prompts.
        recompute: score the batch by the trainer's own network before the first
            update, and take ratios to that (`batch.old_logp`).
        share: compute a prompt once for all its responses in a microbatch.
        controller: decides before each rollout; it is told the metrics after.
        shown: responses of an iteration to show, with all that is known of a token.
        baselines: figures to put beside an evaluation, such as a constant answer's.
        dtype: in which sampler and trainer both compute, so that the first ratios must
            be 1; None where they differ.
        mesh: devices to shard over; None means one device.
        seed: of sampling.

    Raises:
        ConfigError: if a size is below 1, or rows would be sampled greedily.
    """

    policy: Policy
    params: Callable[[], Params]
    score: Score
    objective: Objective | Callable[[Any], Objective]
    optimizer: optax.GradientTransformation
    tokenizer: Tokenizer
    encode: Callable[[Task], Sequence[int]]
    prompts: Prompts
    reward: RewardPool | Reward
    group_size: int
    sampling: Mapping[str, Any]
    slots: int
    length: int
    rows: int
    trains: str = ""
    frozen: Callable[[Params], Mapping[str, Params]] = lambda params: {}
    held_out: Sequence[Task] = ()
    correct: str = "reward"
    answers: int = 1
    updates: int = 1
    recompute: bool = False
    share: bool = True
    controller: Controller | None = None
    shown: int = 16
    baselines: Mapping[str, float] = dataclasses.field(default_factory=dict)
    dtype: str | None = "float32"
    mesh: jax.sharding.Mesh | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = ("group_size", "answers", "updates", "rows", "slots")
        told = [f"{name}={getattr(self, name)}" for name in sizes]
        if min(getattr(self, name) for name in sizes) < 1:
            raise ConfigError(f"these must be at least 1: {', '.join(told)}")
        temperature = self.sampling.get("temperature", 1.0)
        if not temperature > 0:  # nan neither
            raise ConfigError(
                "a run must sample above temperature 0: greedy rows have no law to "
                f"learn from (sampling.temperature={temperature})"
            )


class Program(NamedTuple):
    """A run ready for `loop.run`.

    `state`: one pytree, `{"policy": TrainState, "controller": ...}`.
    `iterate(state, step)`, `evaluate(state, step)`: see `loop`.
    `params(state)`: all parameters, to sample with or to export.
    `host`: what a checkpoint saves beside the state.
    """

    state: dict[str, Any]
    iterate: Callable[[dict[str, Any], int], tuple[dict[str, Any], Report]]
    evaluate: Callable[[dict[str, Any], int], Report]
    params: Callable[[dict[str, Any]], Params]
    host: dict[str, HostState]


def online(
    run: Run, phases: Phases | None = None, guards: Guards | None = None
) -> Program:
    """Compile what an online run needs, and lay out its state.

    Args:
        run: its parts.
        phases: the timer that the loop reads.
        guards: what watches the run; by default one that dumps no batches.

    Raises:
        GuardError: from the first iteration, if sampler and trainer disagree on the
            same weights or padding is not inert.
    """
    phases, guards = phases or Phases(), guards or Guards()
    initial = run.params()
    if run.mesh is not None:
        initial = shard_params(initial, run.mesh)
    trained, held = partition(initial, run.trains)
    frozen = run.frozen(initial)
    learn = learner(run.objective, run.score, run.optimizer)
    sampler = _sampler(run)
    score = jax.jit(run.score)
    size = {
        "parameters": sum(x.size for x in jax.tree.leaves(initial)),
        "trained": sum(x.size for x in jax.tree.leaves(trained)),
    }
    state: dict[str, Any] = {"policy": learn.init(trained)}
    if run.controller is not None:
        state["controller"] = run.controller.init()

    def params(state: dict[str, Any]) -> Params:
        return join(state["policy"].params, held)

    def place(batch: Batch) -> Batch:
        return batch if run.mesh is None else shard_rows(batch, run.mesh)

    def logp(state: dict[str, Any], batch: Batch) -> Any:
        """f32[B, T]: what the trainer's network says, microbatch by microbatch."""
        count = batch.mask.shape[0]
        row = np.arange(count, dtype=np.int32)
        numbered = batch.replace(extras={**batch.extras, "row": row})
        out = np.zeros(batch.mask.shape, np.float32)
        rows = min(run.rows, count)
        for part in microbatches.split(numbered, rows=rows, share=run.share):
            real = np.flatnonzero(part.mask.any(axis=1))
            value = score(params(state), frozen, place(part)).logp
            size = part.mask.shape[1]
            out[part.extras["row"][real], :size] = np.asarray(value)[real]
        return out

    def check(state: dict[str, Any], few: Batch) -> dict[str, float]:
        """Before the first update: what must hold of any rows, on these."""
        check_padding(
            run.score, params(state), frozen, few, vocabulary=run.tokenizer.vocab_size
        )
        if run.dtype is None:
            return {}
        old = few.need("behavior_logp")
        return check_ratio(logp(state, few), old, few.mask, dtype=run.dtype)

    def iterate(state: dict[str, Any], step: int) -> tuple[dict[str, Any], Report]:
        start = time.perf_counter()
        decision = _decide(run, state, step)
        tasks = next(run.prompts)
        group = np.repeat(np.arange(len(tasks), dtype=np.int32), run.group_size)
        asked = [tasks[int(g)] for g in group]
        with phases("sample"):
            requests = _requests(run, asked, step + 1)
            rollout = sampler.sample(params(state), requests, version=step)
        with phases("reward"):
            samples = _samples(run, asked, rollout)
            scored = _score(run.reward, samples)
        watched = guards.rewards(scored.reward, group)
        begin = time.perf_counter()
        with phases("train") as ready:
            batch = to_batch(rollout, reward=scored.reward, group=group)
            batch = jax.device_get(learn.prepare(batch, decision))
            shown = batch.select(slice(max(1, run.shown)))
            if step == 0:
                watched |= check(state, shown)
            if run.recompute:
                batch = batch.replace(old_logp=logp(state, batch))
            train, metrics = _update(
                run, learn, state["policy"], held, frozen, batch, decision, place
            )
            ready(train.step)
        end = time.perf_counter()
        watched |= guards.update(step + 1, metrics["gradient/finite"] == 1.0, batch)
        tokens = int(np.sum(rollout.length))
        metrics |= _rollout_metrics(rollout, scored) | watched
        metrics |= throughput(tokens, end - start)
        mfu = throughput(tokens, end - begin, flops=train_flops(tokens, **size))
        metrics |= {k: v for k, v in mfu.items() if k == "speed/mfu"}
        metrics["speed/sampler_utilisation"] = sampler.stats.utilisation
        state = state | {"policy": train}
        if run.controller is not None:
            state["controller"] = run.controller.update(state["controller"], metrics)
        with phases("show"):
            said = _shown(run, samples, scored, shown, logp(state, shown))
        return state, Report(
            metrics,
            samples=said[: run.shown],
            errors=[*_failures(scored), *guards.take_errors()],
        )

    def evaluate(state: dict[str, Any], step: int) -> Report:
        asked = [task for task in run.held_out for _ in range(run.answers)]
        rollout = sampler.sample(params(state), _requests(run, asked, 0))
        samples = _samples(run, asked, rollout)
        scored = _score(run.reward, samples)
        correct = np.asarray(scored.parts[run.correct]).reshape(-1, run.answers)
        metrics = {"eval/pass@1": pass_at_k(correct, 1)}
        if run.answers > 1:
            metrics[f"eval/pass@{run.answers}"] = pass_at_k(correct, run.answers)
        details = _rollout_metrics(rollout, scored)
        metrics |= {f"eval/{k}": v for k, v in details.items()}
        metrics |= {f"eval/baseline_{k}": v for k, v in run.baselines.items()}
        said = [
            _said(samples[i], scored, i, i // run.answers)
            for i in range(0, len(samples), run.answers)
        ]
        return Report(metrics, samples=said[: run.shown], errors=_failures(scored))

    host: dict[str, HostState] = {"prompts": run.prompts, "guards": guards}
    return Program(state, iterate, evaluate, params, host)


def _sampler(run: Run) -> Sampler:
    sharding = None
    if run.mesh is not None:
        rows = jax.sharding.PartitionSpec(None, *ROWS)
        sharding = jax.sharding.NamedSharding(run.mesh, rows)
    return Sampler(
        run.policy,
        slots=run.slots,
        length=run.length,
        decode=run.tokenizer.decode,
        cache_sharding=sharding,
    )


def _requests(run: Run, tasks: Sequence[Task], step: int) -> list[Request]:
    # A seed names run, step and row: no two rows of a run share their noise.
    start = (run.seed << 44) + (step << 20)
    prompts: dict[int, Sequence[int]] = {}
    return [
        Request(
            prompt=prompts.setdefault(id(task), run.encode(task)),
            seed=(start + row) % 2**64,
            stop_ids=run.tokenizer.stop_ids,
            **run.sampling,
        )
        for row, task in enumerate(tasks)
    ]


def _samples(run: Run, tasks: Sequence[Task], rollout: Rollout) -> list[Sample]:
    samples = []
    for row, task in enumerate(tasks):
        start, end = int(rollout.prompt_length[row]), int(rollout.length[row])
        ids = np.asarray(rollout.tokens[row])
        finish = int(rollout.finish[row])
        samples.append(
            Sample(
                task=task,
                text=run.tokenizer.decode(ids[start:end].tolist()),
                prompt_ids=ids[:start].tolist(),
                response_ids=ids[start:end].tolist(),
                truncated=finish == Finish.LENGTH,
                finished=finish in (Finish.STOP, Finish.TEXT, Finish.ENVIRONMENT),
            )
        )
    return samples


def _decide(run: Run, state: dict[str, Any], step: int) -> Any:
    if run.controller is None:
        return None
    key = jax.random.fold_in(jax.random.key(run.seed), step)
    return run.controller.decide(state["controller"], {"step": step}, key)


def _update(
    run: Run,
    learn: Learner,
    train: TrainState,
    held: Params,
    frozen: Mapping[str, Params],
    batch: Batch,
    decision: Any,
    place: Callable[[Batch], Batch],
) -> tuple[TrainState, dict[str, float]]:
    """`updates` optimiser steps, each on its share of the prompts."""
    group = np.asarray(batch.need("group"))
    names = np.unique(group)
    reports = []
    for names_of_one in np.array_split(names, min(run.updates, len(names))):
        part = batch.select(np.flatnonzero(np.isin(group, names_of_one)))
        parts = microbatches.split(part, rows=run.rows, share=run.share)
        train, metrics = learn.update(
            train, held, frozen, [place(p) for p in parts], decision
        )
        reports.append(jax.device_get(metrics))
    return train, {k: float(np.mean([r[k] for r in reports])) for k in reports[0]}


def _score(reward: RewardPool | Reward, samples: Sequence[Sample]) -> Scored:
    if isinstance(reward, RewardPool):
        return reward.score(samples)
    return score_here(reward, samples)


def _rollout_metrics(rollout: Rollout, scored: Scored) -> dict[str, float]:
    mask = np.asarray(rollout.mask)
    logp = np.asarray(rollout.behavior_logp)
    metrics = {
        "response/tokens": float(mask.sum(axis=1).mean()),
        "response/truncated": float(np.mean(rollout.truncated)),
        # -log p of what was drawn is the entropy in expectation, and costs nothing.
        "entropy": float(-logp[mask].mean()) if mask.any() else float("nan"),
    }
    for name, values in {**scored.parts, "mean": scored.reward}.items():
        known = np.asarray(values)[np.isfinite(values)]
        metrics[f"reward/{name}"] = float(known.mean()) if len(known) else float("nan")
    unscored = 1.0 - np.isfinite(scored.reward).mean()
    return metrics | {"reward/unscored": float(unscored)}


def _failures(scored: Scored) -> list[dict[str, Any]]:
    """What could not be scored, as lines for the log: the counts and the first few."""
    if not scored.failures:
        return []
    return [{"kind": "reward", "message": scored.report(), "counts": scored.counts}]


def _said(sample: Sample, scored: Scored, row: int, group: int) -> dict[str, Any]:
    task = sample.task
    asked = task.prompt if isinstance(task.prompt, str) else task.prompt[-1]["content"]
    return {
        "prompt": asked,
        "response": sample.text,
        "answer": task.answer,
        "reward": float(scored.reward[row]),
        "parts": {name: float(values[row]) for name, values in scored.parts.items()},
        "group": group,
        "finish": "length" if sample.truncated else "stop",
    }


def _shown(
    run: Run,
    samples: Sequence[Sample],
    scored: Scored,
    batch: Batch,
    logp: np.ndarray,
) -> list[dict[str, Any]]:
    """Rows with their tokens; `logp` is of the weights after the update."""
    group, advantage = batch.need("group"), batch.need("advantage")
    behavior_logp = batch.need("behavior_logp")
    rows = []
    for row in range(batch.mask.shape[0]):
        sample = samples[row]
        start = len(sample.prompt_ids)
        tokens = [
            {
                "text": run.tokenizer.token_text(token),
                "id": token,
                "mask": bool(batch.mask[row, slot]),
                "logp": float(logp[row, slot]),
                "behavior_logp": float(behavior_logp[row, slot]),
                "advantage": float(advantage[row, slot]),
            }
            for slot, token in enumerate(sample.response_ids, start)
        ]
        said = _said(sample, scored, row, int(group[row]))
        prompt = run.tokenizer.decode(sample.prompt_ids, special=True)
        rows.append(said | {"prompt": prompt, "tokens": tokens})
    return rows
