"""Signals: SIGTERM or SIGUSR1 (a scheduler's notice), or SIGINT, ends the run after the iteration in hand, with a
checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class StopSignal:
    """Remembers the first of SIGNALS; a second SIGINT interrupts at once. A context manager."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._previous: dict[int, object] = {}

    def _handle(self, number: int, frame: object) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number

    def __enter__(self) -> StopSignal:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)


@contextmanager
def ignored(number: int) -> Iterator[None]:
    """A signal that asks for something, where nothing is there to give: by default it would end the process."""
    previous = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, previous)
