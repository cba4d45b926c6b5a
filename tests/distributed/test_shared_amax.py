"""Tensorwise scales under tensor parallelism: where ranks share an amax, and that forward's is kept, changes no bit."""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import pytest
import torch

from megafp8.fp8.input_spec import Scaling
from tests.cases import quick
from tests.distributed.layouts import LLAMA, Layout, Run, train
from tests.distributed.recorder import Message, record

LAYERS, MICROBATCHES, STEPS = 2, 2, 2
TENSORWISE = {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
MODEL = LLAMA | TENSORWISE | {"num_layers": LAYERS, "micro_batch_size": 2, "global_batch_size": 2 * MICROBATCHES}
GELU = MODEL | {"swiglu": False, "normalization": "LayerNorm", "add_bias_linear": True}
TP, SP = Layout(tp=2), Layout(tp=2, sp=True)
AGAIN = {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
CASES = {
    "whole tokens": (MODEL, TP),
    "tokens cut": (MODEL, SP),
    "norms again": (MODEL | AGAIN, SP),
    "layers again": (MODEL | FULL, SP),
    "formulas": (GELU, SP),
    "formulas, norms again": (GELU | AGAIN, SP),
    "in chunks": (MODEL, Layout(tp=2, sp=True, overlap=True)),
}
ONCE = {"whole tokens": 4, "tokens cut": 8}
"""Maxima of a layer and microbatch: inputs of proj and fc2, gradients of qkv and fc1; where tokens are cut the other
four as well."""


def apart(stack: ExitStack) -> None:
    """Producers hand over high precision, whose amax and bytes are made by passes of their own; backward measures what
    it quantizes again."""
    want, measures = Scaling.want, Scaling.measures
    stack.enter_context(
        mock.patch.object(
            Scaling, "want", lambda self, *args, **named: want(self, *args, **named) if self.cut is None else None
        )
    )
    stack.enter_context(
        mock.patch.object(Scaling, "measures", lambda self, step: self.cut is None and measures(self, step))
    )


def job(values: dict, layout: Layout, fault=None) -> tuple[Run, list[Message]]:
    with record() as log:
        return train(values, layout, STEPS, fault=fault), log.messages


def maxima(messages: list[Message]) -> int:
    """Amaxes of activations and gradients that were shared; of weights each is in the first step."""
    return sum(m.kind == "max" and m.dtype == torch.float32 and m.shape == (1,) for m in messages) - 4 * LAYERS


def each(run: Run) -> dict[str, torch.Tensor]:
    return {f"{what} {name}": part[2] for what in ("grads", "weights") for name, part in getattr(run, what).items()}


@pytest.mark.parametrize("name", quick(CASES, {"whole tokens", "tokens cut", "norms again"}))
def test_amaxes_shared_between_passes_change_no_bit(pool, name):
    """Losses, norms, gradients of the first step and weights after the last."""
    values, layout = CASES[name]
    ranks, others = pool.run_on(2, job, values, layout), pool.run_on(2, job, values, layout, apart)
    for (run, messages), (expected, before) in zip(ranks, others, strict=True):
        assert (run.losses, run.norms) == (expected.losses, expected.norms)
        got, want = each(run), each(expected)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], tensor) for key, tensor in want.items())
        assert [m.kind for m in messages] == [m.kind for m in ranks[0][1]]
        rounds = LAYERS * MICROBATCHES * STEPS
        spared = 2 + 2 * ("norms again" in name)  # proj's and fc2's inputs; with norms made again qkv's and fc1's
        assert maxima(before) - maxima(messages) == spared * rounds
        if name in ONCE:
            assert maxima(messages) == ONCE[name] * rounds
