"""Steps of training runs, timed in turn: what a step takes, on the host and on the device. Used by selftest_speed.py.

A step is timed without a profiler, which costs the host more with every launch, and among others, several at a time: so
the host may run ahead as it does in training. Runs to be compared take turns, since clocks and neighbours change.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import bench_timing
from selftest_runs import Flags, Runner, leave
from selftest_trace import busy_of, communication_of, kernels_of
from step_work import quickly_initialized

from megafp8.meter import Key
from megafp8.training.build import pick_device
from megafp8.training.trainer import Trainer


@dataclass(frozen=True)
class Plan:
    """How many steps. warmup: before; alone: timed one by one, from an idle device; rounds of `block` steps each, one
    queued behind the other; profiled: at last."""

    warmup: int = 3
    alone: int = 3
    rounds: int = 5
    block: int = 3
    profiled: int = 2

    @property
    def steps(self) -> int:
        return self.warmup + self.alone + self.rounds * self.block + self.profiled


@dataclass
class Steps:
    """A run whose steps are made one by one, without a log.

    tokens: of a step, on all ranks. ms: of a step, a round each. host_ms: to queue a step while the device is idle, so
    that nothing holds the host up. build_s: until the first step was over.
    """

    runner: Runner
    flags: Flags
    tokens: int = 0
    build_s: float = 0.0
    ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        begin, self.device = time.perf_counter(), pick_device(self.runner.device)
        with quickly_initialized(self.device):
            self._parts = self.runner.build(self.flags)
        self._trainer = Trainer(self._parts)
        self._batches = self._trainer._training_batches()
        train = self._parts.config.train
        self.tokens = train.global_batch_size * self._parts.config.data.seq_length
        self.run(1)
        self._wait()
        self.build_s = time.perf_counter() - begin

    def run(self, count: int) -> None:
        for _ in range(count):
            self._trainer._iteration(self._batches)

    def time_alone(self) -> None:
        begin = self._begin()
        self.run(1)
        self.host_ms.append(1e3 * (time.perf_counter() - begin))

    def time_block(self, count: int) -> None:
        begin = self._begin()
        self.run(count)
        self._wait()
        self.ms.append(1e3 * (time.perf_counter() - begin) / count)

    def traffic(self) -> dict[Key, float]:
        """Bytes that this rank hands over in a step, by kind and axis: the steps before, and what building a model
        takes, are not in it."""
        meter = self._parts.parallel.meter
        before = meter.copy()
        self.run(1)
        return {key: float(size) for key, (size, _) in meter.since(before).items()}

    def profile(self, count: int) -> dict[str, float | dict[str, float]]:
        """Of steps under the profiler: what the device does in one. Nothing on the CPU."""
        with kernels_of(self.device.type, self._begin) as kernels:
            self.run(count)
        return communication_of(kernels, count) | busy_of(kernels, count)

    def row(self, profiled: int) -> dict:
        ms = statistics.median(self.ms)
        row = {"tokens_per_second": 1e3 * self.tokens / ms, "step_ms": ms, "ms": self.ms, "build_s": self.build_s}
        row |= {"host_ms": statistics.median(self.host_ms), "traffic": self.traffic()}
        return row | self.profile(profiled)

    def close(self) -> None:
        parallel, groups = self._parts.parallel, list(self._parts.pipeline.groups.values())
        self._wait()
        self._trainer.log.close()
        parallel.barrier()
        self._trainer.release()
        del self._parts, self._trainer, self._batches
        leave(parallel, groups)

    def _wait(self) -> None:
        bench_timing.wait(self.device)

    def _begin(self) -> float:
        """Now, with all ranks at the same place and nothing to do."""
        self._wait()
        self._parts.parallel.barrier()
        self._wait()
        return time.perf_counter()


def measure(runner: Runner, runs: Mapping[str, Flags], plan: Plan) -> dict[str, dict]:
    """Rows of runs that take turns, by name. In each: `tokens_per_second` and `step_ms`, the median of rounds; `ms`,
    the rounds; `host_ms`; `traffic` by kind and axis, bytes a step; what `Steps.profile` gives; `build_s`."""
    many = ("--train-iters", str(plan.steps + 2))
    found = {name: Steps(runner, (*flags, *many)) for name, flags in runs.items()}
    for steps in found.values():
        steps.run(plan.warmup - 1)
        for _ in range(plan.alone):
            steps.time_alone()
    for number in range(plan.rounds):
        for steps in list(found.values())[:: -1 if number % 2 else 1]:
            steps.time_block(plan.block)
    rows = {name: steps.row(plan.profiled) for name, steps in found.items()}
    for steps in found.values():
        steps.close()
    return rows
