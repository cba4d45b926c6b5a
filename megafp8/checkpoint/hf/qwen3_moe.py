"""Qwen3-MoE: Qwen3 with a mixture of experts in all or some layers."""

from __future__ import annotations

from typing import Any

from megafp8.checkpoint.hf.family import Family
from megafp8.checkpoint.hf.layouts import STACKED
from megafp8.checkpoint.hf.llama import MLP
from megafp8.checkpoint.hf.qwen3 import QWEN3, qwen3_args, qwen3_hf
from megafp8.checkpoint.hf.rules import Rule
from megafp8.checkpoint.hf.values import MAX_EXPERTS, Values
from megafp8.config import Config

EXPERT = f"{MLP}.experts.{{e}}"
EXPERT_RULES = (
    Rule("layers.{i}.mlp.router.weight", f"{MLP}.gate.weight"),
    Rule("layers.{i}.mlp.experts.{e}.fc1.weight", (f"{EXPERT}.gate_proj.weight", f"{EXPERT}.up_proj.weight"), STACKED),
    Rule("layers.{i}.mlp.experts.{e}.fc2.weight", f"{EXPERT}.down_proj.weight"),
)


def _args(hf: Values) -> dict[str, Any]:
    args = qwen3_args(hf, kv_heads=4)
    experts = "num_experts" if "num_experts" in hf.content else "num_local_experts"
    return args | {
        "num_experts": hf.integer(experts, 128, largest=MAX_EXPERTS),
        "moe_ffn_hidden_size": hf.integer("moe_intermediate_size", 768),
        "moe_layer_freq": _layers(hf, args["num_layers"]),
        "moe_router_topk": hf.integer("num_experts_per_tok", 8),
        "moe_router_pre_softmax": not hf.flag("norm_topk_prob", False),
    }


def _layers(hf: Values, layers: int) -> str:
    """Which layers have experts, as --moe-layer-freq says it."""
    step, dense = hf.integer("decoder_sparse_step", 1), hf.content.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise ValueError(f"{hf.where}: 'mlp_only_layers' is no list of layer numbers")
    return "[" + ",".join(str(int(i not in dense and (i + 1) % step == 0)) for i in range(layers)) + "]"


def _hf(config: Config) -> dict[str, Any]:
    m = config.model
    return qwen3_hf(config) | {
        "num_experts": m.num_experts,
        "moe_intermediate_size": m.moe_ffn_hidden_size,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, experts in enumerate(m.moe_layers) if not experts],
        "num_experts_per_tok": m.moe_router_topk,
        "norm_topk_prob": not m.moe_router_pre_softmax,
    }


QWEN3_MOE = Family("qwen3_moe", "Qwen3MoeForCausalLM", QWEN3.rules + EXPERT_RULES, _args, _hf)
