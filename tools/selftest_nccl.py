#!/usr/bin/env python3
"""Runs this machine's GPUs against one of them: see selftest_nccl.sh, which starts it twice.

    python tools/selftest_nccl.py DIR --reference              # one process: what the layouts must equal
    torchrun --nproc-per-node 2 tools/selftest_nccl.py DIR     # all of them

Layouts must agree with one GPU: losses and gradient norms of FP32 within 1e-6 over five steps, of BF16 and FP8, whose
ranks round on their own, within 2e-2. Switches that move bytes or overlap them must change no number at all.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from selftest_collectives import collective_checks
from selftest_trace import exposed_communication

from megafp8.config import parse_args
from megafp8.parallel import Axis, ParallelContext, build_parallel
from megafp8.training.build import build_parts, pick_device
from megafp8.training.run_log import read_metrics
from megafp8.training.trainer import Trainer

Check = tuple[str, Callable[[], dict]]
"""A name, and what gives the rest of its row."""
PARTS = ("collectives", "layouts", "switches", "checkpoint", "speed")
STEPS = 10
SMALL = {"cuda": (4, 512, 1024, 256, 4), "cpu": (2, 64, 96, 32, 4)}  # layers, hidden, ffn, sequence, samples a step
FP8 = ("--bf16", "--fp8-format")
RECIPES = {
    "fp32": (),
    "bf16": ("--bf16",),
    "tensorwise": (*FP8, "hybrid", "--fp8-recipe", "tensorwise"),
    "blockwise": (*FP8, "e4m3", "--fp8-recipe", "blockwise"),
    "mxfp8": (*FP8, "e4m3", "--fp8-recipe", "mxfp8"),
    "delayed": (*FP8, "hybrid", "--fp8-recipe", "delayed", "--fp8-amax-history-len", "4"),
}
TOLERANCE = {"fp32": 1e-6}  # of losses and gradient norms over the first five steps; others:
LOOSE = 2e-2
ZERO1 = ("--use-distributed-optimizer",)
MOE = ("--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "128", "--moe-aux-loss-coeff", "1e-2")


def tp(n: int) -> tuple[str, ...]:
    return ("--tensor-model-parallel-size", str(n))


def pp(n: int) -> tuple[str, ...]:
    return ("--pipeline-model-parallel-size", str(n))


def layouts(n: int) -> dict[str, tuple[str, ...]]:
    """Name -> flags, of every layout of n processes that is tried; those with experts have EP in their names."""
    found = {
        f"TP{n}": tp(n),
        f"TP{n}+SP": (*tp(n), "--sequence-parallel"),
        f"PP{n}": pp(n),
        f"DP{n}": ZERO1,
        f"CP{n}": ("--context-parallel-size", str(n)),
        f"EP{n}": ("--expert-model-parallel-size", str(n), *MOE),
    }
    if n == 8:
        found["TP2xPP2xDP2"] = (*tp(2), *pp(2), *ZERO1)
    return found


def model_flags(device: str, folder: Path) -> tuple[str, ...]:
    layers, hidden, ffn, length, samples = SMALL[device]
    return (
        *("--num-layers", str(layers), "--hidden-size", str(hidden), "--ffn-hidden-size", str(ffn)),
        *("--num-attention-heads", "8", "--group-query-attention", "--num-query-groups", "8"),
        *("--seq-length", str(length), "--max-position-embeddings", str(length), "--position-embedding-type", "rope"),
        *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--untie-embeddings-and-output-weights"),
        *(
            "--attention-dropout",
            "0",
            "--hidden-dropout",
            "0",
            "--micro-batch-size",
            "1",
            "--global-batch-size",
            str(samples),
        ),
        *("--train-iters", str(STEPS), "--lr", "1e-4", "--min-lr", "1e-4", "--deterministic-mode", "--seed", "11"),
        *("--data-path", str(folder / "data_text_document"), "--split", "100,0,0", "--tokenizer-type", "ByteTokenizer"),
        *("--eval-iters", "0", "--num-workers", "0", "--log-interval", "1", "--device", device),
    )


@dataclass
class Runner:
    """Trains in this process and keeps (loss, gradient norm) of every step; `device`: cuda or cpu."""

    folder: Path
    device: str
    recipes: list[str]

    def train(self, name: str, flags: tuple[str, ...]) -> list[dict]:
        """The run's training lines. A new one each time."""
        log_dir = self.folder / "logs" / name
        config = parse_args([*flags, "--log-dir", str(log_dir)])
        device = pick_device(self.device)
        if int(os.environ.get("RANK", "0")) == 0:
            shutil.rmtree(log_dir, ignore_errors=True)
        parallel = build_parallel(config, device)
        parallel.barrier()
        code = Trainer(build_parts(config, parallel, device)).run()
        if code:
            raise RuntimeError(f"{name}: exit code {code}")
        parallel.barrier()
        leave_groups(parallel)
        return read_metrics(log_dir)[0]


