"""The queue of deferred weight gradients: backward leaves them here, a later action of the schedule runs them.

A task owns its operands, in FP8 where the linear runs in FP8; the queue counts their bytes and, given a limit, runs the
oldest tasks early rather than hold more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class _Task:
    chunk: int
    microbatch: int
    run: Callable[[], None]
    held_bytes: int


@dataclass(frozen=True)
class WgradSlot:
    """Where the linears of one chunk and microbatch submit: the step's `wgrads`."""

    queue: WgradQueue
    chunk: int
    microbatch: int

    def submit(self, run: Callable[[], None], held_bytes: int) -> None:
        self.queue.add(_Task(self.chunk, self.microbatch, run, held_bytes))


class WgradQueue:
    """First in, first out, so that gradients are added up in the order of backward.

    limit_bytes: None holds whatever the schedule defers. peak_bytes: most that was held at once.
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = self.peak_bytes = 0
        self._tasks: deque[_Task] = deque()

    def __len__(self) -> int:
        return len(self._tasks)

    def slot(self, chunk: int, microbatch: int) -> WgradSlot:
        return WgradSlot(self, chunk, microbatch)

    def add(self, task: _Task) -> None:
        if self.limit_bytes is not None:
            while self._tasks and self.held_bytes + task.held_bytes > self.limit_bytes:
                self._run_oldest()
        self._tasks.append(task)
        self.held_bytes += task.held_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        if self.limit_bytes is not None and self.held_bytes > self.limit_bytes:  # it alone is too much
            self._run_oldest()

    def run(self, chunk: int, microbatch: int) -> None:
        """Runs what is left of the tasks of one chunk and microbatch, the oldest in the queue."""
        while self._tasks and (self._tasks[0].chunk, self._tasks[0].microbatch) == (chunk, microbatch):
            self._run_oldest()
        assert all((t.chunk, t.microbatch) != (chunk, microbatch) for t in self._tasks), "weight gradients out of order"

    def _run_oldest(self) -> None:
        task = self._tasks.popleft()
        with torch.no_grad():
            task.run()
        self.held_bytes -= task.held_bytes
