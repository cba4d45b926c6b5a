"""Speed of large models on all GPUs: FP8 to BF16, bytes on the wire, communication that nothing hides.

Layers of them, and all of one (the case WHOLE), which is the step that a user waits for.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from selftest_runs import (
    GRAPHS,
    LLAMA_8B,
    LLAMA_8B_WHOLE,
    MODELS,
    MOE,
    QWEN_30B,
    RECIPES,
    WHOLE_TILES,
    ZERO1,
    Check,
    Flags,
    Runner,
    model_flags,
    tp,
)
from selftest_steps import Plan, measure

from megafp8.config import parse_args
from megafp8.plan.comparison import with_vocabulary
from megafp8.plan.memory import GIB, plan_stages

CASES = ("DP", "EP", "TP", "GRAPHS", "WHOLE")
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
CHUNKS = ("--tp-comm-overlap",)
GATHER, DISPATCH, GRADIENTS = "--fp8-param-gather", "--moe-fp8-dispatch", "--moe-fp8-combine-grad"
WIRES = {
    (GATHER,): ("gather_mib", 0.55),
    # A token's row makes four trips a step: to its expert and back, and so do gradients. FP8 are the way there, and
    # the gradients' way there.
    (DISPATCH,): ("deal_mib", 1 - 0.45 / 4),
    (DISPATCH, GRADIENTS): ("deal_mib", 1 - 0.45 / 2),
}
"""Switches of FP8 on the wire -> what they shrink, and to what share of it: 45 % less of what they are for."""
BALANCED = "--moe-router-force-load-balancing"
"""So that bytes can be compared: a router, on its way through a training, deals out more rows or less."""
NOISE = 0.97
"""Least speed of a step that should not be slower."""
FASTER = 1.25
"""Least speed of the best FP8 step of the whole Llama to the BF16 step."""
WHOLE_NAME = "Llama-3-8B whole"
"""How names of the case WHOLE begin."""
WHOLE_TIME = 3.0
"""Its checks may take so many times as long as others."""
RESERVED = 4 * GIB
"""Of a GPU's memory, what tensors can't have: as in examples/clusters."""
TRAFFIC = {"gather_mib": ("gather", "dp"), "deal_mib": ("deal", "ep")}
"""Columns of a row, and what the meter calls it."""
SHORT = Plan(warmup=2, alone=1, rounds=2, block=1, profiled=1)
"""On the CPU, which only proves that it runs."""
WHOLE_PLAN = Plan(warmup=2, alone=1, rounds=3, block=1, profiled=1)
"""Steps of the case WHOLE take seconds."""


@dataclass
class Speed:
    """Measures, and knows what it has measured. rows: by case, recipe and flags. cases: those that are measured.

    whole: the variants of the case WHOLE, of which the last one is judged.
    """

    runner: Runner
    n: int
    cases: tuple[str, ...] = CASES
    rows: dict[tuple[str, str, Flags], dict] = field(default_factory=dict)
    whole: list[tuple[str, str, Flags]] = field(default_factory=list)

    def layout(self, case: str) -> tuple[Flags, Flags, Flags]:
        """Model, what stands for it on the CPU, layout."""
        n, large = self.n, self.runner.device == "cuda"
        return {
            "DP": (LLAMA_8B, (), ZERO1),
            "EP": (QWEN_30B, MOE, ("--expert-model-parallel-size", str(n), *ZERO1, BALANCED, *samples(4, n, large))),
            "TP": (LLAMA_8B, (), (*tp(n), "--sequence-parallel", *samples(4, 2, large))),
            "GRAPHS": (LLAMA_8B, (), (*tp(n), "--sequence-parallel")),
            "WHOLE": (
                LLAMA_8B_WHOLE,
                WHOLE_TILES,
                (*tp(2), "--sequence-parallel", *ZERO1, *OVERLAP, *samples(1, 4 * n, large)),
            ),
        }[case]

    def variants(self) -> list[tuple[str, str, Flags]]:
        """(case, recipe, flags), what matters most first."""
        found = [
            *(("DP", "bf16", OVERLAP), ("DP", "blockwise", OVERLAP), ("DP", "blockwise", (*OVERLAP, GATHER))),
            *(("WHOLE", "bf16", ()), ("WHOLE", "blockwise", (GATHER,)), ("WHOLE", "tensorwise", (GATHER,))),
            *(("EP", "bf16", ()), ("EP", "blockwise", ()), ("EP", "blockwise", (DISPATCH,))),
            ("EP", "blockwise", (DISPATCH, GRADIENTS)),
            *(("TP", "bf16", CHUNKS), ("TP", "blockwise", CHUNKS), ("TP", "bf16", ()), ("TP", "blockwise", ())),
            *(("DP", "bf16", ()), ("DP", "blockwise", ())),
            *(("DP", "tensorwise", (*OVERLAP, GATHER)), ("TP", "tensorwise", CHUNKS), ("TP", "tensorwise", ())),
            *(("GRAPHS", "bf16", GRAPHS), ("GRAPHS", "blockwise", GRAPHS), ("GRAPHS", "blockwise", (*CHUNKS, *GRAPHS))),
        ]
        return [variant for variant in found if variant[0] in self.cases]

    def checks(self, recipes: list[str]) -> Iterator[Check]:
        """Of the variants of these recipes. Where the GPUs can't hold the whole model, its one check says so."""
        chosen = [variant for variant in self.variants() if variant[1] in recipes]
        self.whole = [variant for variant in chosen if variant[0] == "WHOLE"]
        why = self.why_not_whole()
        if why:
            yield f"{WHOLE_NAME}, TP2+SP", lambda: {"passed": True, "left_out": why}
        for case, recipe, extra in chosen:
            if case != "WHOLE" or not why:
                yield " ".join((self.title(case), recipe, *extra)), partial(self.measure, case, recipe, extra)

    def title(self, case: str) -> str:
        if case == "WHOLE":
            return f"{WHOLE_NAME}, TP2+SP DP{self.n // 2}"
        model = "Qwen3-30B-A3B-like" if case == "EP" else "Llama-3-8B"
        return f"{model} layers, " + (f"TP{self.n}+SP" if case in ("TP", "GRAPHS") else f"{case}{self.n}")

    def why_not_whole(self) -> str | None:
        """Why the case WHOLE can't run. No message is needed to agree: all ranks see all GPUs."""
        if not self.whole:
            return None
        if self.n % 2:
            return f"needs an even number of GPUs, not {self.n}"
        if self.runner.device != "cuda":
            return None
        most, usable = max(self.planned(*variant) for variant in self.whole), smallest_memory(self.n) - RESERVED
        if most <= usable:
            return None
        return f"needs {most / GIB:.1f} GiB of a GPU's memory; the smallest has {usable / GIB:.1f} for it"

    def planned(self, case: str, recipe: str, extra: Flags) -> int:
        """Bytes of a rank at the peak, as `tools/plan.py memory` says."""
        env = {"WORLD_SIZE": str(self.n)}
        config = with_vocabulary(parse_args(list(self.flags(case, recipe, extra)), env=env, check_files=False))
        return max(plan.total for plan in plan_stages(config))

    def flags(self, case: str, recipe: str, extra: Flags) -> Flags:
        runner = self.runner
        large, tiny, layout = self.layout(case)
        base = [flag for flag in model_flags(runner.device, runner.folder) if flag != "--deterministic-mode"]
        shape = large if runner.device == "cuda" else tiny
        return *base, *MODELS["dense"], *shape, *RECIPES[recipe], *layout, *extra

    def measure(self, case: str, recipe: str, extra: Flags) -> dict:
        """The row of a variant; one with a switch takes turns with itself without it, whose row is `off`."""
        whole, cuda = case == "WHOLE", self.runner.device == "cuda"
        known = {flag for wire in (*WIRES, GRAPHS) for flag in wire}
        switches = () if whole else tuple(flag for flag in extra if flag in known)  # two whole models don't fit
        runs = {"on": self.flags(case, recipe, extra)}
        if switches:
            off = tuple(flag for flag in extra if flag not in switches)
            runs = {"off": self.flags(case, recipe, off)} | runs
        plan = SHORT if not cuda else WHOLE_PLAN if whole else Plan()
        if whole and cuda:
            torch.cuda.reset_peak_memory_stats()
        found = {name: columns(row) for name, row in measure(self.runner, runs, plan).items()}
        row = self.rows[case, recipe, extra] = found["on"]
        if whole and cuda:
            row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        if bf16 := [r["tokens_per_second"] for (c, name, _), r in self.rows.items() if (c, name) == (case, "bf16")]:
            row["to_bf16"] = row["tokens_per_second"] / max(bf16)
        verdict = {"passed": True}
        if switches:
            judge = partial(on_the_wire, switches) if switches in WIRES else from_graphs
            verdict = judge(found["off"], row) | {"off": found["off"]}
        compares = any(name == "bf16" for _, name, _ in self.whole)
        judged = compares and recipe != "bf16" and (case, recipe, extra) == self.whole[-1]
        if judged and not bf16:  # a check that hung took the rows before it along
            verdict = {"passed": False, "error": "BF16's step, which it is compared with, was lost"}
        elif judged:
            best = max(r["to_bf16"] for (c, name, _), r in self.rows.items() if c == case and name != "bf16")
            verdict = {"best_to_bf16": best, "passed": best >= FASTER}
        return row | verdict | ({} if cuda else {"passed": True})


