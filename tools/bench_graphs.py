"""Whole steps with and without CUDA graphs of layers, by recipe: tokens/s, and the time in which a step is queued.

Small microbatches are bound by the host: the device waits for launches. Each recipe's two candidates take turns;
figures are medians. Losses of both are compared: with --deterministic-mode among the --flags they must be the same
(else exit code 1); without, the fastest attention may add up in another order each time.

    python tools/bench_graphs.py                                          # Llama-3-8B, 2 layers, 4 x 2048 tokens
    python tools/bench_graphs.py --flags "--num-layers 4" --output graphs.json
    python tools/bench_graphs.py --preset tiny --device cpu --rounds 1
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from pathlib import Path

import bench_timing
import torch
from bench_step import PRESETS, RECIPES, config_of
from step_work import Steps

from megafp8.config import Config
from megafp8.config.tool_parser import ToolParser, check_least, check_output
from megafp8.training.build import pick_device
from megafp8.training.throughput import GIB

GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 1"
SIZE = "--num-layers 2"


def configured(args: argparse.Namespace, recipe: str, more: str) -> Config:
    """Raises ValueError for flags that don't go together."""
    shape = f"--seq-length {args.seq_length} --micro-batch-size 1 --global-batch-size {args.microbatches}"
    return config_of(argparse.Namespace(**vars(args) | {"flags": f"{args.flags} {shape} {more}"}), recipe)


def measure(args: argparse.Namespace, recipe: str, device: torch.device) -> list[dict]:
    """Rows of a recipe, without graphs and with them."""
    candidates = {}
    for name, more in (("calls", ""), ("graphs", GRAPHS)):
        gc.collect()
        config, held = configured(args, recipe, more), allocated(device)
        steps = Steps(config, device)
        if more:
            steps.trainer._runner._graphs._say = print
        reset_peak(device)
        for _ in range(3):
            steps()
        bench_timing.wait(device)
        candidates[name] = steps, config, peak(device) - held
    times = {name: [] for name in candidates}
    hosts = {name: [] for name in candidates}
    for _ in range(args.rounds):
        for name, (steps, *_) in candidates.items():
            bench_timing.wait(device)
            start = time.perf_counter()
            steps()
            hosts[name].append(time.perf_counter() - start)  # a later one waits for what the one before found
            for _ in range(args.steps - 1):
                steps()
            bench_timing.wait(device)
            times[name].append((time.perf_counter() - start) / args.steps)
    rows = []
    for name, (steps, config, held) in candidates.items():
        seconds = statistics.median(times[name])
        tokens = config.train.global_batch_size * config.data.seq_length
        rows.append({
            "recipe": recipe, "layers": name, "ms": 1e3 * seconds, "tokens_per_second": tokens / seconds,
            "host_ms": 1e3 * statistics.median(hosts[name]), "peak_gib": held / GIB, "losses": steps.losses,
        })  # fmt: skip
    return rows


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def table(rows: list[dict]) -> str:
    lines = ["| recipe | layers by | ms | tokens/s | host ms | peak GiB |", "|---|---|---|---|---|---|"]
    for row in rows:
        numbers = f"{row['ms']:.2f} | {row['tokens_per_second']:.0f} | {row['host_ms']:.2f} | {row['peak_gib']:.1f}"
        lines.append(f"| {row['recipe']} | {row['layers']} | {numbers} |")
    return "\n".join(lines)


def compared(calls: list[float], graphs: list[float], fixed: bool) -> str:
    """fixed: whether they have to be the same, which --deterministic-mode asks for."""
    if calls == graphs:
        return "the same"
    rule = "--deterministic-mode rules that out"
    why = rule if fixed else f"as they may with the fastest attention; {rule}"
    return f"differ, {why}: {calls}, from graphs {graphs}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = ToolParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="llama3-8b")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=["bf16", "blockwise", "tensorwise"])
    parser.add_argument("--flags", default=SIZE, metavar="FLAGS", help="more of the training's flags, in quotes")
    parser.add_argument("--seq-length", type=int, metavar="N", help="tokens of a sequence (default: 2048; 32 of tiny)")
    parser.add_argument("--microbatches", type=int, default=4, metavar="N", help="of a step")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--steps", type=int, default=3, metavar="N", help="timed together")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON")
    args = parser.parse_args(argv)
    if args.seq_length is None:
        args.seq_length = 32 if args.preset.startswith("tiny") else 2048
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    try:
        check_least(args, 1, "seq_length", "microbatches", "rounds", "steps")
        check_output(args.output)
        device, rows, failed = pick_device(args.device), [], False
        for recipe in args.recipes:
            configured(args, recipe, GRAPHS)
    except ValueError as error:
        print(f"bench_graphs.py: error: {error}", file=sys.stderr)
        return 2
    for recipe in args.recipes:
        try:
            print(f"{recipe}: measuring", file=sys.stderr, flush=True)
            rows += measure(args, recipe, device)
        except Exception:
            failed = True
            print(f"{recipe}:\n{traceback.format_exc()}", flush=True)
        gc.collect()
    print(table(rows))
    for name in args.recipes:
        losses = [row["losses"] for row in rows if row["recipe"] == name]
        if len(losses) == 2:
            fixed = configured(args, name, "").train.deterministic_mode
            print(f"{name}: losses {compared(*losses, fixed)}")
            failed |= fixed and losses[0] != losses[1]
    if args.output is not None:
        args.output.write_text(json.dumps(rows, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
