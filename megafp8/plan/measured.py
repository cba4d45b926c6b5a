"""A job's memory on this machine's GPU, by the allocator's count, beside the plan.

The job is built and runs its real iteration on random tokens, without data (`training.bare_job`): two microbatches a
step, three steps. The first makes what stays (FP8 copies, tables, kernels); the last is measured.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch

from megafp8.config import Config
from megafp8.parallel import ParallelContext
from megafp8.plan.activations import by_module
from megafp8.plan.at_peak import Peak, at_peak, now, peak_lines, recorded
from megafp8.plan.memory import MIB, MemoryPlan, plan_memory

STEPS, MICROBATCHES = 3, 2


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes. static: when backward is over; held: by a microbatch when its forward ends; peak: most in the step.

    holders: what held them at the peak, where that was asked for.
    """

    static: int
    held: int
    peak: int
    holders: Peak = field(default_factory=Peak)


def baseline(device: torch.device) -> int:
    """Bytes that others hold on the GPU in this process: whatever waits to be let go has been, cuBLAS's workspaces too.

    Counts from here are of what comes after.
    """
    gc.collect()
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated(device)


def measure(config: Config, device: torch.device, *, holders: bool = False) -> MeasuredMemory:
    """Runs the job, which must be one of one process, on a GPU.

    Args:
        config: resolved, with the vocabulary known.
        holders: also says what held the bytes of the peak; this takes seconds.
    """
    from megafp8.training.bare_job import BareJob  # seconds to import, which other commands don't need

    before = baseline(device)
    config = config.replace(global_batch_size=MICROBATCHES * config.train.micro_batch_size, rampup_batch_size=None)
    with recorded() if holders else nullcontext():
        job, forward = BareJob(config, ParallelContext(), device), _Forward(device)
        job.model.register_forward_pre_hook(forward.begin)
        job.model.register_forward_hook(forward.end)
        for number in range(1, STEPS + 1):
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            since = now()
            job.step(number)
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        found = at_peak(device, since) if holders else Peak()
    return MeasuredMemory(job.static - before, forward.held, peak, found)


class _Forward:
    """Hooks: bytes that a forward leaves, of the last one (a step's first also makes FP8 copies of weights)."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._start, self.held = device, 0, 0

    def begin(self, *_: object) -> None:
        self._start = torch.cuda.memory_allocated(self._device)

    def end(self, *_: object) -> None:
        self.held = torch.cuda.memory_allocated(self._device) - self._start


def rows(plan: MemoryPlan, measured: MeasuredMemory) -> dict[str, tuple[int, int]]:
    """By what: planned and measured bytes."""
    return {
        "weights, copies, gradients, optimizer": (plan.static, measured.static),
        "activations": (plan.held, measured.held),
        "peak": (plan.total, measured.peak),
        "peak above what stays": (plan.total - plan.static, measured.peak - measured.static),
    }


def table(found: dict[str, tuple[int, int]]) -> list[str]:
    lines = [f"{'MiB':<40}{'forecast':>12}{'allocator':>12}{'off':>8}"]
    for name, (planned, measured) in found.items():
        off = planned / measured - 1 if measured else 0.0
        lines.append(f"{name:<40}{planned / MIB:12.1f}{measured / MIB:12.1f}{off:8.1%}")
    return lines


def owner_lines(plan: MemoryPlan) -> list[str]:
    """What the plan's peak is made of."""
    lines = [f"planned at the peak, MiB ({plan.extra.what}):"]
    lines += [f"{size / MIB:12,.1f}  {name}" for name, size in plan.owners.items() if size]
    modules = sorted(by_module(plan.activations), key=lambda a: -a.bytes)
    lines.append("planned of one microbatch, MiB:")
    return [*lines, *(f"{a.bytes / MIB:12,.1f}  {a.module}: {a.what}" for a in modules)]


def measured_lines(config: Config) -> list[str]:
    """The forecast beside the count, and what held the most at the peak.

    Raises ValueError without a GPU, or for a configuration of several processes.
    """
    if not torch.cuda.is_available():
        raise ValueError("--measure needs a CUDA GPU, and torch sees none; leave it out")
    if config.parallel.world_size > 1 or config.parallel.pipeline_model_parallel_size > 1:
        raise ValueError("--measure builds one process; give the flags of a job of one")
    plan, measured = plan_memory(config, "cuda"), measure(config, torch.device("cuda"), holders=True)
    return [*table(rows(plan, measured)), "", *peak_lines(measured.holders)]
