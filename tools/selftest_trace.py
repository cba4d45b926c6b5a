"""How much of a run's communication nothing hides, from the profiler. Used by selftest_speed.py."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

Spans = list[tuple[float, float]]


@contextmanager
def kernels_of(device: str) -> Iterator[list[dict]]:
    """Profiles what runs inside; afterwards the list has its kernels: trace events with `name`, `ts` and `dur` in
    microseconds. None on the CPU."""
    kernels: list[dict] = []
    if device != "cuda":
        yield kernels
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield kernels
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        kernels += [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "kernel"]


def communication_of(kernels: list[dict], milliseconds: float, steps: int = 1) -> dict[str, float]:
    """Of the last `milliseconds`, in which `steps` steps ran, up to the end of the last kernel that is not NCCL's:
    `communication_ms`, during which NCCL kernels ran, and `exposed_ms`, the part of it in which no other did; a step.
    """
    ends = [k["ts"] + k["dur"] for k in kernels if not _of_nccl(k)]
    if not ends:
        return {}
    first, last = max(ends) - 1e3 * milliseconds, max(ends)
    spans: dict[bool, Spans] = {True: [], False: []}
    for kernel in kernels:
        begin, end = max(kernel["ts"], first), min(kernel["ts"] + kernel["dur"], last)
        if begin < end:
            spans[_of_nccl(kernel)].append((begin, end))
    communication, computation = union(spans[True]), union(spans[False])
    exposed = length(union(communication + computation)) - length(computation)
    return {"communication_ms": length(communication) / 1e3 / steps, "exposed_ms": exposed / 1e3 / steps}


def _of_nccl(kernel: dict) -> bool:
    return "nccl" in kernel["name"].lower()


def union(spans: Spans) -> Spans:
    """The same points as disjoint spans in order."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