def columns(row: dict) -> dict:
    """A row of `measure` with the traffic that counts here."""
    traffic = row.pop("traffic")
    return row | {name: traffic[key] / 2**20 for name, key in TRAFFIC.items() if key in traffic}


def smallest_memory(n: int) -> int:
    """Bytes of the smallest of this machine's first n GPUs."""
    return min(torch.cuda.get_device_properties(number).total_memory for number in range(n))


def samples(micro_batch: int, others: int, large: bool) -> Flags:
    """Samples of a microbatch, and others times as many of a step; what keeps a GPU busy is too much for a CPU."""
    micro_batch = micro_batch if large else 1
    return "--micro-batch-size", str(micro_batch), "--global-batch-size", str(others * micro_batch)


def on_the_wire(switches: tuple[str, ...], off: dict, on: dict) -> dict:
    """What switches save of a step's bytes, and their speed."""
    kind, share = WIRES[switches]
    found = {"bytes_to_off": on[kind] / off[kind], "speed_to_off": speed_to(off, on)}
    return found | {"passed": found["bytes_to_off"] <= share and found["speed_to_off"] >= NOISE}


def from_graphs(off: dict, on: dict) -> dict:
    """What CUDA graphs give a step."""
    speed = speed_to(off, on)
    return {"speed_to_off": speed, "passed": speed >= NOISE}


def speed_to(off: dict, on: dict) -> float:
    """The median of rounds in which both ran."""
    return statistics.median(x / y for x, y in zip(off["ms"], on["ms"], strict=True))
