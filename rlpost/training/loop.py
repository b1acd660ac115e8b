"""The loop of a run: repeat, evaluate, write down, save, and go on after a kill."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import jax

from rlpost.training import processes, signals
from rlpost.training.checkpoints import CheckpointError, Checkpoints
from rlpost.training.host_state import HostState
from rlpost.training.metrics import RunLog
from rlpost.training.phases import Phases
from rlpost.training.progress import Progress
from rlpost.training.workdir import Workdir, WorkdirError

# A disk may be full for a while; a run that cannot be saved any more should not go on.
FAILED_SAVES = 3
SHOWN_ERRORS = 3  # of one report; all of them are written down


class Report(NamedTuple):
    """What an iteration or an evaluation tells.

    Attributes:
        metrics: name to number, scalar array or `Mean`; replicated over processes.
        samples: what the model said: mappings such as {"prompt", "response", "reward"}.
        errors: what went wrong and was dealt with: mappings with "kind" and "message".
    """

    metrics: Mapping[str, Any]
    samples: Iterable[Mapping[str, Any]] = ()
    errors: Iterable[Mapping[str, Any]] = ()


class Every(NamedTuple):
    """After how many updates what happens; 0 means never.

    Attributes:
        evaluate: also before the first update and after the last.
        save: also after the last update, and on SIGTERM or SIGINT.
        write: a line of training metrics; also after the last update.
        keep: checkpoints of such updates are kept for good.
    """

    evaluate: int = 0
    save: int = 0
    write: int = 1
    keep: int = 0


Iteration = Callable[[Any, int], tuple[Any, Report]]
Evaluation = Callable[[Any, int], Report]


class Interrupted(Exception):
    """A signal ended the run; its state is saved and the same command goes on."""


def run(
    iteration: Iteration,
    state: Any,
    *,
    steps: int,
    workdir: Workdir,
    evaluate: Evaluation | None = None,
    every: Every = Every(),  # noqa: B008 (a tuple of numbers)
    host: Mapping[str, HostState] | None = None,
    phases: Phases | None = None,
    progress: Progress | None = None,
    profile: tuple[int, int] | None = None,
    keep: int = 2,
    tensorboard: bool = True,
) -> Any:
    """Train until `steps` updates are done, from the newest checkpoint if there is one.

    A run that was killed and is started again goes on from its last checkpoint, at the
    first batch which that had not consumed, and ends with the state and the lines (but
    for times) of a run that was never killed, as far as `iteration` is deterministic.

    An iteration that raises ends the run: the error is written down with its step, and
    the last checkpoint stands, since the state may be half donated by then.

    Args:
        iteration: (state, step) -> (state, Report), `step` counting from 0. It may
            donate the state that it is given.
        state: the initial state, one pytree of arrays; what is restored has its
            structure and shardings. On resume both are held for a moment.
        steps: updates in all.
        workdir: the run's folder, held by this process.
        evaluate: (state, step) -> Report, `step` being the updates done.
        every: how often to evaluate, save and write.
        host: structures outside the pytree, saved and restored by name: a data
            iterator, guards, an archive.
        phases: the timer that `iteration` uses; its seconds join each line.
        progress: the display; None makes one that fits stdout.
        profile: (first step, how many) to trace with jax.profiler into the workdir.
        keep: newest checkpoints to keep.
        tensorboard: write event files too.

    Returns:
        The state after `steps` updates.

    Raises:
        Interrupted: after SIGTERM or SIGINT, when the iteration that was running has
            ended and its state is saved.
        CheckpointError: if there is something to resume that cannot be, or saving the
            end of the run, or saving three times in a row, fails.
    """
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    host, phases = dict(host or {}), phases or Phases()
    checkpoints = Checkpoints(workdir.checkpoints, keep=keep, every=every.keep)
    state = _strong(state)
    checkpoints.check(state, _states(host))  # now, and not after an hour's work
    state, saved, elapsed, notes = _resume(checkpoints, workdir, state, host)
    start = max(saved, 0)
    with ExitStack() as stack:
        log = RunLog(workdir, step=saved, elapsed=elapsed, tensorboard=tensorboard)
        stack.callback(log.close)
        progress = progress or Progress(steps)
        stack.callback(progress.close)
        signalled = stack.enter_context(signals.caught())
        trace = stack.enter_context(_Trace(workdir, profile))
        out = _Output(log, progress, phases)
        progress.start(start)
        for note in notes:
            out.trouble(start, {"kind": "checkpoint", "message": note})
        if saved >= 0:
            progress.note(f"resumed after update {start} of {steps}")

        def save(done: int, must: bool) -> None:
            nonlocal saved
            with phases("save"):
                if out.save(checkpoints, workdir, done, state, host, must):
                    saved = done

        def assess(done: int) -> None:
            assert evaluate is not None
            with out.failing_at(done), phases("eval"):
                report = evaluate(state, done)
            out.write(done, "eval", report)

        assessing = evaluate is not None and every.evaluate > 0
        if assessing and saved < 0:
            assess(0)
        for step in range(start, steps):
            # Between two iterations every process sees the same, and stops alike.
            if processes.any_of(bool(signalled)):
                if saved != step:
                    save(step, must=True)
                raise Interrupted(
                    f"{signalled[0] if signalled else 'a signal elsewhere'} after "
                    f"update {step} of {steps}: saved, the same command goes on"
                )
            trace.before(step)
            with out.failing_at(step + 1), phases("step"):
                state, report = iteration(state, step)
            state, done, last = _strong(state), step + 1, step + 1 == steps
            trace.after(step)
            out.write(done, "train", report, last or _due(done, every.write))
            if assessing and (last or _due(done, every.evaluate)):
                assess(done)
            if last or _due(done, every.save):
                save(done, must=last)
    return state


class _Output:
    """Where reports and troubles go: files, display, and the count of failed saves."""

    def __init__(self, log: RunLog, progress: Progress, phases: Phases):
        self.log = log
        self.progress = progress
        self.phases = phases
        self.failed_saves = 0

    def write(self, step: int, kind: str, report: Report, line: bool = True) -> None:
        samples = list(report.samples)
        self.log.samples(step, kind, samples)
        for sample in samples[:1]:
            self.progress.sample(sample)
        errors = list(report.errors)
        for error in errors[:SHOWN_ERRORS]:
            self.trouble(step, error)
        for error in errors[SHOWN_ERRORS:]:
            self.log.error(step, **error)
        if len(errors) > SHOWN_ERRORS:
            self.progress.note(f"and {len(errors) - SHOWN_ERRORS} more errors")
        if line:
            metrics = dict(report.metrics) | self.phases.take()
            written = self.log.write(step, kind, metrics)
            show = self.progress.evaluation if kind == "eval" else self.progress.train
            show(written)

    def trouble(self, step: int, error: Mapping[str, Any]) -> None:
        self.log.error(step, **error)
        self.progress.note(f"{error['kind']}: {error['message']}")

    def save(
        self,
        checkpoints: Checkpoints,
        workdir: Workdir,
        step: int,
        state: Any,
        host: Mapping[str, HostState],
        must: bool,
    ) -> bool:
        """Save; a failure is written down, and raised if it `must` not be or lasts."""
        self.log.sync()  # the checkpoint counts on the lines before it
        kept = {"elapsed": self.log.elapsed, "structures": _states(host)}
        try:
            checkpoints.save(step, state, kept)
        except CheckpointError as error:
            self.failed_saves += 1
            self.trouble(step, {"kind": "save", "message": str(error)})
            if must or self.failed_saves >= FAILED_SAVES:
                raise
            return False
        self.failed_saves = 0
        if processes.is_first():
            workdir.write_json("saved.json", {"step": step})
        return True

    @contextmanager
    def failing_at(self, step: int) -> Iterator[None]:
        """Write down what is raised within, and say in it where the run stands."""
        try:
            yield
        except Exception as error:
            message = f"{type(error).__name__}: {error}"
            where = "".join(traceback.format_exception(error))
            with suppress(WorkdirError):  # a full disk must not hide what happened
                self.log.error(step, "exception", message, traceback=where)
            error.add_note(
                f"at update {step}; the last checkpoint stands, and the same command "
                "goes on from there"
            )
            raise


class _Trace:
    """A jax.profiler trace of some steps."""

    def __init__(self, workdir: Workdir, steps: tuple[int, int] | None):
        self._folder = workdir.profile
        self._first, self._count = steps or (-1, 0)
        self._on = False

    def before(self, step: int) -> None:
        if self._first <= step < self._first + self._count and not self._on:
            jax.profiler.start_trace(str(self._folder))
            self._on = True

    def after(self, step: int) -> None:
        if self._on and step + 1 >= self._first + self._count:
            self._on = False
            jax.profiler.stop_trace()

    def __enter__(self) -> _Trace:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on:
            jax.profiler.stop_trace()


def _resume(
    checkpoints: Checkpoints,
    workdir: Workdir,
    state: Any,
    host: Mapping[str, HostState],
) -> tuple[Any, int, float, list[str]]:
    """(state, step saved or -1, seconds taken, notes), the host structures set."""
    restored = checkpoints.restore(state)
    marker = workdir.read_json("saved.json")
    newest = -1 if marker is None else marker["step"]
    if restored is None:
        if newest >= 0:
            raise CheckpointError(
                f"the checkpoints of {workdir.path} are gone, the last was of step "
                f"{newest}: put them back, or start in another folder"
            )
        return state, -1, 0.0, []
    notes = list(restored.notes)
    if newest > restored.step and newest not in checkpoints.steps():
        notes.append(
            f"the checkpoint of step {newest} is gone: went back to {restored.step}"
        )
    kept = restored.host["structures"]
    if set(kept) != set(host):
        raise CheckpointError(
            f"the checkpoint of step {restored.step} keeps host structures "
            f"{sorted(kept)}, this run has {sorted(host)}"
        )
    for name, structure in host.items():
        structure.set_state(kept[name])
    return restored.state, restored.step, restored.host["elapsed"], notes


def _states(host: Mapping[str, HostState]) -> dict[str, Any]:
    return {name: structure.get_state() for name, structure in host.items()}


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _strong(state: Any) -> Any:
    """The state without weak types: a checkpoint has none, and they change dtypes."""

    def strong(x: Any) -> Any:
        weak = isinstance(x, jax.Array) and jax.typeof(x).weak_type
        return jax.lax.convert_element_type(x, x.dtype) if weak else x

    return jax.tree.map(strong, state)
