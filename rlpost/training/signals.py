"""SIGTERM and SIGINT as something to ask about between two iterations."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def caught() -> Iterator[list[str]]:
    """A list that gets the name of each SIGTERM and SIGINT, instead of an end at once.

    A second SIGINT interrupts at once. Handlers are restored on the way out; outside
    the main thread, where Python allows no handlers, the list stays empty.
    """
    received: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(signal.Signals(number).name)

    before = {s: signal.signal(s, note) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
