"""Slow data and slow ranks, in the log: how long each rank waited for data and worked on its microbatches.

Collectives make all ranks as slow as the slowest, so a rank's own work is what tells: from the first microbatch to the
moment when gradients are reduced, by its GPU's clock. Ranks that exchange inside of layers (tensor, context, pipeline
parallelism) wait for each other within that time: among them it tells the group, not the rank, unless
`--timing-log-level 2` measures those waits, which are no work.
"""

from __future__ import annotations

import torch

from megafp8.parallel import ParallelContext
from megafp8.training.timers import Timers

DATA_SHARE = 0.1
"""Of an iteration's time, spent on waiting for data: worth a line."""
SLOWER = 1.2
"""Times the median: a rank's work, worth a line."""


class LocalTimes:
    """Seconds that this rank waited for data and worked, since `take`. On a GPU nothing waits until then."""

    def __init__(self, device: torch.device, timers: Timers | None = None) -> None:
        """timers: is told when the rank is at work."""
        self._cuda = device.type == "cuda"
        self._timers = timers or Timers(device)
        self._spans: list[tuple] = []
        self._begin = None
        self.waited = 0.0

    def start(self) -> None:
        self._begin, self._timers.working = self._timers.now(), True

    def stop(self) -> None:
        if self._begin is not None:
            self._spans.append((self._begin, self._timers.now()))
            self._begin, self._timers.working = None, False

    def take(self, held_up: float = 0.0) -> tuple[float, float]:
        """(waited for data, worked); starts anew. On a GPU waits for what was queued.

        held_up: seconds of that work that were waits for other ranks, where they are measured.
        """
        if self._cuda and self._spans:
            self._spans[-1][1].synchronize()
            worked = sum(begin.elapsed_time(end) for begin, end in self._spans) / 1e3
        else:
            worked = sum(end - begin for begin, end in self._spans)
        waited, self.waited, self._spans = self.waited, 0.0, []
        return waited, max(0.0, worked - held_up - (0.0 if self._cuda else waited))


def balance(
    parallel: ParallelContext,
    device: torch.device,
    times: tuple[float, float],
    iterations: int,
    seconds: float,
    starting: bool = False,
) -> tuple[dict[str, float | int], list[str]]:
    """Numbers for the metrics, and lines on what is slow; every rank calls it.

    times: of `LocalTimes.take`; seconds: of the wall, an iteration. data_ms: of the rank that waited longest, an
    iteration; compute_ms_max, compute_ms_median: over the ranks; slowest_rank. starting: the loader's processes began
    in this time, which says nothing of slow data.
    """
    own = torch.tensor(times, dtype=torch.float64, device=device) / iterations
    waited, worked = parallel.everyone.gather(own.view(1, 2)).t().tolist()
    slowest, thirstiest = (max(range(len(x)), key=x.__getitem__) for x in (worked, waited))
    median = sorted(worked)[(len(worked) - 1) // 2]
    numbers = {
        "data_ms": 1e3 * waited[thirstiest],
        "compute_ms_max": 1e3 * worked[slowest],
        "compute_ms_median": 1e3 * median,
        "slowest_rank": slowest,
    }
    lines = []
    if waited[thirstiest] > DATA_SHARE * seconds and not starting:
        share = waited[thirstiest] / seconds
        lines.append(
            f"slow data: rank {thirstiest} waited {1e3 * waited[thirstiest]:.0f} ms an iteration for its batches, "
            f"{share:.0%} of the time; give more --num-workers, or faster storage"
        )
    if len(worked) > 1 and worked[slowest] > SLOWER * median:
        lines.append(
            f"straggler: rank {slowest} worked {1e3 * worked[slowest]:.0f} ms an iteration, the median rank "
            f"{1e3 * median:.0f} ms"
        )
    return numbers, lines
