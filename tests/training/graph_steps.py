"""Training steps with and without CUDA graphs of layers, for the tests that compare their bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megafp8.config import build_config, with_vocab_size
from megafp8.core.transformer.recorders import Recorder, recorder_on
from megafp8.parallel import ParallelContext
from megafp8.training.build import build_parts
from megafp8.training.throughput import IntervalTimer
from megafp8.training.trainer import Trainer

MODEL = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "seq_length": 32,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "lr": 1e-2,
    "train_iters": 100,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 255,
    "mock_data": True,
    "num_workers": 0,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
    "add_bias_linear": False,
    "bf16": True,
}
UNGROUPED = {"group_query_attention": False, "num_query_groups": None}
GPT2 = UNGROUPED | {
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "swiglu": False,
    "add_bias_linear": True,
}
LATENT = UNGROUPED | {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
PRIMARY = {"use_distributed_optimizer": True, "fp8_param_gather": True}
DELAYED = {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_amax_history_len": 3}
RECIPES = {
    "bf16": {},
    "blockwise": {"fp8_format": "e4m3"},
    "tensorwise": {"fp8_format": "hybrid"},
    "delayed": DELAYED,
    "mxfp8": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "blockwise, primary": {"fp8_format": "e4m3"} | PRIMARY,
    "tensorwise, primary": {"fp8_format": "hybrid"} | PRIMARY,
    "delayed, primary": DELAYED | PRIMARY,
}
GRAPHS = {"cuda_graph_impl": "local", "cuda_graph_warmup_steps": 1}


@dataclass
class Run:
    """steps: what each left, by name; trainer: at the end of them."""

    trainer: Trainer
    steps: list[dict[str, Tensor]] = field(default_factory=list)

    @property
    def graphs(self):
        return self.trainer._runner._graphs


def build(flags: dict, device: torch.device) -> Trainer:
    config = with_vocab_size(build_config(env={}, **MODEL | flags), 256)
    return Trainer(build_parts(config, ParallelContext(), device))


def train(
    flags: dict,
    device: torch.device,
    count: int,
    *,
    after: Callable[[Run], None] = lambda run: None,
    recorder: Callable[[torch.device], Recorder] = recorder_on,
) -> Run:
    """`count` steps; after: called behind each. recorder: of the graphs, if there are any."""
    run = Run(build(flags, device))
    if run.graphs is not None:
        run.graphs._recorder = recorder
    batches = run.trainer._training_batches()
    for _ in range(count):
        (record,) = run.trainer._profiled(batches, IntervalTimer())
        run.steps.append({"loss": record.loss.clone()} | left(run.trainer))
        after(run)
    return run


def left(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of all that a step leaves: gradients, masters, moments, weights, histories."""
    parts = trainer.parts
    found = {f"main_grad {name}": view for name, view in parts.optimizer.grads.state.views.items()}
    for owner in (parts.optimizer, parts.optimizer.weights, *([] if parts.scaling is None else [parts.scaling])):
        found |= {name: item.tensor for name, item in owner.state().items()}
    return {name: value.detach().clone() for name, value in found.items()}


def differing(a: Run, b: Run) -> list[str]:
    """`step: name` of everything that has other bits in one run than in the other."""
    assert len(a.steps) == len(b.steps)
    found = []
    for number, (x, y) in enumerate(zip(a.steps, b.steps, strict=True), 1):
        assert x.keys() == y.keys()
        found += [f"{number}: {name}" for name in x if not same_bits(x[name], y[name])]
    return found


def same_bits(a: Tensor, b: Tensor) -> bool:
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    a, b = (x.contiguous().view(kinds[x.element_size()]) for x in (a, b))
    return torch.equal(a, b)


def addresses(trainer: Trainer) -> dict[str, int]:
    """Where lies what graphs read and write: weights, their copies and amaxes, gradients, histories."""
    parts, found = trainer.parts, {}
    for name, param in parts.optimizer.weights.params.items():
        found[name] = param.data_ptr()
        owner = getattr(param, "owner", None)
        if name.startswith("layers.") and owner is not None and owner.recipe is not None:
            scale = None if owner.history_name is None else parts.scaling.scale(owner.history_name)
            copies = {gemm: owner.operand(gemm, scale) for gemm in ("fprop", "dgrad")}
            found |= {f"{name} {gemm}": copy.data.data_ptr() for gemm, copy in copies.items()}
            found |= {f"{name} {gemm} scales": copy.scale_inv.data_ptr() for gemm, copy in copies.items()}
            if owner.history_name is not None:
                found[f"{name} amax"] = owner.amax(scale).data_ptr()
    found |= {f"main_grad {name}": view.data_ptr() for name, view in parts.optimizer.grads.state.views.items()}
    if parts.scaling is not None:
        found |= {f"scale {name}": parts.scaling.scale(name).data_ptr() for name in parts.scaling.names()}
        found["history"] = parts.scaling.pending().data_ptr()
    return found
