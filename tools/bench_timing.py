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

import torch
from torch.profiler import ProfilerActivity

Run = Callable[[], object]
Mark = torch.cuda.Event | float
AHEAD_CYCLES = 2_000_000  # about a millisecond in which the host queues what is timed


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


def busy(found: list[Kernel]) -> tuple[float, float]:
    """(time from the first kernel's start to the last one's end, time in which at least one runs)."""
    if not found:
        return 0.0, 0.0
    spans = sorted((kernel.start, kernel.start + kernel.ms) for kernel in found)
    total, (start, end) = 0.0, spans[0]
    for next_start, next_end in spans[1:]:
        if next_start > end:
            total, start, end = total + end - start, next_start, next_end
        else:
            end = max(end, next_end)
    return end - spans[0][0], total + end - start
