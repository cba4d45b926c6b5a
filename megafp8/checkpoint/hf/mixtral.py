"""Mixtral: every layer's MLP is a mixture of experts, weighed by the softmax of the chosen logits."""

from __future__ import annotations

from typing import Any

from megafp8.checkpoint.hf.family import COMMON_RULES, Family, decoder_args, decoder_hf, window_args, window_hf
from megafp8.checkpoint.hf.layouts import STACKED
from megafp8.checkpoint.hf.llama import ATTENTION_RULES
from megafp8.checkpoint.hf.rules import Rule
from megafp8.checkpoint.hf.values import MAX_EXPERTS, Values
from megafp8.config import Config

MOE = "model.layers.{i}.block_sparse_moe"
EXPERT = f"{MOE}.experts.{{e}}"
RULES = (
    *COMMON_RULES,
    *ATTENTION_RULES,
    Rule("layers.{i}.mlp.router.weight", f"{MOE}.gate.weight"),
    Rule("layers.{i}.mlp.experts.{e}.fc1.weight", (f"{EXPERT}.w1.weight", f"{EXPERT}.w3.weight"), STACKED),
    Rule("layers.{i}.mlp.experts.{e}.fc2.weight", f"{EXPERT}.w2.weight"),
)


def _args(hf: Values) -> dict[str, Any]:
    args = decoder_args(hf, kv_heads=8, eps=1e-5, theta=1e6) | window_args(hf)
    return args | {
        "moe_ffn_hidden_size": args["ffn_hidden_size"],
        "num_experts": hf.integer("num_local_experts", 8, largest=MAX_EXPERTS),
        "moe_router_topk": hf.integer("num_experts_per_tok", 2),
    }


def _hf(config: Config) -> dict[str, Any]:
    m = config.model
    return decoder_hf(config) | window_hf(config) | {
        "intermediate_size": m.moe_ffn_hidden_size,
        "num_local_experts": m.num_experts,
        "num_experts_per_tok": m.moe_router_topk,
    }  # fmt: skip


MIXTRAL = Family("mixtral", "MixtralForCausalLM", RULES, _args, _hf)
