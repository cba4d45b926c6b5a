"""How the benchmarks take time: events on a GPU's queue, the clock elsewhere; and which kernels a call runs.

Times are milliseconds. Medians of rounds in which all candidates take turns are what figures are quoted from: clocks,
temperature and other users then touch all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.profiler import ProfilerActivity

Run = Callable[[], object]
Mark = torch.cuda.Event | float
AHEAD_CYCLES = 2_000_000  # about a millisecond in which the host queues what is timed
MARKER = "spin_kernel"  # what `torch.cuda._sleep` runs, and nobody else while kernels are listed


def mark(device: torch.device) -> Mark:
    """A point on the device's queue."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Mark, end: Mark) -> float:
    """Milliseconds from one mark to another; waits for the second."""
    if isinstance(end, float):
        return 1e3 * (end - start)
    end.synchronize()
    return start.elapsed_time(end)


def wait(device: torch.device) -> None:
    """Waits for all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def timed(device: torch.device, times: list[float]) -> Iterator[None]:
    """Adds to `times` how long the block took, from an empty queue to an empty queue."""
    wait(device)
    start = mark(device)
    yield
    times.append(between(start, mark(device)))


def milliseconds(
    run: Run, device: torch.device, repeats: int, *, calls: int = 1, warmup: int = 3, ahead: bool = False
) -> float:
    """Median time of a call, of `repeats` times `calls` calls queued one after the other, as in training.

    ahead: the queue is filled before it starts, so that the host's own time doesn't count.
    """
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        if ahead and device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda._sleep(AHEAD_CYCLES)
        start = mark(device)
        for _ in range(calls):
            run()
        times.append((start, mark(device)))
    return statistics.median(between(*pair) for pair in times) / calls


def in_turn(
    runs: Mapping[str, Run], device: torch.device, rounds: int, *, calls: int = 1, before: Run | None = None
) -> dict[str, list[float]]:
    """Times of a call of each candidate, a round after the other. before: runs ahead of each, untimed, such as a flush
    of caches. Candidates have been warmed up."""
    marks: dict[str, list[tuple[Mark, Mark]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            if before is not None:
                before()
            start = mark(device)
            for _ in range(calls):
                run()
            marks[name].append((start, mark(device)))
    wait(device)
    return {name: [between(*pair) / calls for pair in pairs] for name, pairs in marks.items()}


@dataclass(frozen=True)
class Kernel:
    """One launch. start, ms: on the device (on a CPU, of an operator, without what it calls)."""

    name: str
    start: float
    ms: float

    @property
    def end(self) -> float:
        return self.start + self.ms


@dataclass(frozen=True)
class Call:
    """A call on the device's timeline, from when the device is done with the one before until it is done with this one.

    kernels: in the order of their starts.
    """

    kernels: list[Kernel]
    start: float
    end: float

    @property
    def span(self) -> float:
        """Milliseconds."""
        return self.end - self.start

    def shares(self) -> Iterator[tuple[Kernel, float]]:
        """(kernel, ms of it in which none that started before runs): they add up to the time in which any runs."""
        covered = self.start
        for kernel in self.kernels:
            yield kernel, max(0.0, kernel.end - max(kernel.start, covered))
            covered = max(covered, kernel.end)

    def gaps(self) -> Iterator[tuple[float, str, str]]:
        """(ms in which no kernel runs, name of the kernel before, of the one after); names are "" at the ends."""
        covered, before = self.start, ""
        for kernel in self.kernels:
            if kernel.start > covered:
                yield kernel.start - covered, before, kernel.name
            if kernel.end > covered:
                covered, before = kernel.end, kernel.name
        if self.end > covered:
            yield self.end - covered, before, ""


def kernels(run: Run, device: torch.device) -> list[Kernel]:
    """What a call launches, copies and fills included, in order; on a CPU its operators."""
    cuda = device.type == "cuda"
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profile:
        run()
        wait(device)
    found = []
    for event in profile.events():
        if cuda and event.device_type == torch.autograd.DeviceType.CUDA:
            found.append(Kernel(event.name, event.time_range.start / 1e3, event.time_range.elapsed_us() / 1e3))
        elif not cuda and event.name.startswith("aten::") and event.self_cpu_time_total > 0:
            found.append(Kernel(event.name, event.time_range.start / 1e3, event.self_cpu_time_total / 1e3))
    return sorted(found, key=lambda kernel: kernel.start)


def calls_in_turn(runs: Mapping[str, Run], device: torch.device, rounds: int) -> dict[str, list[Call]]:
    """What each candidate runs on the device in rounds of all, with nothing waiting between them, as in training.

    A marker on the queue separates the calls. The first call, of the last candidate, only fills the queue and is
    dropped. On a CPU each call is looked at alone, its operators one behind the other.
    """
    if device.type != "cuda":
        return {name: [_alone(kernels(run, device)) for _ in range(rounds)] for name, run in runs.items()}
    order = [list(runs)[-1], *(name for _ in range(rounds) for name in runs)]

    def all_of_them() -> None:
        for name in order:
            torch.cuda._sleep(1)
            runs[name]()
        torch.cuda._sleep(1)

    calls = between_markers(kernels(all_of_them, device))
    if len(calls) != len(order):
        raise RuntimeError(f"{len(calls)} calls lie between kernels named {MARKER}, where {len(order)} were made")
    found: dict[str, list[Call]] = {name: [] for name in runs}
    for name, call in list(zip(order, calls, strict=True))[1:]:
        found[name].append(call)
    return found


def between_markers(found: list[Kernel]) -> list[Call]:
    """The calls of a list of kernels (by their starts) that has a marker before each call and after the last."""
    places = [number for number, kernel in enumerate(found) if MARKER in kernel.name]
    return [Call(found[i + 1 : j], found[i].end, found[j].start) for i, j in pairwise(places)]


def _alone(found: list[Kernel]) -> Call:
    """A CPU's operators: own times, one behind the other."""
    laid, end = [], 0.0
    for kernel in found:
        laid.append(Kernel(kernel.name, end, kernel.ms))
        end = laid[-1].end
    return Call(laid, 0.0, end)
