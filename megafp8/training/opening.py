"""The first lines of a run's log: what is trained, in which precision, and where."""

from __future__ import annotations

import torch

from megafp8.config import Config
from megafp8.plan.shapes import linears, parameters
from megafp8.plan.summary import describe_recipe, small_linear_lines
from megafp8.training.build import Parts

AXES = {"tensor": "tp", "context": "cp", "pipeline": "pp", "data": "dp", "expert": "ep"}


def opening_lines(parts: Parts) -> list[str]:
    """A line each on the model, its FP8, and the machine."""
    return [model_line(parts.config), *fp8_lines(parts.config, parts.device), machine_line(parts)]


def model_line(config: Config) -> str:
    train, model = config.train, config.model
    count = sum(p.unpadded_numel for p in parameters(config))
    return (
        f"model: {count:,} parameters, {model.num_layers} layers; an iteration is {train.global_batch_size} samples of "
        f"{config.data.seq_length} tokens"
    )


def fp8_lines(config: Config, device: torch.device) -> list[str]:
    """How many linears run in FP8, a line for each recipe that they follow, and for what FP8 would slow down."""
    high = "bf16" if config.train.bf16 else "fp32"
    found = linears(config)
    recipes = {describe_recipe(linear.recipe): None for linear in found if linear.recipe is not None}
    if not recipes:
        off = "off (--fp8-format turns it on)"
        why = "on for no linear (--dry-run says why)" if config.fp8.enabled else off
        return [f"precision: {high}; FP8 is {why}", *small_linear_lines(config)]
    count = sum(linear.recipe is not None for linear in found)
    gemms = f"--fp8-gemm-backend {config.fp8.fp8_gemm_backend}" if device.type == "cuda" else "plain PyTorch (slow)"
    head = f"precision: {count} of {len(found)} linears in FP8, the rest {high}; FP8 GEMMs: {gemms}"
    return [head, *(f"  {recipe}" for recipe in recipes), *small_linear_lines(config)]


def machine_line(parts: Parts) -> str:
    """Device, and the ranks along each axis that has more than one."""
    name = torch.cuda.get_device_name(parts.device) if parts.device.type == "cuda" else "the CPU"
    world = parts.parallel.world_size
    if world == 1:
        return f"one process on {name}"
    sizes = {label: getattr(parts.parallel, axis).size for label, axis in AXES.items()}
    layout = ", ".join(f"{label} {size}" for label, size in sizes.items() if size > 1)
    return f"{world} processes, this one on {name}; parallel: {layout}"
