"""Llama 2 and 3, Mistral, and Qwen2, which is a Llama with biases on q, k and v."""

from __future__ import annotations

from typing import Any

from megafp8.checkpoint.hf.family import COMMON_RULES, Family, decoder_args, decoder_hf, window_args, window_hf
from megafp8.checkpoint.hf.layouts import QKV, STACKED
from megafp8.checkpoint.hf.rules import Rule
from megafp8.checkpoint.hf.values import Values
from megafp8.config import Config

ATTENTION = "model.layers.{i}.self_attn"
MLP = "model.layers.{i}.mlp"
ATTENTION_RULES = (
    Rule("layers.{i}.attention.qkv.{field}", tuple(f"{ATTENTION}.{x}_proj.{{field}}" for x in "qkv"), QKV),
    Rule("layers.{i}.attention.proj.{field}", f"{ATTENTION}.o_proj.{{field}}"),
)
MLP_RULES = (
    Rule("layers.{i}.mlp.fc1.{field}", (f"{MLP}.gate_proj.{{field}}", f"{MLP}.up_proj.{{field}}"), STACKED),
    Rule("layers.{i}.mlp.fc2.{field}", f"{MLP}.down_proj.{{field}}"),
)
RULES = COMMON_RULES + ATTENTION_RULES + MLP_RULES


def _llama_args(hf: Values) -> dict[str, Any]:
    attention, mlp = hf.flag("attention_bias", False), hf.flag("mlp_bias", False)
    if attention != mlp:
        raise ValueError(
            f"{hf.where}: 'attention_bias' {attention} with 'mlp_bias' {mlp}: linears here have biases all together, "
            "or only q, k and v (model_type qwen2)"
        )
    return decoder_args(hf) | {"add_bias_linear": attention}


def _llama_hf(config: Config) -> dict[str, Any]:
    bias = config.model.add_bias_linear
    return decoder_hf(config) | {"attention_bias": bias, "mlp_bias": bias}


def _mistral_args(hf: Values) -> dict[str, Any]:
    return decoder_args(hf, kv_heads=8) | window_args(hf)


def _mistral_hf(config: Config) -> dict[str, Any]:
    return decoder_hf(config) | window_hf(config)


def _qwen2_args(hf: Values) -> dict[str, Any]:
    hf.require("use_sliding_window", False, default=False)
    return decoder_args(hf, kv_heads=32) | {"add_qkv_bias": True}


def _qwen2_hf(config: Config) -> dict[str, Any]:
    return decoder_hf(config) | {"use_sliding_window": False}


LLAMA = Family("llama", "LlamaForCausalLM", RULES, _llama_args, _llama_hf)
MISTRAL = Family("mistral", "MistralForCausalLM", RULES, _mistral_args, _mistral_hf)
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", RULES, _qwen2_args, _qwen2_hf)
