"""Qwen3: a Llama whose queries and keys are normalized a head."""

from __future__ import annotations

from typing import Any

from megafp8.checkpoint.hf.family import Family, decoder_args, decoder_hf
from megafp8.checkpoint.hf.layouts import CHANNELS
from megafp8.checkpoint.hf.llama import ATTENTION, RULES
from megafp8.checkpoint.hf.rules import Rule
from megafp8.checkpoint.hf.values import Values
from megafp8.config import Config

NORM_RULES = tuple(
    Rule(f"layers.{{i}}.attention.{x}_norm.weight", f"{ATTENTION}.{x}_norm.weight", CHANNELS) for x in "qk"
)


def qwen3_args(hf: Values, kv_heads: int = 32) -> dict[str, Any]:
    """Fields that the dense and the mixture-of-experts models share. kv_heads: the class's default."""
    hf.require("use_sliding_window", False, default=False)
    hf.require("attention_bias", False, default=False)
    args = decoder_args(hf, kv_heads=kv_heads) | {"qk_layernorm": True}
    return args | {"kv_channels": hf.integer("head_dim", 128)}


def qwen3_hf(config: Config) -> dict[str, Any]:
    return decoder_hf(config) | {"attention_bias": False, "use_sliding_window": False}


QWEN3 = Family("qwen3", "Qwen3ForCausalLM", RULES + NORM_RULES, qwen3_args, qwen3_hf)
