"""What the self-test checks: layouts against one GPU, switches that change no number, checkpoints.

Each check is a name and a function that gives the rest of its row. Every process of a job makes the same list.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from selftest_collectives import collective_checks
from selftest_runs import GRAPHS, MODELS, RECIPES, STEPS, ZERO1, Check, Flags, Pairs, Runner, model_flags, tp
from selftest_speed import CASES, Speed

from megafp8.parallel import Axis
from megafp8.training.build import pick_device

PARTS = ("switches", "graphs", "layouts", "checkpoint", "collectives", "speed")
LIMITS = {"fp32": (1e-6, 1e-6, 1e-6)}
"""Allowed of losses, of the first gradient norm, of the other norms. FP32: numerics.md, over five steps. Other:"""
LOOSE = (5e-3, 1e-2, 5e-2)
OWN_KERNELS = ("blockwise", "mxfp8")
"""Recipes whose products are always the project's kernels, and whose tokens may travel in FP8."""
EXTRA = ("fp32", "blockwise")
"""Recipes that rarer layouts are tried with."""


def pp(n: int) -> Flags:
    return ("--pipeline-model-parallel-size", str(n))


def cp(n: int) -> Flags:
    return ("--context-parallel-size", str(n))


def layouts(n: int) -> dict[str, tuple[str, Flags]]:
    """Name -> model and flags of every layout of n processes that is tried, with every recipe."""
    found = {
        f"PP{n}": ("dense", pp(n)),
        f"DP{n}": ("dense", ZERO1),
        f"EP{n}": ("moe", ("--expert-model-parallel-size", str(n))),
        f"CP{n}": ("dense", cp(n)),
        f"TP{n}+SP": ("dense", (*tp(n), "--sequence-parallel")),
        f"TP{n}": ("dense", tp(n)),
    }
    if n == 8:
        found["TP2xPP2xDP2"] = ("dense", (*tp(2), *pp(2), *ZERO1))
    return found


def rare_layouts(n: int) -> dict[str, tuple[str, Flags]]:
    """As `layouts`, for what has a way of its own between the GPUs: with the recipes EXTRA."""
    found = {
        f"PP{n} zero-bubble": ("dense", (*pp(n), "--pipeline-schedule", "zero-bubble")),
        f"PP{n} tied": ("tied", pp(n)),
        f"CP{n} ring": ("dense", (*cp(n), "--cp-comm-type", "p2p")),
    }
    if n == 2:  # of the four layers of the small model
        found["PP2 interleaved"] = ("dense", (*pp(2), "--num-virtual-stages-per-pipeline-rank", "2"))
    return found


def references(recipe: str) -> list[str]:
    """The models that one process has to train with a recipe."""
    return [model for model in MODELS if model != "tied" or recipe in EXTRA]


def gaps(found: Pairs, expected: Pairs) -> tuple[float, float, float]:
    """Largest relative differences of losses, of the first gradient norm, of the other norms."""
    assert len(found) == len(expected) > 1, "a run is not whole"
    off = [[abs(x - y) / abs(y) for x, y in zip(p, q, strict=True)] for p, q in zip(found, expected, strict=True)]
    return max(loss for loss, _ in off), off[0][1], max(norm for _, norm in off[1:])


def verdict(found: Pairs, expected: Pairs, recipe: str) -> dict:
    steps, limits = (5, LIMITS[recipe]) if recipe in LIMITS else (len(expected), LOOSE)
    off = gaps(found[:steps], expected[:steps])
    return {"gaps": off, "allowed": limits, "passed": all(x <= y for x, y in zip(off, limits, strict=True))}


def check_layouts(runner: Runner, n: int, recipes: list[str]) -> Iterator[Check]:
    def compare(recipe: str, model: str, flags: Flags) -> dict:
        return verdict(runner.small(recipe, model, flags), runner.reference(recipe, model), recipe)

    for table, chosen in ((rare_layouts(n), [r for r in recipes if r in EXTRA]), (layouts(n), recipes)):
        for name, (model, flags) in table.items():
            for recipe in chosen:
                yield f"{name} {recipe} = one", partial(compare, recipe, model, flags)


