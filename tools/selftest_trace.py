"""How much of a run's communication nothing hides, from the profiler. Used by selftest_nccl.py."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

Spans = list[tuple[float, float]]


@contextmanager
def exposed_communication(device: str) -> Iterator[dict[str, float]]:
    """Profiles what runs inside; afterwards the dict has `communication_ms`, during which NCCL kernels ran, and
    `exposed_ms`, the part of it in which no other kernel did, of the last half of the time. Empty on the CPU."""
    result: dict[str, float] = {}
    if device != "cuda":
        yield result
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield result
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    result |= communication_of([e for e in events if e.get("cat") == "kernel"])


def communication_of(kernels: list[dict]) -> dict[str, float]:
    """kernels: trace events with `name`, `ts` and `dur` in microseconds."""
    start = min(k["ts"] for k in kernels)
    middle = (start + max(k["ts"] for k in kernels)) / 2
    spans: dict[bool, Spans] = {True: [], False: []}
    for kernel in kernels:
        if kernel["ts"] >= middle:
            spans["nccl" in kernel["name"].lower()].append((kernel["ts"], kernel["ts"] + kernel["dur"]))
    communication, computation = union(spans[True]), union(spans[False])
    both = length(union(communication + computation))
    exposed = both - length(computation)
    return {"communication_ms": length(communication) / 1e3, "exposed_ms": exposed / 1e3}


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
