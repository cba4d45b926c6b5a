"""From which sizes on FP8 pays, by a table of measurements: which linears of a configuration stay in BF16.

`megafp8/fp8/crossover.json`, written by `tools/bench_step.py --crossover`: name of a GPU -> recipe -> list of `[tokens,
out_features, in_features, speed, ...]`, the speed of a linear's forward and backward in FP8 over BF16's, of the device
alone. The file's first GPU counts, whatever GPU runs, or none: what a run computes, what a planner counts and what a
checkpoint resumes with must not depend on the machine.

A linear goes by the measurements that are nearest in the logarithms of its three sizes, if each of those is within a
factor of `NEAR`: by the geometric mean of those that are as good as equally near. Fewer or more tokens than were ever
measured count as the fewest or the most. Sizes are a rank's. Left alone are experts and latent attention's projections
down and up, which were not measured, and recipes without measurements: mxfp8, which Hopper emulates, and delayed, whose
checkpoints hold a history of every linear in FP8, so that another microbatch or layout could not resume them.
"""

from __future__ import annotations

import json
import math
import statistics
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from megafp8.config.config import Config

TABLE = Path(__file__).resolve().parents[1] / "fp8" / "crossover.json"
NEAR = 2
AS_NEAR = 0.25  # octaves
"""A size further off than that from all that was measured, such as a toy model's, is as if nothing had been."""
SLOWER = 0.97
"""Of BF16's speed. Two measurements differ by some per cent, and FP8 saves bytes too."""
FLAG = "--fp8-small-linears"


class Measured(NamedTuple):
    """gpu: what was measured; recipes: recipe -> rows."""

    gpu: str
    recipes: dict[str, list[list[float]]]


@cache
def table() -> Measured:
    gpus: dict[str, Any] = json.loads(TABLE.read_text())
    return Measured(*next(iter(gpus.items()), ("", {})))


def speed(recipe: str | None, tokens: int, out_features: int, in_features: int) -> float | None:
    """FP8's over BF16's of the measurements that are nearest; None where none is near."""
    rows = table().recipes.get(recipe, [])
    if not rows or min(tokens, out_features, in_features) < 1:  # of a layout that the checks are about to refuse
        return None
    measured = sorted(row[0] for row in rows)
    sizes = min(max(tokens, measured[0]), measured[-1]), out_features, in_features

    def apart(row: list[float]) -> list[float]:
        return [abs(math.log2(ours / theirs)) for ours, theirs in zip(sizes, row, strict=False)]

    near = [(math.hypot(*apart(row)), row[3]) for row in rows if max(apart(row)) <= math.log2(NEAR)]
    if not near:
        return None
    return statistics.geometric_mean(found for distance, found in near if distance <= min(near)[0] + AS_NEAR)


def small_linears(config: Config) -> tuple[str, ...]:
    """Parts of a layer, such as "attention.proj", that stay in BF16. Of a configuration whose model is resolved."""
    fp8, tokens = config.fp8, tokens_of(config)
    if not fp8.enabled or fp8.fp8_small_linears == "fp8":
        return ()
    speeds = {part: speed(fp8.fp8_recipe, tokens, *sizes) for part, sizes in sizes_of(config).items()}
    return tuple(part for part, found in speeds.items() if found is not None and found < SLOWER)


def with_small_linears(config: Config) -> Config:
    """The configuration with what follows from its sizes and its recipe as they are now."""
    return config.replace(small_linears_in_bf16=small_linears(config))


def is_small(config: Config, name: str) -> bool:
    """Whether the linear of this global name is one of them."""
    return ".".join(name.split(".")[-2:]) in config.fp8.small_linears_in_bf16


def why(config: Config, part: str) -> str:
    """The log's line on a part that stays in BF16."""
    tokens, sizes, recipe = tokens_of(config), sizes_of(config).get(part), config.fp8.fp8_recipe
    found = sizes and speed(recipe, tokens, *sizes)
    if not sizes or found is None or found >= SLOWER:  # a resumed run's, of other sizes or another table
        return f"{part} stays in BF16, as in the checkpoint ({FLAG} decides anew)"
    return (
        f"{part} stays in BF16: at {tokens} tokens, {sizes[0]} x {sizes[1]}, FP8 ({recipe}) has {found:.2f} of BF16's "
        f"speed, by what was measured near it on {table().gpu} ({FLAG} fp8: FP8 anyway)"
    )


def tokens_of(config: Config) -> int:
    """Of a rank's microbatch."""
    return config.train.micro_batch_size * config.data.seq_length // config.parallel.context_parallel_size


def sizes_of(config: Config) -> dict[str, tuple[int, int]]:
    """Part of a layer -> (out, in) features of a rank."""
    m, tp = config.model, config.parallel.tensor_model_parallel_size
    rows = (m.num_attention_heads + 2 * m.num_query_groups) * m.kv_channels
    found = {} if m.multi_latent_attention else {"attention.qkv": (rows // tp, m.hidden_size)}
    return found | {
        "attention.proj": (m.hidden_size, m.num_attention_heads * m.value_channels // tp),
        "mlp.fc1": (m.ffn_hidden_size * (2 if m.swiglu else 1) // tp, m.hidden_size),
        "mlp.fc2": (m.hidden_size, m.ffn_hidden_size // tp),
    }
