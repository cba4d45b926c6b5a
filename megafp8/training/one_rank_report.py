"""What one rank alone measured, beside the plan."""

from __future__ import annotations

import torch

from megafp8.config import Config
from megafp8.config.parallel import layout_sizes
from megafp8.plan.communication import by_kind, step_traffic
from megafp8.plan.memory import MemoryPlan, plan_memory
from megafp8.plan.rank_parameters import held_stages
from megafp8.training.one_rank import STEPS, Measured

MIB = 1 << 20
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
        f"its own work {1e3 * measured.seconds:,.1f} ms; copies that stand for communication "
        f"{1e3 * measured.copying:,.1f} ms; waiting for others: none",
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


def traffic_lines(config: Config, measured: Measured) -> list[str]:
    """What it handed to collectives in the step, planned and counted, by kind and group."""
    ranks_a_stage = config.parallel.world_size // config.parallel.pipeline_model_parallel_size
    planned = by_kind(step_traffic(config, measured.stage, measured.rank % ranks_a_stage))
    lines = [f"{'sent in a step':<28}{'ranks':>6}{'plan, MiB':>14}{'counted, MiB':>14}{'messages':>10}{'counted':>10}"]
    for key in sorted(planned.keys() | measured.sent.keys()):
        traffic, (size, count) = planned.get(key), measured.sent.get(key, (0, 0))
        ranks, plan, messages = (traffic.size, traffic.bytes, traffic.messages) if traffic else (0, 0, 0)
        lines.append(
            f"{f'{key[0]} over {key[1]}':<28}{ranks:6}{plan / MIB:14,.3f}{size / MIB:14,.3f}{messages:10,}{count:10,}"
        )
    return lines
