"""Runs of 20 steps that must not differ by a bit, on the device at hand, and the faults that would make them differ.

A run trains a small Llama with the real optimizer, two microbatches a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megafp8.config import build_config, with_vocab_size
from megafp8.core.gpt import GPTModel, build_model
from megafp8.fp8 import DelayedScaling
from megafp8.fp8.param import Weight
from megafp8.fp8.storage import QuantizedStorage
from megafp8.optimizer import build_optimizer
from megafp8.parallel import ParallelContext
from megafp8.params import named_specs
from megafp8.step import Phase, StepContext

FLAGS = {
    "num_layers": 2,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "micro_batch_size": 2,
    "lr": 1e-2,
    "train_iters": 20,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 100,
    "mock_data": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.0,
    "bf16": True,
    "deterministic_mode": True,
}
TINY = FLAGS | {"hidden_size": 32, "ffn_hidden_size": 48, "seq_length": 16}
SMALL = FLAGS | {"hidden_size": 256, "ffn_hidden_size": 384, "seq_length": 128}
RECIPES = {
    "blockwise": {"fp8_format": "e4m3"},
    "tensorwise": {"fp8_format": "hybrid"},
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "delayed": {
        "fp8_format": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_amax_history_len": 3,
        "fp8_amax_compute_algo": "max",
    },
}
RECOMPUTE = {
    "full": {"recompute_granularity": "full"},
    "full, two at a time": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 2,
    },
    "all parts": {
        "recompute_granularity": "selective",
        "recompute_modules": ("core_attn", "mlp", "layernorm"),
    },
    "norms": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "mlp": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "core attention": {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)},
}


class Trace(NamedTuple):
    """values: each step's two losses and its gradient buffers. weights: in the end."""

    values: list[Tensor]
    weights: list[Tensor]


Between = Callable[[GPTModel, "DelayedScaling | None", int], None]


def trace(
    flags: dict, device: torch.device, *, steps: int = 20, between: Between | None = None, before: Between | None = None
) -> Trace:
    """Of one run. between: called after each step; before: before each forward."""
    config = with_vocab_size(build_config(env={}, **flags), 100)
    model = build_model(config, ParallelContext(), device)
    optimizer = build_optimizer(named_specs(model), config, ParallelContext())
    scaling, kept = DelayedScaling.of(model), []
    for iteration in range(steps):
        optimizer.zero_grad(2)
        for microbatch in range(2):
            if before is not None:
                before(model, scaling, iteration)
            tokens, labels = batch(config, 2 * iteration + microbatch, device)
            step = StepContext(iteration=iteration, microbatch=microbatch, grads=optimizer.grads, scaling=scaling)
            loss = model(tokens, step=step, labels=labels)
            loss.backward()
            kept.append(loss.detach())
        optimizer.reduce_gradients()
        kept += [flat.clone() for flat in optimizer.grads.state.flats]
        optimizer.step(lr=1e-2, weight_decay=0.1, valid_tokens=4 * config.data.seq_length)
        if scaling is not None:
            scaling.advance()
        if between is not None:
            between(model, scaling, iteration)
    return Trace([t.cpu() for t in kept], [p.detach().cpu() for p in model.parameters()])


def batch(config, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = 2, config.train.micro_batch_size, config.data.seq_length
    tokens, labels = torch.randint(100, shape, generator=generator).to(device)
    return tokens, labels


def same(a: Trace, b: Trace) -> bool:
    return len(a.values) == len(b.values) and _equal(a.values, b.values) and _equal(a.weights, b.weights)


def begins(a: Trace, b: Trace) -> bool:
    """Whether `a` begins with the values of `b`, a run of fewer steps."""
    return _equal(a.values[: len(b.values)], b.values)


def _equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def evaluate(model: GPTModel, scaling: DelayedScaling | None, iteration: int) -> None:
    """One evaluation of other data."""
    shape = 1, 8
    tokens = torch.randint(100, shape, generator=torch.Generator().manual_seed(iteration)).to(model.device)
    with torch.no_grad():
        model(tokens, step=StepContext(phase=Phase.EVAL, scaling=scaling), labels=tokens)


def drop_copies(model: GPTModel, scaling: DelayedScaling | None, iteration: int) -> None:
    """No weight copy lives longer than a microbatch."""
    for weight in owners(model):
        weight.publish()


def saving(directory: Path) -> Between:
    """Saves a checkpoint of the weights and the history after every fifth step."""

    def save(model: GPTModel, scaling: DelayedScaling | None, iteration: int) -> None:
        if iteration % 5 == 4:
            state = {spec.name: param.detach().cpu() for spec, param in named_specs(model)}
            state |= {name: item.tensor for name, item in (scaling.state() if scaling else {}).items()}
            from safetensors.torch import save_file

            save_file({k: v.contiguous() for k, v in state.items()}, directory / f"{iteration}.safetensors")

    return save


def owners(model: GPTModel) -> Iterator[Weight]:
    return (p.owner for p in model.parameters() if isinstance(getattr(p, "owner", None), Weight))


@contextmanager
def skipped_refresh() -> Iterator[None]:
    """A fault: copies of weights are made once and never again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weight, "_drop", lambda self: setattr(self, "_amax", None))
        yield


@contextmanager
def stale_column_copy() -> Iterator[None]:
    """A fault: the transposed copy survives a new version of the weight."""

    def drop(self: Weight) -> None:
        self._key, self._amax = None, None
        self._copies = {o: copy for o, copy in self._copies.items() if o == "colwise"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weight, "_drop", drop)
        yield


def evaluation_with_old_columns() -> Between:
    """A fault: an evaluation takes the transposed copies of the step before for those of the new weights (CASES 04)."""
    columns: dict[int, QuantizedStorage] = {}

    def between(model: GPTModel, scaling: DelayedScaling | None, iteration: int) -> None:
        evaluate(model, scaling, iteration)
        for weight in owners(model):
            if weight.recipe is not None:
                new, old = weight.operand("dgrad"), columns.get(id(weight))
                columns[id(weight)] = new
                weight._copies["colwise"] = new if old is None else old

    return between