def leave_groups(parallel: ParallelContext) -> None:
    """Frees a layout's communicators; the job's own group stays."""
    axes = [value for value in vars(parallel).values() if isinstance(value, Axis)]
    groups = {id(axis.group): axis.group for axis in axes if axis.group not in (None, dist.group.WORLD)}
    for group in groups.values():
        dist.destroy_process_group(group)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def pairs(lines: list[dict], steps: int | None = None) -> list[tuple[float, float]]:
    return [(line["lm_loss"], line["grad_norm"]) for line in lines[:steps]]


def gap(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> float:
    """Largest relative difference."""
    assert len(a) == len(b), "a run is not whole"
    return max(abs(x - y) / abs(x) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))


def references(runner: Runner) -> dict[str, list[tuple[float, float]]]:
    """What one process gives: "recipe" and "recipe/moe" -> (loss, gradient norm) of every step."""
    base = model_flags(runner.device, runner.folder)
    found = {}
    for recipe in runner.recipes:
        flags = RECIPES[recipe]
        found[recipe] = pairs(runner.train(f"one/{recipe}", (*base, *flags)))
        found[f"{recipe}/moe"] = pairs(runner.train(f"one/{recipe}-moe", (*base, *flags, *MOE)))
    return found


def verdict(found: float, allowed: float) -> dict:
    return {"gap": found, "allowed": allowed, "passed": found <= allowed}


def check_layouts(runner: Runner, n: int, expected: dict) -> Iterator[Check]:
    base = model_flags(runner.device, runner.folder)

    def compare(layout: str, flags: tuple[str, ...], recipe: str) -> dict:
        lines = runner.train(f"{layout}/{recipe}", (*base, *RECIPES[recipe], *flags))
        key = f"{recipe}/moe" if "EP" in layout else recipe
        steps, allowed = (5, TOLERANCE[recipe]) if recipe in TOLERANCE else (STEPS, LOOSE)
        return verdict(gap(expected[key][:steps], pairs(lines, steps)), allowed)

    for layout, flags in layouts(n).items():
        for recipe in runner.recipes:
            yield f"{layout} {recipe} = one", partial(compare, layout, flags, recipe)


def check_switches(runner: Runner, n: int) -> Iterator[Check]:
    """Flags that must change no number, each with the layout they act in."""
    overlap = ("--overlap-grad-reduce", "--overlap-param-gather")
    fp8 = [recipe for recipe in runner.recipes if recipe not in ("fp32", "bf16")]
    tiled = [recipe for recipe in runner.recipes if recipe in ("blockwise", "mxfp8")]
    switches = {
        f"DP{n} --fp8-param-gather": (ZERO1, ("--fp8-param-gather",), fp8),
        f"DP{n} overlaps": (ZERO1, overlap, runner.recipes),
        f"TP{n}+SP --tp-comm-overlap": ((*tp(n), "--sequence-parallel"), ("--tp-comm-overlap",), runner.recipes),
        f"EP{n} --moe-fp8-dispatch": (layouts(n)[f"EP{n}"], ("--moe-fp8-dispatch",), tiled),
    }
    base = model_flags(runner.device, runner.folder)

    def compare(recipe: str, layout: tuple[str, ...], switch: tuple[str, ...]) -> dict:
        flags = (*base, *RECIPES[recipe], *layout)
        off, on = runner.train("switch/off", flags), runner.train("switch/on", (*flags, *switch))
        return verdict(gap(pairs(off), pairs(on)), 0.0)

    for name, (layout, switch, recipes) in switches.items():
        for recipe in recipes:
            yield f"{name} on = off, {recipe}", partial(compare, recipe, layout, switch)


def check_checkpoint(runner: Runner, n: int, expected: dict) -> Iterator[Check]:
    """Saved at one layout after half of the steps, loaded at another."""
    base, half, table = model_flags(runner.device, runner.folder), STEPS // 2, layouts(n)

    def compare(saves: str, loads: str, recipe: str) -> dict:
        where = runner.folder / "checkpoints" / f"{saves}-{loads}-{recipe}"
        if dist.get_rank() == 0:
            shutil.rmtree(where, ignore_errors=True)
        flags = (*base, *RECIPES[recipe])
        save = ("--save", str(where), "--save-interval", str(half), "--exit-interval", str(half))
        runner.train(f"checkpoint/{saves}", (*flags, *table[saves], *save))
        lines = runner.train(f"checkpoint/{loads}", (*flags, *table[loads], "--load", str(where)))
        return verdict(gap(expected[recipe][half:], pairs(lines)), 1e-5 if recipe == "fp32" else LOOSE)

    for saves, loads in ((f"TP{n}", f"DP{n}"), (f"DP{n}", f"PP{n}")):
        for recipe in (r for r in ("fp32", "blockwise") if r in runner.recipes):
            yield f"saved at {saves}, loaded at {loads}, {recipe}", partial(compare, saves, loads, recipe)


