"""What a person watching a run sees: a live bar in a terminal, plain lines in a log."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from rlpost.training import processes

# Shown first, if a run has them, and how they are called.
SHOWN = {
    "pass@1": "pass@1",
    "reward/mean": "reward",
    "accuracy": "accuracy",
    "loss": "loss",
    "nll": "nll",
    "kl": "kl",
    "kl_behavior": "kl",
    "entropy": "entropy",
    "gradient/norm": "gradient",
    "speed/tokens_per_s": "tok/s",
}
FEWEST = 3  # numbers in a line: with less of the known, others fill up
SAMPLE_SECONDS = 20.0  # between samples shown; the first come at once
FIRST_SAMPLES = 3


def _never_raises(method: Callable[..., None]) -> Callable[..., None]:
    """A broken pipe or an odd character must not end a run of days."""

    @functools.wraps(method)
    def guarded(self: Progress, *args: Any) -> None:
        if self._stream is None:
            return
        try:
            method(self, *args)
        except Exception:
            self._stream = None

    return guarded


class Progress:
    """The display of a run; only the first process shows one, and none ever raises.

    Args:
        steps: updates in all.
        stream: where to; None means stdout.
        live: a bar that moves; None decides by whether the stream is a terminal.
        seconds: between two plain lines of training. Evaluations are always shown.
    """

    def __init__(
        self,
        steps: int,
        *,
        stream: TextIO | None = None,
        live: bool | None = None,
        seconds: float = 5.0,
    ):
        stream = sys.stdout if stream is None else stream
        self._stream: TextIO | None = stream if processes.is_first() else None
        self._live = stream.isatty() if live is None else live
        self._steps = steps
        self._seconds = seconds
        self._bar: Any = None
        self._shown = -math.inf
        self._sampled = -math.inf
        self._samples = 0
        self._from: tuple[int, float] | None = None

    @_never_raises
    def start(self, step: int) -> None:
        """Begin, `step` updates being done already."""
        if self._live:
            self._bar = _bar(self._stream)
            self._bar.start()
            text = f"{step}/{self._steps}  the first update compiles"
            self._task = self._bar.add_task(text, total=self._steps, completed=step)

    @_never_raises
    def train(self, line: Mapping[str, Any]) -> None:
        """Show a line of training metrics, as `RunLog.write` returns it."""
        step, now = line["step"], time.monotonic()
        if self._from is None:  # the first update compiles: it tells nothing of speed
            self._from = (step, now)
        done = f"{step}/{self._steps}"
        if self._bar is not None:
            text = "  ".join([done, self._left(step), summary(line)])
            self._bar.update(self._task, completed=step, description=text)
        elif now - self._shown >= self._seconds or step == self._steps:
            self._shown = now
            self._print(f"update {done}  {summary(line)}  {self._left(step)}".rstrip())

    @_never_raises
    def evaluation(self, line: Mapping[str, Any]) -> None:
        """Show the metrics of an evaluation."""
        self._print(f"eval after update {line['step']}:  {summary(line)}")

    @_never_raises
    def sample(self, sample: Mapping[str, Any]) -> None:
        """Show what the model said, unless one was shown a moment ago."""
        now = time.monotonic()
        if self._samples >= FIRST_SAMPLES and now - self._sampled < SAMPLE_SECONDS:
            return
        self._samples += 1
        self._sampled = now
        self._print("  " + _one_line(sample))

    @_never_raises
    def note(self, message: str) -> None:
        """Show a message."""
        self._print(message)

    def close(self) -> None:
        """Leave the terminal as it was."""
        bar, self._bar = self._bar, None
        if bar is not None:
            try:
                bar.stop()
            except Exception:
                self._stream = None

    def _print(self, text: str) -> None:
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def _left(self, step: int) -> str:
        begin, since = self._from or (step, 0.0)
        if step <= begin or step >= self._steps:
            return ""
        each = (time.monotonic() - since) / (step - begin)
        return f"{duration(each * (self._steps - step))} left"


def summary(line: Mapping[str, Any]) -> str:
    """The numbers of a line worth a glance, "reward 0.312  loss 0.02"."""
    line = {key.removeprefix("eval/"): value for key, value in line.items()}
    numbers = {SHOWN[key]: line[key] for key in SHOWN if key in line}
    for key, value in line.items():
        told = key in SHOWN or key in ("step", "kind") or key.startswith("time")
        if not told and len(numbers) < FEWEST:
            numbers[key] = value
    return "  ".join(f"{key} {_number(value)}" for key, value in numbers.items())


def duration(seconds: float) -> str:
    """Seconds for a human: "42 s", "3 min 20 s", "2 h 05 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _number(value: Any) -> str:
    if value is None:
        return "nan"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value)


def _one_line(sample: Mapping[str, Any]) -> str:
    def text(value: Any) -> str:
        value = value if isinstance(value, str) else _number(value)
        value = " ".join(value.split())
        return value if len(value) <= 100 else value[:60] + " ... " + value[-35:]

    known = [key for key in SAMPLE if key in sample]
    if "question" in known:  # says it in short
        known = [key for key in known if key != "prompt"]
    told = [f"{key}: {text(sample[key])}" for key in known]
    return " | ".join(told or [f"{k}: {text(v)}" for k, v in list(sample.items())[:4]])


SAMPLE = ("question", "prompt", "response", "answer", "reward")


def _bar(stream: TextIO | None) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    class Quiet(Console):
        def on_broken_pipe(self) -> None:  # rich would end the process
            self.quiet = True

    # In a narrow terminal the numbers are cut, and nothing else.
    return Bar(
        BarColumn(bar_width=16, table_column=Column(min_width=16)),
        TimeElapsedColumn(table_column=Column(min_width=7)),
        TextColumn(
            "{task.description}",
            markup=False,
            table_column=Column(no_wrap=True, overflow="ellipsis"),
        ),
        console=Quiet(file=stream, force_terminal=True),
        refresh_per_second=4,
    )
