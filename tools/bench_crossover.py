"""From which sizes on FP8 pays: a linear's forward and backward, recipe by recipe, over hidden sizes and tokens.

The shapes are those of a Llama-like layer of each hidden size h: qkv [1.5h, h], proj [h, h], fc1 [7h, h], fc2
[h, 3.5h]. Inputs are quantized by a kernel of their own: fused producers only do better. Speeds are FP8's over
BF16's: of the device, whose queue is filled ahead, and behind it as called one after the other, where small ones wait
for the host. Linears are FP8 here whatever was measured before. The file is one as megafp8/fp8/crossover.json, of which
megafp8/config/crossover.py reads the first speed: a host is not a device's property.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import bench_timing
import torch
from bench_layer_memory import Gradients

from megafp8.config.publish import publish
from megafp8.fp8 import Linear, get_recipe
from megafp8.step import StepContext

RECIPES = {"blockwise": "e4m3", "tensorwise": "hybrid"}
AHEAD_CYCLES = 8_000_000
"""Some milliseconds, in which the host queues two calls."""
SHAPES = {"qkv": (1.5, 1), "proj": (1, 1), "fc1": (7, 1), "fc2": (1, 3.5)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("crossover")
    group.add_argument("--crossover", type=Path, metavar="JSON", help="measure linears over sizes instead, and add the "
                       "device's table to this file")  # fmt: skip
    group.add_argument("--crossover-hidden", type=int, nargs="+", default=[1024, 2048, 4096, 8192], metavar="H")
    group.add_argument("--crossover-tokens", type=int, nargs="+", default=[2048, 4096, 8192, 16384, 32768], metavar="T")


class Work:
    """Forward and backward of one linear, its weight gradient added into an FP32 buffer."""

    def __init__(self, recipe: str | None, tokens: int, out_features: int, in_features: int, device: torch.device):
        axes = {} if recipe is None else {"recipe": get_recipe(recipe, fp8_format=RECIPES[recipe])}
        options = {"params_dtype": torch.bfloat16, "device": device, "name": "linear"}
        self.linear = Linear(in_features, out_features, False, **axes, **options)
        self.x = torch.randn(tokens, in_features, device=device).bfloat16().requires_grad_()
        self.dy = torch.randn(tokens, out_features, device=device).bfloat16()
        self.step = StepContext(grads=Gradients(self.linear))

    def __call__(self) -> None:
        self.x.grad = None
        self.linear(self.x, self.step).backward(self.dy)


def check_table(path: Path | None) -> None:
    """Raises ValueError for a file that is there and no such table, before anything is measured."""
    if path is None or not path.exists():
        return
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict) or not all(is_rows(recipes) for recipes in found.values()):
        raise ValueError(f"--crossover {path}: is there and no table of this tool; give another file")


def is_rows(recipes: Any) -> bool:
    """Whether a device's part of a table looks like one: recipe -> rows."""
    return isinstance(recipes, dict) and all(isinstance(rows, list) for rows in recipes.values())


def run(args: argparse.Namespace, device: torch.device) -> int:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    rows: dict[str, list] = {recipe: [] for recipe in RECIPES}
    heads = "".join(f"{recipe:>12} called" for recipe in RECIPES)
    print(f"{'':6}{'tokens':>8}{'out':>8}{'in':>8}{'bf16 ms':>10}{heads}")
    for hidden in args.crossover_hidden:
        for tokens in args.crossover_tokens:
            for shape, (wide, deep) in SHAPES.items():
                sizes = tokens, int(wide * hidden), int(deep * hidden)
                works = {recipe: Work(recipe, *sizes, device) for recipe in (None, *RECIPES)}
                alone, called = measure(works, device, args.rounds)
                speeds = {r: (round(alone[None] / alone[r], 3), round(called[None] / called[r], 3)) for r in RECIPES}
                for recipe, both in speeds.items():
                    rows[recipe].append([*sizes, *both])
                line = "".join(f"{first:12.2f}{second:7.2f}" for first, second in speeds.values())
                print(f"{shape:6}{sizes[0]:8}{sizes[1]:8}{sizes[2]:8}{alone[None]:10.3f}{line}", flush=True)
        write(args.crossover, name, rows)  # so that a run which is cut short has a table
    return 0


def measure(
    works: dict[str | None, Work], device: torch.device, rounds: int
) -> tuple[dict[str | None, float], dict[str | None, float]]:
    """Least milliseconds of a call of each: with the queue filled ahead, and as called."""
    for work in works.values():
        bench_timing.milliseconds(work, device, 1, warmup=2)

    def fill() -> None:
        if device.type == "cuda":
            torch.cuda._sleep(AHEAD_CYCLES)

    alone, called = (bench_timing.in_turn(works, device, rounds, calls=2, before=before) for before in (fill, None))
    return {name: min(ms) for name, ms in alone.items()}, {name: min(ms) for name, ms in called.items()}


def write(path: Path, device: str, rows: dict[str, list]) -> None:
    """Adds a device's table to a file, or replaces it there."""
    table = json.loads(path.read_text()) if path.exists() else {}
    table[device] = rows
    publish(path, json.dumps(table, indent=1).replace("[\n    ", "[").replace(",\n    ", ", ").replace("\n   ]", "]"))