LLAMA_8B = (
    *("--num-layers", "4", "--hidden-size", "4096", "--ffn-hidden-size", "14336", "--num-attention-heads", "32"),
    *("--num-query-groups", "8", "--seq-length", "4096", "--max-position-embeddings", "4096"),
    *("--global-batch-size", "8", "--train-iters", "6"),
)
QWEN_30B = (
    *("--num-layers", "2", "--hidden-size", "2048", "--ffn-hidden-size", "768", "--num-attention-heads", "32"),
    *("--num-query-groups", "4", "--kv-channels", "128", "--seq-length", "4096", "--max-position-embeddings", "4096"),
    *("--global-batch-size", "8", "--train-iters", "6", *MOE, "--num-experts", "128", "--moe-router-topk", "8"),
    *("--moe-ffn-hidden-size", "768"),
)


def measure_speed(runner: Runner, n: int) -> Iterator[Check]:
    """Tokens a second (median of the last steps), the ratio to BF16, and communication that nothing hides."""
    base = tuple(flag for flag in model_flags(runner.device, runner.folder) if flag != "--deterministic-mode")
    cases = {
        f"Llama-3-8B layers, TP{n}+SP": (LLAMA_8B, (*tp(n), "--sequence-parallel"), ("--tp-comm-overlap",)),
        f"Llama-3-8B layers, DP{n}": (LLAMA_8B, ZERO1, ("--overlap-grad-reduce", "--overlap-param-gather")),
        f"Qwen3-30B-A3B-like layers, EP{n}": (QWEN_30B, ("--expert-model-parallel-size", str(n)), ()),
    }
    bf16: dict[str, float] = {}

    def measure(name: str, flags: tuple[str, ...]) -> dict:
        with exposed_communication(runner.device) as trace:
            lines = runner.train("speed", flags)
        speed = statistics.median(line["tokens_per_second"] for line in lines[-3:])
        return {"tokens_per_second": speed, "to_bf16": speed / bf16.setdefault(name, speed), **trace, "passed": True}

    for name, (model, layout, overlap) in cases.items():
        shape = model if runner.device == "cuda" else MOE if "EP" in name else ()
        for recipe, extra in speed_variants(name, overlap):
            flags = (*base, *shape, *RECIPES[recipe], *layout, *extra)
            yield " ".join((name, recipe, *extra)), partial(measure, name, flags)


def speed_variants(name: str, overlap: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(recipe, flags); the first one is what the others are compared with."""
    yield "bf16", ()
    yield "blockwise", ()
    if "EP" in name:
        yield "blockwise", ("--moe-fp8-dispatch",)
        return
    yield "bf16", overlap
    yield "blockwise", (*overlap, *(("--fp8-param-gather",) if "DP" in name else ()))
    yield "tensorwise", overlap


def everything(runner: Runner, n: int, parts: list[str], elements: int) -> Iterator[dict]:
    """One row a check, as they come. What fails to run is a row that did not pass."""
    device = pick_device(runner.device)
    expected = json.loads((runner.folder / "reference.json").read_text())
    world = Axis(n, dist.get_rank(), dist.group.WORLD)
    checks = {
        "collectives": lambda: collective_checks(world, device, elements),
        "layouts": lambda: check_layouts(runner, n, expected),
        "switches": lambda: check_switches(runner, n),
        "checkpoint": lambda: check_checkpoint(runner, n, expected),
        "speed": lambda: measure_speed(runner, n),
    }
    for part in parts:
        for name, check in checks[part]():
            try:
                row = check()
            except (ValueError, RuntimeError) as error:
                row = {"passed": False, "error": str(error).splitlines()[0]}
            yield {"part": part, "name": name} | row


def line(row: dict) -> str:
    numbers = {"gap": "gap {:.1e}", "allowed": "allowed {:g}", "gb_per_s": "{:.1f} GB/s", "to_bf16": "{:.3f} of BF16",
               "tokens_per_second": "{:,.0f} tokens/s", "communication_ms": "communication {:.1f} ms",
               "exposed_ms": "exposed {:.1f} ms", "error": "{}"}  # fmt: skip
    told = ", ".join(form.format(row[key]) for key, form in numbers.items() if key in row)
    return f"{'ok  ' if row['passed'] else 'FAIL'} {row['name']:58} {told}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--reference", action="store_true", help="one process: write what the others must equal")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--elements", type=int, default=1 << 26, help="of a collective's buffer (default 2^26)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    runner = Runner(args.folder, args.device, args.recipes)
    if args.reference:
        needs = {"layouts", "checkpoint"} & set(args.parts)
        found = references(runner) if needs else {}
        (args.folder / "reference.json").write_text(json.dumps(found))
        return 0
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    elements = args.elements if args.device == "cuda" else min(args.elements, 1 << 16)
    rows = []
    for row in everything(runner, dist.get_world_size(), args.parts, elements):
        rows.append(row)
        if dist.get_rank() == 0:
            print(line(row), flush=True)
            (args.folder / "selftest.json").write_text(json.dumps(rows, indent=1))
    dist.destroy_process_group()
    return int(not all(row["passed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
