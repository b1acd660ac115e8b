"""The two kinds of reward workers: a process that can be ended, and a thread."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any

from rlpost.rewards.types import Reward, Sample
from rlpost.rewards.worker import evaluate

GRACE = 1.0  # seconds beyond the limit in which a worker may end by itself
_TAIL = 4000  # characters kept of what a worker wrote before it ended


class RewardError(RuntimeError):
    """The reward function cannot be used; the message tells the cause."""


class ProcessWorker:
    """A child process that scores, started again whenever it has ended.

    Messages are lines of JSON: samples go out as plain values, numbers come back, and
    nothing is unpickled on either side.
    """

    def __init__(self, target: str, arguments: Any, limit: float, start: float) -> None:
        self._command = [
            *(sys.executable, "-P", "-m", "rlpost.rewards.worker"),
            *(target, json.dumps(arguments), str(limit)),
        ]
        self._target, self._limit, self._start = target, limit, start
        self._lock = threading.Lock()  # between `kill` and what replaces the process
        self._launch()

    def call(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """`evaluate`'s answer, or {"timeout": where} or {"died": last words}.

        Raises:
            RewardError: if a worker cannot be started.
        """
        if self._process is None:
            self._launch()
        if not self._ready:
            self._await_ready()
        self._clear_log()
        try:
            request = json.dumps([sample.to_json() for sample in samples]) + "\n"
        except TypeError as error:
            return {"invalid": f"the sample is not made of JSON values: {error}"}
        begun = time.monotonic()
        try:
            self._process.stdin.write(request.encode())
            self._process.stdin.flush()
        except OSError:
            return {"died": self._end()}
        reply = self._read(begun + self._limit + GRACE)
        if reply is not None:
            return reply
        late = time.monotonic() - begun >= self._limit
        return {"timeout" if late else "died": self._end()}

    def kill(self) -> None:
        """End the process at once; safe while another thread is in `call`."""
        with self._lock:
            if self._process is not None:
                _signal(self._process)

    def close(self) -> None:
        """End an idle process; it has nothing to save, but may have to clean up."""
        if self._process is None:
            return
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE if self._ready else 0)
        self._end()

    def _launch(self) -> None:
        paths = [path or os.getcwd() for path in sys.path]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),  # it imports what we can import
            "JAX_PLATFORMS": "cpu",  # a reward that uses JAX leaves the accelerator be
        }
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in _end)
        self._ready, self._pending = False, b""
        # A process group of its own: Ctrl-C reaches only the parent, which decides, and
        # what a reward has started ends with it.
        process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )
        with self._lock:
            self._process: Any = process

    def _await_ready(self) -> None:
        reply = self._read(time.monotonic() + self._start)
        if reply is not None and "ready" in reply:
            self._ready = True
            return
        cause = reply["raised"] if reply else self._end()
        raise RewardError(
            f"a worker for the reward {self._target!r} did not start (it was given "
            f"{self._start:g} s):\n{cause}"
        )

    def _read(self, deadline: float) -> dict[str, Any] | None:
        """The next reply; None if the process ends or the time is up."""
        pipe = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    return None
                read = os.read(pipe, 1 << 16)
                if not read:
                    return None
                self._pending += read
        line, _, self._pending = self._pending.partition(b"\n")
        return json.loads(line)

    def _clear_log(self) -> None:
        # Both processes write at one position, so moving it here moves it there.
        self._log.seek(0)
        self._log.truncate(0)

    def _end(self) -> str:
        """End the process and tell its last words."""
        with self._lock:
            process, self._process = self._process, None
            _signal(process)
            process.wait()
        with contextlib.suppress(OSError):  # unsent bytes have nowhere to go
            process.stdin.close()
        process.stdout.close()
        self._log.seek(0)
        words = self._log.read().decode("utf-8", "replace")[-_TAIL:].strip()
        self._log.close()
        return words or f"it ended with code {process.returncode} and said nothing"


class ThreadWorker:
    """Scores in threads of this process.

    A reward that hangs cannot be ended: its thread is left behind, and only its result
    is refused.
    """

    def __init__(self, reward: Reward, limit: float) -> None:
        self._reward, self._limit = reward, limit
        self._over = threading.Event()

    def call(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """`evaluate`'s answer, or {"timeout": where it hangs}."""
        answers: list[dict[str, Any]] = []
        over = self._over = threading.Event()

        def run() -> None:
            answers.append(evaluate(self._reward, samples))
            over.set()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        over.wait(self._limit)
        if answers:
            return answers[0]
        frame = sys._current_frames().get(thread.ident or 0)
        where = "".join(traceback.format_stack(frame)) if frame else ""
        return {"timeout": where[-_TAIL:]}

    def kill(self) -> None:
        """Wait no longer; the reward itself cannot be ended."""
        self._over.set()

    close = kill


def _signal(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and what it started, unless it was already waited for."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
