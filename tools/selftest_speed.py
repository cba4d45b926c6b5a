"""Speed of layers of large models on all GPUs: FP8 to BF16, bytes on the wire, communication that nothing hides."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

from selftest_runs import LLAMA_8B, MODELS, MOE, QWEN_30B, RECIPES, ZERO1, Check, Flags, Runner, model_flags, tp
from selftest_trace import communication_of, kernels_of

OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
CHUNKS = ("--tp-comm-overlap",)
GATHER, DISPATCH = "--fp8-param-gather", "--moe-fp8-dispatch"
WIRES = {
    GATHER: ("gather_mib", 0.55),
    DISPATCH: ("deal_mib", 1 - 0.45 / 2),  # only the trips to the experts are FP8, forward and backward: half of all
}
"""Switches of FP8 on the wire -> what they shrink, and to what share of it: 45 % less."""
NOISE = 0.97
"""Least speed of a step that should not be slower."""
FASTER_AT_8 = 1.25
"""Least speed of the best FP8 step of the Llama to the best BF16 step, on eight GPUs."""


@dataclass
class Speed:
    """Measures, and knows what it has measured. rows: by case, recipe and flags."""

    runner: Runner
    n: int
    rows: dict[tuple[str, str, Flags], dict] = field(default_factory=dict)

    def cases(self) -> dict[str, tuple[Flags, bool, Flags]]:
        """Name -> model, whether it has experts, layout."""
        n = self.n
        return {
            "DP": (LLAMA_8B, False, ZERO1),
            "EP": (QWEN_30B, True, ("--expert-model-parallel-size", str(n), *ZERO1)),
            "TP": (LLAMA_8B, False, (*tp(n), "--sequence-parallel")),
        }

    def variants(self) -> list[tuple[str, str, Flags]]:
        """(case, recipe, flags), what matters most first."""
        return [
            *(("DP", "bf16", OVERLAP), ("DP", "blockwise", OVERLAP), ("DP", "blockwise", (*OVERLAP, GATHER))),
            *(("EP", "bf16", ()), ("EP", "blockwise", ()), ("EP", "blockwise", (DISPATCH,))),
            *(("TP", "bf16", CHUNKS), ("TP", "blockwise", CHUNKS), ("TP", "bf16", ()), ("TP", "blockwise", ())),
            *(("DP", "bf16", ()), ("DP", "blockwise", ())),
            *(("DP", "tensorwise", (*OVERLAP, GATHER)), ("TP", "tensorwise", CHUNKS)),
        ]

    def checks(self, recipes: list[str]) -> Iterator[Check]:
        for case, recipe, extra in self.variants():
            if recipe in recipes:
                model = "Qwen3-30B-A3B-like" if case == "EP" else "Llama-3-8B"
                layout = f"{case}{self.n}{'+SP' * (case == 'TP')}"
                yield (
                    " ".join((f"{model} layers, {layout} {recipe}", *extra)),
                    partial(self.measure, case, recipe, extra),
                )

    def measure(self, case: str, recipe: str, extra: Flags) -> dict:
        """Tokens a second (median of the last three steps), and the rest of the row, a step."""
        runner = self.runner
        large, experts, layout = self.cases()[case]
        base = [flag for flag in model_flags(runner.device, runner.folder) if flag != "--deterministic-mode"]
        shape = large if runner.device == "cuda" else MOE if experts else ()
        with kernels_of(runner.device) as kernels:
            lines = runner.train((*base, *MODELS["dense"], *shape, *RECIPES[recipe], *layout, *extra))
        steps = lines[-3:]
        speed = statistics.median(line["tokens_per_second"] for line in steps)
        row = {"tokens_per_second": speed, "step_ms": statistics.median(line["elapsed_ms"] for line in steps)}
        for kind, axis in (("gather", "dp"), ("deal", "ep")):
            if size := runner.meter.bytes[kind, axis]:
                row[f"{kind}_mib"] = size / len(lines) / 2**20
        row |= communication_of(kernels, sum(line["elapsed_ms"] for line in steps), len(steps))
        self.rows[case, recipe, extra] = row
        if bf16 := [found["tokens_per_second"] for (c, r, _), found in self.rows.items() if (c, r) == (case, "bf16")]:
            row["to_bf16"] = speed / max(bf16)
        return row | self.verdict(case, recipe, extra)

    def verdict(self, case: str, recipe: str, extra: Flags) -> dict:
        """On the CPU only that it runs."""
        row, switch = self.rows[case, recipe, extra], next((flag for flag in extra if flag in WIRES), None)
        off = self.rows.get((case, recipe, tuple(flag for flag in extra if flag != switch)))
        if self.runner.device == "cpu":
            return {"passed": True}
        if self.n == 8 and recipe == "tensorwise":  # the last of its case
            best = max(found.get("to_bf16", 0.0) for (c, r, _), found in self.rows.items() if c == case and r != "bf16")
            return {"best_to_bf16": best, "passed": best >= FASTER_AT_8}
        if switch is None or off is None:
            return {"passed": True}
        kind, share = WIRES[switch]
        found = {"bytes_to_off": row[kind] / off[kind], "speed_to_off": off["step_ms"] / row["step_ms"]}
        return found | {"passed": found["bytes_to_off"] <= share and found["speed_to_off"] >= NOISE}
