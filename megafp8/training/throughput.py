"""Time, tokens a second, and peak memory of training, evaluation and saving excluded."""

from __future__ import annotations

import resource
import sys
import time
from contextlib import contextmanager

import torch

GIB = 1 << 30


class IntervalTimer:
    """Wall time since the last `lap`, without what ran inside `paused`. Seconds."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._paused = 0.0

    @contextmanager
    def paused(self):
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._paused += time.perf_counter() - begin

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed = now - self._start - self._paused
        self._start, self._paused = now, 0.0
        return elapsed


def max_memory_gib(device: torch.device) -> float:
    """Peak memory so far: allocated on the GPU, or resident in this process on the CPU. GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB
