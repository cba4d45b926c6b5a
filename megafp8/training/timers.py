"""Timers: where each rank's time goes in an iteration, by phase, at the depth of `--timing-log-level`.

On a GPU a span of time is between two events of its stream, read when a line is logged: nothing waits for the device
before. So a wait for other ranks shows as long as it holds up the stream, and what is hidden behind work shows as
nothing. Phases above the level are not marked at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import torch

from megafp8.parallel import ParallelContext
from megafp8.step import no_spans

DATA = "batch-generator"
"""Waiting for batches: counted on the host, by the batches themselves."""
COMMUNICATION = "communication"
PHASES = {
    DATA: 1,
    "forward-backward": 1,
    "all-grads-sync": 1,
    "optimizer": 1,
    "forward-compute": 2,
    "backward-compute": 2,
    "wgrad-compute": 2,
    "forward-recv": 2,
    "backward-recv": 2,
    COMMUNICATION: 2,
}
"""Megatron's names where it has one -> the level from which on a phase is measured. forward-backward and all-grads-sync
as Megatron nests them: the first has the second inside. communication: waits for collectives over the axes of the
layout, wherever they are; not for what all ranks agree on between two iterations."""
WAITS = ("forward-recv", "backward-recv", COMMUNICATION)
OPEN_SPANS = 4096
"""Spans after which those that are over are added up, and after as many more again."""


class Timers:
    """`Spans` that adds up seconds by phase, and hands marks on to a trace while one is written.

    traced: makes the trace's mark of a span, or None. working: set while what is counted as the rank's work runs.
    """

    def __init__(self, device: torch.device, level: int = 0) -> None:
        self.level = level
        self.names = tuple(name for name, at in PHASES.items() if at <= level)
        self.traced: Callable[[str], AbstractContextManager] | None = None
        self.working = False
        self._measured = frozenset(self.names) - {DATA}
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, bool, object, object]] = []
        self._fold_at = OPEN_SPANS
        self._sums: dict[tuple[str, bool], float] = {}

    def __call__(self, name: str, detail: str = "") -> AbstractContextManager:
        timed = _Span(self, name) if name in self._measured and not self._recording() else None
        if self.traced is None:
            return timed or no_spans(name)
        stack = ExitStack()
        if timed is not None:
            stack.enter_context(timed)
        stack.enter_context(self.traced(f"{name} {detail}".rstrip()))
        return stack

    def _recording(self) -> bool:
        """Whether a CUDA graph is being recorded: events in it would be the graph's, with no time to tell."""
        return self._cuda and torch.cuda.is_current_stream_capturing()

    def now(self) -> object:
        """A moment: seconds, or on a GPU an event on the stream."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, name: str, begin: object, end: object) -> None:
        self._spans.append((name, self.working, begin, end))
        if len(self._spans) >= self._fold_at:
            self._fold(wait=False)
            self._fold_at = len(self._spans) + OPEN_SPANS  # those that are left are far behind on a GPU: not each time

    def _fold(self, *, wait: bool) -> None:
        """Adds up the spans that are over; wait: all of them."""
        spans, self._spans = self._spans, []
        for number, (name, working, begin, end) in enumerate(spans):
            if self._cuda and wait:
                end.synchronize()
            elif self._cuda and not end.query():
                self._spans = spans[number:] + self._spans  # what comes after is not over either, but for other streams
                return
            seconds = begin.elapsed_time(end) / 1e3 if self._cuda else end - begin
            self._sums[name, working] = self._sums.get((name, working), 0.0) + seconds

    def take(self) -> tuple[dict[str, float], float]:
        """(seconds of each phase but the data's since the last time, seconds of waiting for other ranks at work).

        On a GPU waits for what was queued.
        """
        self._fold(wait=True)
        self._fold_at = OPEN_SPANS
        sums, self._sums = self._sums, {}
        phases = {name: sums.get((name, True), 0.0) + sums.get((name, False), 0.0) for name in self._measured}
        return phases, sum(sums.get((name, True), 0.0) for name in WAITS)


class _Span:
    def __init__(self, timers: Timers, name: str) -> None:
        self._timers, self._name = timers, name

    def __enter__(self) -> None:
        self._begin = self._timers.now()

    def __exit__(self, *exc: object) -> None:
        self._timers.add(self._name, self._begin, self._timers.now())


@dataclass(frozen=True)
class PhaseTime:
    """One phase's milliseconds an iteration, of every rank."""

    name: str
    ranks: tuple[float, ...]

    @property
    def slowest(self) -> int:
        return max(range(len(self.ranks)), key=self.ranks.__getitem__)

    def numbers(self) -> dict[str, float | int]:
        """For metrics.jsonl."""
        return {"min_ms": min(self.ranks), "max_ms": max(self.ranks), "slowest_rank": self.slowest}


def over_ranks(
    parallel: ParallelContext, device: torch.device, names: tuple[str, ...], seconds: Mapping[str, float]
) -> list[PhaseTime]:
    """The phases `names`, all ranks' together; every rank calls it. seconds: of this rank, an iteration."""
    if not names:
        return []
    own = torch.tensor([[1e3 * seconds[name] for name in names]], dtype=torch.float64, device=device)
    columns = parallel.everyone.gather(own).t().tolist()
    return [PhaseTime(name, tuple(column)) for name, column in zip(names, columns, strict=True)]


def table(phases: list[PhaseTime], option: str) -> list[str]:
    """Megatron's lines for the console. option: of `--timing-log-option`; phases that took no time are left out."""
    shown = [phase for phase in phases if max(phase.ranks) > 0]
    if not shown:
        return []
    if option == "all":
        lines = ["times across ranks (ms):"]
        for phase in shown:
            lines.append(f"  {phase.name}:")
            lines += [f"     rank {rank:2d}: {ms:.2f}" for rank, ms in enumerate(phase.ranks)]
        return lines
    lines = [f"{'max' if option == 'max' else '(min, max)'} time across ranks (ms):"]
    for phase in shown:
        span = f"{max(phase.ranks):.2f}"
        span = span if option == "max" else f"({min(phase.ranks):.2f}, {span})"
        slowest = f"  slowest: rank {phase.slowest}" if len(phase.ranks) > 1 else ""
        lines.append(f"    {(phase.name + ' ').ljust(48, '.')}: {span}{slowest}")
    return lines
