"""Where the device's time goes, and how much of the communication nothing hides, from the profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from bench_timing import MARKER
from kernel_names import kernel_class

Spans = list[tuple[float, float]]
BUSY = ("gemm", "attention", "quantize", "optimizer", "communication")
"""Classes of kernels (kernel_names.py) that rows tell apart; casts count as quantize."""
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@contextmanager
def kernels_of(device: str, ready: Callable[[], object] = lambda: None) -> Iterator[list[dict]]:
    """Profiles what runs inside; afterwards the list has its kernels: trace events with `name`, `ts` and `dur` in
    microseconds. None on the CPU.

    ready: called when the profiler is there, which takes each rank its own time; its kernels are left out.
    """
    kernels: list[dict] = []
    if device != "cuda":
        yield kernels
        return
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        ready()
        torch.cuda._sleep(1000)
        yield kernels
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        kernels += after_marker(json.loads(path.read_text())["traceEvents"])


def after_marker(events: list[dict]) -> list[dict]:
    """What ran on the device after the marker did, in order."""
    found = sorted((e for e in events if e.get("cat") in ON_DEVICE), key=lambda e: e["ts"])
    marker = next((place for place, event in enumerate(found) if MARKER in event["name"]), -1)
    return found[marker + 1 :]


def communication_of(kernels: list[dict], steps: int = 1) -> dict[str, float]:
    """Of the kernels of so many steps: `communication_ms`, during which NCCL's ran, and `exposed_ms`, the part of it in
    which no other did; a step."""
    if not kernels:
        return {}
    spans: dict[bool, Spans] = {True: [], False: []}
    for kernel in kernels:
        spans[_of_nccl(kernel)].append(_span(kernel))
    communication, computation = union(spans[True]), union(spans[False])
    exposed = length(union(communication + computation)) - length(computation)
    return {"communication_ms": length(communication) / 1e3 / steps, "exposed_ms": exposed / 1e3 / steps}


def busy_of(kernels: list[dict], steps: int = 1) -> dict[str, float | dict[str, float]]:
    """`busy_ms`: for each of BUSY and "other" the time in which a kernel of theirs ran, a step; what runs beside each
    other counts for both. `idle_ms`: in which none did, between the first and the last."""
    if not kernels:
        return {}
    spans: dict[str, Spans] = {kind: [] for kind in (*BUSY, "other")}
    for kernel in kernels:
        kind = kernel_class(kernel["name"])
        spans[{"cast": "quantize"}.get(kind, kind if kind in BUSY else "other")].append(_span(kernel))
    every = union([span for found in spans.values() for span in found])
    idle = every[-1][1] - every[0][0] - length(every)
    busy = {kind: length(union(found)) / 1e3 / steps for kind, found in spans.items()}
    return {"busy_ms": busy, "idle_ms": idle / 1e3 / steps}


def _span(kernel: dict) -> tuple[float, float]:
    return kernel["ts"], kernel["ts"] + kernel["dur"]


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
