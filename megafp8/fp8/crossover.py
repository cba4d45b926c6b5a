"""From which sizes on FP8 pays: looked up in a table of measurements. Without one for the device, it always does.

`crossover.json`, written by `tools/bench_step.py --crossover`: device name -> recipe -> list of
`[tokens, out_features, in_features, speed, ...]`, the speed of a linear's forward and backward in FP8 over BF16's. A
linear goes by the measurement that is nearest in the logarithms of the three, if each is within a factor of `NEAR`.
Linears that are slower in FP8 stay in high precision, unless `--fp8-module-recipes` names them. Experts were not
measured, and are never left out.
"""

from __future__ import annotations

import json
import logging
import math
from functools import cache
from pathlib import Path

import torch

from megafp8.config import Config
from megafp8.fp8.recipe import Recipe

log = logging.getLogger(__name__)
TABLE = Path(__file__).with_name("crossover.json")
NEAR = 2
"""A size further off than that from all that was measured, such as a toy model's, is as if nothing had been."""


@cache
def table() -> dict[str, dict[str, list]]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def speed(device: str, recipe: str, tokens: int, out_features: int, in_features: int) -> float | None:
    """FP8's over BF16's of the measurement that is nearest; None where none is near."""
    sizes = tokens, out_features, in_features

    def apart(row: list) -> list[float]:
        return [abs(math.log2(ours / theirs)) for ours, theirs in zip(sizes, row, strict=False)]

    rows = (row for row in table().get(device, {}).get(recipe, []) if max(apart(row)) <= math.log2(NEAR))
    nearest = min(rows, key=lambda row: math.hypot(*apart(row)), default=None)
    return None if nearest is None else nearest[3]


class SmallLinears:
    """Says of a linear, by its global name, whether it is too small for FP8 on the device that runs."""

    def __init__(self, config: Config) -> None:
        runs_on_gpu = config.train.device != "cpu" and bool(table()) and torch.cuda.is_available()
        self.device = torch.cuda.get_device_name() if runs_on_gpu else ""
        self.sizes = _sizes(config) if self.device else {}
        self.tokens = 0
        if self.device:
            sequences = config.train.micro_batch_size * config.data.seq_length
            self.tokens = sequences // config.parallel.context_parallel_size

    def __call__(self, name: str, recipe: Recipe) -> bool:
        part = ".".join(name.split(".")[-2:])
        if part not in self.sizes:
            return False
        found = speed(self.device, recipe.name, self.tokens, *self.sizes[part])
        if found is None or found >= 1:
            return False
        out_features, in_features = self.sizes[part]
        _say(
            f"{part} stays in BF16: at {self.tokens} tokens, {out_features} x {in_features}, FP8 ({recipe.name}) has "
            f"{found:.2f} of BF16's speed on {self.device} (--fp8-module-recipes '*.{part}={recipe.name}': FP8 anyway)"
        )
        return True


def _sizes(config: Config) -> dict[str, tuple[int, int]]:
    """Part of a layer -> (out, in) features of a rank."""
    m, tp = config.model, config.parallel.tensor_model_parallel_size
    rows = (m.num_attention_heads + 2 * m.num_query_groups) * m.kv_channels
    return {
        "attention.qkv": (rows // tp, m.hidden_size),
        "attention.proj": (m.hidden_size, m.num_attention_heads * m.value_channels // tp),
        "mlp.fc1": (m.ffn_hidden_size * (2 if m.swiglu else 1) // tp, m.hidden_size),
        "mlp.fc2": (m.hidden_size, m.ffn_hidden_size // tp),
    }


@cache
def _say(what: str) -> None:
    log.warning(what)
