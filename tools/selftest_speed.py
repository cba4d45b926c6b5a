"""Speed of layers of large models on all GPUs: FP8 to BF16, bytes on the wire, communication that nothing hides."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from selftest_runs import GRAPHS, LLAMA_8B, MODELS, MOE, QWEN_30B, RECIPES, ZERO1, Check, Flags, Runner, model_flags, tp
from selftest_steps import Plan, measure

CASES = ("DP", "EP", "TP", "GRAPHS")
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
FASTER_AT_8 = 1.25
"""Least speed of the best FP8 step of the Llama to the best BF16 step, on eight GPUs."""
TRAFFIC = {"gather_mib": ("gather", "dp"), "deal_mib": ("deal", "ep")}
"""Columns of a row, and what the meter calls it."""
SHORT = Plan(warmup=2, alone=1, rounds=2, block=1, profiled=1)
"""On the CPU, which only proves that it runs."""


@dataclass
class Speed:
    """Measures, and knows what it has measured. rows: by case, recipe and flags. cases: those that are measured."""

    runner: Runner
    n: int
    cases: tuple[str, ...] = CASES
    rows: dict[tuple[str, str, Flags], dict] = field(default_factory=dict)

    def layout(self, case: str) -> tuple[Flags, bool, Flags]:
        """Model, whether it has experts, layout."""
        n, large = self.n, self.runner.device == "cuda"
        return {
            "DP": (LLAMA_8B, False, ZERO1),
            "EP": (QWEN_30B, True, ("--expert-model-parallel-size", str(n), *ZERO1, BALANCED, *samples(4, n, large))),
            "TP": (LLAMA_8B, False, (*tp(n), "--sequence-parallel", *samples(4, 2, large))),
            "GRAPHS": (LLAMA_8B, False, (*tp(n), "--sequence-parallel")),
        }[case]

    def variants(self) -> list[tuple[str, str, Flags]]:
        """(case, recipe, flags), what matters most first."""
        found = [
            *(("DP", "bf16", OVERLAP), ("DP", "blockwise", OVERLAP), ("DP", "blockwise", (*OVERLAP, GATHER))),
            *(("EP", "bf16", ()), ("EP", "blockwise", ()), ("EP", "blockwise", (DISPATCH,))),
            ("EP", "blockwise", (DISPATCH, GRADIENTS)),
            *(("TP", "bf16", CHUNKS), ("TP", "blockwise", CHUNKS), ("TP", "bf16", ()), ("TP", "blockwise", ())),
            *(("DP", "bf16", ()), ("DP", "blockwise", ())),
            *(("DP", "tensorwise", (*OVERLAP, GATHER)), ("TP", "tensorwise", CHUNKS)),
            *(("GRAPHS", "bf16", GRAPHS), ("GRAPHS", "blockwise", GRAPHS), ("GRAPHS", "blockwise", (*CHUNKS, *GRAPHS))),
        ]
        return [variant for variant in found if variant[0] in self.cases]

    def checks(self, recipes: list[str]) -> Iterator[Check]:
        for case, recipe, extra in self.variants():
            if recipe in recipes:
                model = "Qwen3-30B-A3B-like" if case == "EP" else "Llama-3-8B"
                layout = f"TP{self.n}+SP" if case in ("TP", "GRAPHS") else f"{case}{self.n}"
                yield (
                    " ".join((f"{model} layers, {layout} {recipe}", *extra)),
                    partial(self.measure, case, recipe, extra),
                )

    def flags(self, case: str, recipe: str, extra: Flags) -> Flags:
        runner = self.runner
        large, experts, layout = self.layout(case)
        base = [flag for flag in model_flags(runner.device, runner.folder) if flag != "--deterministic-mode"]
        shape = large if runner.device == "cuda" else MOE if experts else ()
        return *base, *MODELS["dense"], *shape, *RECIPES[recipe], *layout, *extra

    def measure(self, case: str, recipe: str, extra: Flags) -> dict:
        """The row of a variant; one with a switch takes turns with itself without it, whose row is `off`."""
        switches = tuple(flag for flag in extra if flag in {flag for wire in (*WIRES, GRAPHS) for flag in wire})
        runs = {"on": self.flags(case, recipe, extra)}
        if switches:
            off = tuple(flag for flag in extra if flag not in switches)
            runs = {"off": self.flags(case, recipe, off)} | runs
        plan = Plan() if self.runner.device == "cuda" else SHORT
        found = {name: columns(row) for name, row in measure(self.runner, runs, plan).items()}
        row = self.rows[case, recipe, extra] = found["on"]
        if bf16 := [r["tokens_per_second"] for (c, name, _), r in self.rows.items() if (c, name) == (case, "bf16")]:
            row["to_bf16"] = row["tokens_per_second"] / max(bf16)
        verdict = {"passed": True}
        if switches:
            judge = partial(on_the_wire, switches) if switches in WIRES else from_graphs
            verdict = judge(found["off"], row) | {"off": found["off"]}
        if self.n == 8 and recipe == "tensorwise":  # the last of its case
            best = max(r.get("to_bf16", 0.0) for (c, name, _), r in self.rows.items() if c == case and name != "bf16")
            verdict |= {"best_to_bf16": best, "passed": verdict["passed"] and best >= FASTER_AT_8}
        return row | verdict | ({"passed": True} if self.runner.device == "cpu" else {})


def columns(row: dict) -> dict:
    """A row of `measure` with the traffic that counts here."""
    traffic = row.pop("traffic")
    return row | {name: traffic[key] / 2**20 for name, key in TRAFFIC.items() if key in traffic}


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
