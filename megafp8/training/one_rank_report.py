"""What one rank alone measured, beside the plan."""

from __future__ import annotations

import torch

from megafp8.config import Config
from megafp8.config.parallel import layout_sizes
from megafp8.meter import Key
from megafp8.plan.cluster import Cluster
from megafp8.plan.communication import by_kind, step_traffic
from megafp8.plan.in_flight import microbatches
from megafp8.plan.memory import MIB, MemoryPlan, plan_memory
from megafp8.plan.rank_parameters import held_stages, rank_layouts
from megafp8.plan.stage_time import StageClock
from megafp8.plan.traffic import Traffic
from megafp8.training.one_rank import STEPS, Measured
from megafp8.training.throughput import peaks_of

AXES = {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp"}


def report_lines(config: Config, device: torch.device, measured: Measured) -> list[str]:
    """Lines of text: where the rank stands, then memory, time and traffic."""
    plan = plan_memory(config, device, measured.stage)
    train, sizes = config.train, layout_sizes(config.parallel)
    count = train.global_batch_size // (train.micro_batch_size * sizes["dp"])
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    return [
        place_of(config, measured.rank),
        f"step {STEPS} of {STEPS} on {name}: {count} microbatch(es) of {train.micro_batch_size} x "
        f"{config.data.seq_length} tokens",
        "" if measured.finite else "NOTE: gradients were not finite",
        *memory_lines(plan, measured),
        "",
        time_line(planned_seconds(config, device, measured.stage), measured),
        "",
        *traffic_lines(config, measured),
    ]


def place_of(config: Config, rank: int) -> str:
    """The rank's place on every axis, and what it holds."""
    sizes, places, left = layout_sizes(config.parallel), [], rank
    for label, axis in AXES.items():
        places += [f"{label} {left % sizes[axis]} of {sizes[axis]}"] if sizes[axis] > 1 else []
        left //= sizes[axis]
    ranks_a_stage = config.parallel.world_size // sizes["pp"]
    if sizes["ep"] > 1:
        places.append(f"expert {rank % ranks_a_stage // sizes['etp'] % sizes['ep']} of {sizes['ep']}")
    held = "; ".join(map(str, held_stages(config, rank // ranks_a_stage)))
    return f"rank {rank} of {config.parallel.world_size}: {', '.join(places)}; holds {held}"


def memory_lines(plan: MemoryPlan, measured: Measured) -> list[str]:
    """The plan by owner; beneath, what CUDA's allocator counted."""
    lines = [f"{'MiB':<40}{'plan':>12}{'allocator':>12}{'off':>8}"]
    lines += [f"  {name:<38}{size / MIB:12,.1f}" for name, size in plan.owners.items()]
    found = {"stays through the step": (plan.static, measured.static), "peak": (plan.total, measured.peak)}
    for name, (planned, counted) in found.items():
        if counted is None:
            lines.append(f"{name:<40}{planned / MIB:12,.1f}{'-':>12}")
        else:
            lines.append(f"{name:<40}{planned / MIB:12,.1f}{counted / MIB:12,.1f}{planned / counted - 1:8.1%}")
    return lines


def planned_seconds(config: Config, device: torch.device, stage: int) -> float | None:
    """Of a rank's own work in a step; None on devices that the planner has no figures of."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peaks = peaks_of(name)
    if peaks is None or peaks.hbm_gb_per_s is None:
        return None
    fp8 = peaks.fp8 or peaks.bf16
    cluster = Cluster(name, 1, 1.0, 0.0, peaks.fp32, peaks.bf16, fp8, peaks.hbm_gb_per_s, 1.0, 1.0)
    clock, layouts = StageClock(config, cluster), rank_layouts(config, stage)
    work = sum(clock.chunk(chunk).total for chunk in held_stages(config, stage))
    shards = sum(layout.numel // layout.shards for layout in layouts)
    return microbatches(config) * work + clock.update(sum(layout.numel for layout in layouts), shards)


def time_line(planned: float | None, measured: Measured) -> str:
    own = f"its own work {1e3 * measured.seconds:,.1f} ms"
    own += "" if planned is None else f", planned {1e3 * planned:,.1f} ({planned / measured.seconds - 1:+.1%})"
    return f"{own}; copies that stand for communication {1e3 * measured.copying:,.1f} ms; waiting for others: none"


def traffic_differs(config: Config, measured: Measured) -> bool:
    """Whether it sent anything else than planned."""
    planned = {key: (t.bytes, t.messages) for key, t in _planned_traffic(config, measured).items()}
    return planned != measured.sent


def _planned_traffic(config: Config, measured: Measured) -> dict[Key, Traffic]:
    ranks_a_stage = config.parallel.world_size // config.parallel.pipeline_model_parallel_size
    return by_kind(step_traffic(config, measured.stage, measured.rank % ranks_a_stage))


def traffic_lines(config: Config, measured: Measured) -> list[str]:
    """What it handed to collectives in the step, planned and counted, by kind and group."""
    planned = _planned_traffic(config, measured)
    lines = [f"{'sent in a step':<28}{'ranks':>6}{'plan, MiB':>14}{'counted, MiB':>14}{'messages':>10}{'counted':>10}"]
    for key in sorted(planned.keys() | measured.sent.keys()):
        traffic, (size, count) = planned.get(key), measured.sent.get(key, (0, 0))
        ranks, plan, messages = (traffic.size, traffic.bytes, traffic.messages) if traffic else (0, 0, 0)
        lines.append(
            f"{f'{key[0]} over {key[1]}':<28}{ranks:6}{plan / MIB:14,.3f}{size / MIB:14,.3f}{messages:10,}{count:10,}"
        )
    return lines
