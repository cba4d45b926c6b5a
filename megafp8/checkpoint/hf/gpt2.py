"""GPT-2: LayerNorm, learned positions, GELU (its tanh form, or exact), biases; matrices are stored [in, out]."""

from __future__ import annotations

from typing import Any

from megafp8.checkpoint.hf.family import IGNORED, Family
from megafp8.checkpoint.hf.layouts import TURNED, TURNED_QKV
from megafp8.checkpoint.hf.rules import Rule
from megafp8.checkpoint.hf.values import MAX_LAYERS, Values
from megafp8.config import Config

LAYER = "transformer.h.{i}"
RULES = (
    Rule("embedding.word_embeddings.weight", "transformer.wte.weight"),
    Rule("embedding.position_embeddings.weight", "transformer.wpe.weight"),
    Rule("final_norm.{field}", "transformer.ln_f.{field}"),
    Rule("lm_head.weight", "lm_head.weight"),
    Rule("layers.{i}.input_norm.{field}", f"{LAYER}.ln_1.{{field}}"),
    Rule("layers.{i}.mlp_norm.{field}", f"{LAYER}.ln_2.{{field}}"),
    Rule("layers.{i}.attention.qkv.{field}", f"{LAYER}.attn.c_attn.{{field}}", TURNED_QKV),
    Rule("layers.{i}.attention.proj.{field}", f"{LAYER}.attn.c_proj.{{field}}", TURNED),
    Rule("layers.{i}.mlp.fc1.{field}", f"{LAYER}.mlp.c_fc.{{field}}", TURNED),
    Rule("layers.{i}.mlp.fc2.{field}", f"{LAYER}.mlp.c_proj.{{field}}", TURNED),
)
MASKS = (r"transformer\.h\.\d+\.attn\.(bias|masked_bias)",)


def _args(hf: Values) -> dict[str, Any]:
    hf.require("activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu", default="gelu_new")
    hf.require("scale_attn_weights", True, default=True)
    hf.require("scale_attn_by_inverse_layer_idx", False, default=False)
    hf.require("add_cross_attention", False, default=False)
    hidden = hf.integer("n_embd", 768)
    return {
        "num_layers": hf.integer("n_layer", 12, largest=MAX_LAYERS),
        "hidden_size": hidden,
        "ffn_hidden_size": hf.integer("n_inner", 4 * hidden),
        "num_attention_heads": hf.integer("n_head", 12),
        "max_position_embeddings": hf.integer("n_positions", 1024),
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "norm_epsilon": hf.number("layer_norm_epsilon", 1e-5),
        "bias_gelu_fusion": hf.text("activation_function", "gelu_new") != "gelu",
        "untie_embeddings_and_output_weights": not hf.flag("tie_word_embeddings", True),
    }


def _hf(config: Config) -> dict[str, Any]:
    m = config.model
    return {
        "activation_function": "gelu_new" if m.bias_gelu_fusion else "gelu",
        "n_embd": m.hidden_size,
        "n_inner": m.ffn_hidden_size,
        "n_layer": m.num_layers,
        "n_head": m.num_attention_heads,
        "n_positions": m.max_position_embeddings,
        "layer_norm_epsilon": m.norm_epsilon,
        "resid_pdrop": m.hidden_dropout,
        "embd_pdrop": m.hidden_dropout,
        "attn_pdrop": m.attention_dropout,
    }


GPT2 = Family("gpt2", "GPT2LMHeadModel", RULES, _args, _hf, ignored=IGNORED + MASKS, stem="transformer.")