def check_switches(runner: Runner, n: int, recipes: list[str]) -> Iterator[Check]:
    """Flags that must change no number, each with the layout they act in.

    Overlap in TP makes products of fewer rows, for which a library may take another kernel: there only near enough.
    """
    overlap = ("--overlap-grad-reduce", "--overlap-param-gather")
    fp8 = [recipe for recipe in recipes if recipe not in ("fp32", "bf16")]
    tiled = [recipe for recipe in recipes if recipe in OWN_KERNELS]
    switches = {
        f"DP{n} overlaps": (f"DP{n}", overlap, recipes),
        f"DP{n} --fp8-param-gather": (f"DP{n}", ("--fp8-param-gather",), fp8),
        f"DP{n} overlaps, --fp8-param-gather": (f"DP{n}", (*overlap, "--fp8-param-gather"), fp8),
        f"EP{n} --moe-fp8-dispatch": (f"EP{n}", ("--moe-fp8-dispatch",), tiled),
        f"TP{n}+SP --tp-comm-overlap": (f"TP{n}+SP", ("--tp-comm-overlap",), recipes),
    }

    def compare(recipe: str, layout: str, switch: Flags) -> dict:
        model, flags = layouts(n)[layout]
        off, on = runner.small(recipe, model, flags), runner.small(recipe, model, (*flags, *switch))
        if "--tp-comm-overlap" in switch and recipe not in OWN_KERNELS:
            return verdict(on, off, recipe)
        return same(on, off)

    for name, (layout, switch, chosen) in switches.items():
        for recipe in chosen:
            yield f"{name} on = off, {recipe}", partial(compare, recipe, layout, switch)


def same(found: Pairs, expected: Pairs) -> dict:
    off = gaps(found, expected)
    return {"gaps": off, "allowed": (0.0, 0.0, 0.0), "passed": max(off) == 0.0}


def check_graphs(runner: Runner, n: int, recipes: list[str]) -> Iterator[Check]:
    """Layers replayed from CUDA graphs, with the messages that tensor parallelism sends in them; and that a run ends,
    for which the graphs must be gone. uneven: FP8 tiles lie across two ranks' tokens."""
    whole, cut = tp(n), (*tp(n), "--sequence-parallel")
    uneven = ("--seq-length", str(runner.tokens * 3 // 4))
    layouts = {
        f"TP{n}+SP": (cut, recipes),
        f"TP{n}": (whole, [r for r in recipes if r in (*EXTRA, "bf16")]),
        f"TP{n}+SP --tp-comm-overlap": (
            (*cut, "--tp-comm-overlap"),
            [r for r in recipes if r in ("bf16", "blockwise")],
        ),
        f"TP{n}+SP uneven": ((*cut, *uneven), [r for r in recipes if r == "blockwise"]),
    }

    def compare(recipe: str, flags: Flags) -> dict:
        off, on = (runner.small(recipe, "dense", (*flags, *more)) for more in ((), GRAPHS))
        return same(on, off)

    for name, (flags, chosen) in layouts.items():
        for recipe in chosen:
            yield f"{name} --cuda-graph-impl local on = off, {recipe}", partial(compare, recipe, flags)


def check_checkpoint(runner: Runner, n: int, recipes: list[str]) -> Iterator[Check]:
    """Saved at one layout after half of the steps, loaded at another."""
    base, half, table = model_flags(runner.device, runner.folder), STEPS // 2, layouts(n)

    def compare(saves: str, loads: str, recipe: str) -> dict:
        where = runner.folder / "checkpoints" / f"{saves}-{loads}-{recipe}"
        if dist.get_rank() == 0:
            shutil.rmtree(where, ignore_errors=True)
        flags = (*base, *RECIPES[recipe], *MODELS["dense"])
        save = ("--save", str(where), "--save-interval", str(half), "--exit-interval", str(half))
        runner.train((*flags, *table[saves][1], *save))
        lines = runner.train((*flags, *table[loads][1], "--load", str(where)))
        found, expected = [(x["lm_loss"], x["grad_norm"]) for x in lines], runner.reference(recipe, "dense")[half:]
        off, limit = gaps(found, expected), 1e-5 if recipe == "fp32" else LOOSE[2]
        return {"gaps": off, "allowed": (limit,) * 3, "passed": max(off) <= limit}

    for saves, loads in ((f"DP{n}", f"PP{n}"), (f"TP{n}", f"DP{n}")):
        for recipe in (r for r in EXTRA if r in recipes):
            yield f"saved at {saves}, loaded at {loads}, {recipe}", partial(compare, saves, loads, recipe)


def every_check(
    runner: Runner, n: int, parts: list[str], recipes: list[str], elements: int, cases: Sequence[str] = CASES
) -> Iterator[tuple]:
    """(part, name, check) in order. cases: of the part speed."""
    world = Axis(n, dist.get_rank(), dist.group.WORLD)
    found = {
        "switches": lambda: check_switches(runner, n, recipes),
        "graphs": lambda: check_graphs(runner, n, recipes),
        "layouts": lambda: check_layouts(runner, n, recipes),
        "checkpoint": lambda: check_checkpoint(runner, n, recipes),
        "collectives": lambda: collective_checks(world, pick_device(runner.device), elements),
        "speed": lambda: Speed(runner, n, tuple(cases)).checks(recipes),
    }
    for part in parts:
        for name, check in found[part]():
            yield part, name, check


def machine(device: str, n: int) -> dict:
    """What the rows were measured on."""
    if device == "cpu":
        return {"device": "cpu", "ranks": n, "torch": torch.__version__}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"device": torch.cuda.get_device_name(), "ranks": n, "torch": torch.__version__, "nccl": nccl}
