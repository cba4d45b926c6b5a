"""From which sizes on FP8 pays: a linear's forward and backward, recipe by recipe, over hidden sizes and tokens.

The shapes are those of a Llama-like layer of each hidden size h: qkv [1.5h, h], proj [h, h], fc1 [7h, h], fc2
[h, 3.5h]. Inputs are quantized by a kernel of their own: fused producers only do better. The table is that of
megafp8/fp8/crossover.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import bench_timing
import torch
from bench_layer_memory import Gradients

from megafp8.config.publish import publish
from megafp8.fp8 import Linear, get_recipe
from megafp8.step import StepContext

RECIPES = {"blockwise": "e4m3", "tensorwise": "hybrid"}
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


def run(args: argparse.Namespace, device: torch.device) -> int:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    rows: dict[str, list] = {recipe: [] for recipe in RECIPES}
    print(f"{'':6}{'tokens':>8}{'out':>8}{'in':>8}{'bf16 ms':>10}" + "".join(f"{recipe:>12}" for recipe in RECIPES))
    for hidden in args.crossover_hidden:
        for tokens in args.crossover_tokens:
            for shape, (wide, deep) in SHAPES.items():
                sizes = tokens, int(wide * hidden), int(deep * hidden)
                works = {recipe: Work(recipe, *sizes, device) for recipe in (None, *RECIPES)}
                for work in works.values():
                    bench_timing.milliseconds(work, device, 1, warmup=2)
                found = bench_timing.in_turn(works, device, args.rounds, calls=2)
                ms = {recipe: min(times) for recipe, times in found.items()}
                speeds = {recipe: round(ms[None] / ms[recipe], 3) for recipe in RECIPES}
                for recipe, speed in speeds.items():
                    rows[recipe].append([*sizes, speed])
                line = "".join(f"{speed:12.2f}" for speed in speeds.values())
                print(f"{shape:6}{sizes[0]:8}{sizes[1]:8}{sizes[2]:8}{ms[None]:10.3f}{line}", flush=True)
        write(args.crossover, name, rows)  # so that a run which is cut short has a table
    return 0


def write(path: Path, device: str, rows: dict[str, list]) -> None:
    """Adds a device's table to a file, or replaces it there."""
    table = json.loads(path.read_text()) if path.exists() else {}
    table[device] = rows
    publish(path, json.dumps(table, indent=1).replace("[\n    ", "[").replace(",\n    ", ", ").replace("\n   ]", "]"))
