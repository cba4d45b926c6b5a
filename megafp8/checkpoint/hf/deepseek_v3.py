"""DeepSeek-V3: latent attention, dense layers first, then experts chosen by sigmoid scores within groups, and a bias.

Multi-token prediction lies under the layer numbers after the last; transformers doesn't read it. Its copies of the
embedding and of the LM head are not read, and not written: both are the model's own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from megafp8.checkpoint.hf.family import COMMON_RULES, IGNORED, Family, decoder_args, decoder_hf
from megafp8.checkpoint.hf.layouts import STACKED
from megafp8.checkpoint.hf.llama import ATTENTION, MLP, MLP_RULES
from megafp8.checkpoint.hf.qwen3_moe import EXPERT_RULES
from megafp8.checkpoint.hf.rules import Rule
from megafp8.checkpoint.hf.values import MAX_EXPERTS, Values
from megafp8.config import Config

SHARED = f"{MLP}.shared_experts"
ATTENTION_NAMES = {
    "q_proj": "q_proj",
    "q_down": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "proj": "o_proj",
}
LAYER_RULES = (
    *(rule for rule in COMMON_RULES if rule.ours.startswith("layers.")),
    *(
        Rule(f"layers.{{i}}.attention.{ours}.weight", f"{ATTENTION}.{theirs}.weight")
        for ours, theirs in ATTENTION_NAMES.items()
    ),
    *MLP_RULES,
    *EXPERT_RULES,
    Rule("layers.{i}.mlp.router.expert_bias", f"{MLP}.gate.e_score_correction_bias"),
    Rule(
        "layers.{i}.mlp.shared_experts.fc1.weight", (f"{SHARED}.gate_proj.weight", f"{SHARED}.up_proj.weight"), STACKED
    ),
    Rule("layers.{i}.mlp.shared_experts.fc2.weight", f"{SHARED}.down_proj.weight"),
)
DEPTH = "model.layers.{mtp}"
DEPTH_RULES = (
    Rule("mtp.{k}.embedding_norm.weight", f"{DEPTH}.enorm.weight"),
    Rule("mtp.{k}.hidden_norm.weight", f"{DEPTH}.hnorm.weight"),
    Rule("mtp.{k}.eh_proj.weight", f"{DEPTH}.eh_proj.weight"),
    Rule("mtp.{k}.final_norm.weight", f"{DEPTH}.shared_head.norm.weight"),
)


def _at_depth(rule: Rule) -> Rule:
    """The rule of a layer, for the layer of a prediction depth."""
    names = (rule.theirs,) if isinstance(rule.theirs, str) else rule.theirs
    theirs = tuple(name.replace("model.layers.{i}", DEPTH) for name in names)
    return replace(rule, ours=rule.ours.replace("layers.{i}", "mtp.{k}.layer"), theirs=theirs)


RULES = (
    *(rule for rule in COMMON_RULES if not rule.ours.startswith("layers.")),
    *LAYER_RULES,
    *DEPTH_RULES,
    *(_at_depth(rule) for rule in LAYER_RULES),
)


def _args(hf: Values) -> dict[str, Any]:
    hf.require("attention_bias", False, default=False)
    hf.require("rope_interleave", True, default=True)
    hf.require("scoring_func", "sigmoid", default="sigmoid")
    hf.require("topk_method", "noaux_tc", default="noaux_tc")
    width, shared = hf.integer("moe_intermediate_size", 2048), hf.count("n_shared_experts")
    args = decoder_args(hf)
    args |= {"group_query_attention": False, "num_query_groups": None, "kv_channels": None}
    dense = min(hf.count("first_k_dense_replace"), args["num_layers"])
    args |= {
        "multi_latent_attention": True,
        "latent_norm_epsilon": 1e-6,  # whatever rms_norm_eps says
        "qk_layernorm": True,
        "q_lora_rank": hf.integer("q_lora_rank", None),
        "kv_lora_rank": hf.integer("kv_lora_rank", 512),
        "qk_head_dim": hf.integer("qk_nope_head_dim", 128),
        "qk_pos_emb_head_dim": hf.integer("qk_rope_head_dim", 64),
        "v_head_dim": hf.integer("v_head_dim", 128),
        "num_experts": hf.integer("n_routed_experts", 256, largest=MAX_EXPERTS),
        "moe_layer_freq": f"[0]*{dense}+[1]*{args['num_layers'] - dense}",
        "moe_ffn_hidden_size": width,
        "moe_shared_expert_intermediate_size": width * shared if shared else None,
        "moe_router_topk": hf.integer("num_experts_per_tok", 8),
        "moe_router_score_function": "sigmoid",
        "moe_router_norm_topk_prob": hf.flag("norm_topk_prob", True),
        "moe_router_topk_scaling_factor": hf.number("routed_scaling_factor", 2.5),
        "moe_router_enable_expert_bias": True,
        "mtp_num_layers": hf.count("num_nextn_predict_layers") or None,
    }
    return args | _groups(hf, args["moe_router_topk"])


def _groups(hf: Values, topk: int) -> dict[str, Any]:
    """DeepSeek judges a group by its two best scores, whatever is chosen of it; Megatron-LM by top-k / groups."""
    groups, chosen = hf.integer("n_group", 1), hf.integer("topk_group", 1)
    if groups == 1:
        return {}
    found = {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}
    return found if topk == 2 * chosen else found | {"moe_router_group_scores": 2}


def _present(args: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """config.json may count prediction depths that the files, as transformers writes them, don't hold."""
    depths = args["mtp_num_layers"] or 0
    held = f"model.layers.{args['num_layers']}.eh_proj.weight" in names
    return args | {"mtp_num_layers": depths if depths and held else None}


def _hf(config: Config) -> dict[str, Any]:
    m = config.model
    width = m.moe_ffn_hidden_size or 1
    dense = [*m.moe_layers, True].index(True)
    return decoder_hf(config) | {
        "num_key_value_heads": m.num_attention_heads,
        "head_dim": m.qk_pos_emb_head_dim,
        "attention_bias": False,
        "q_lora_rank": m.q_lora_rank,
        "kv_lora_rank": m.kv_lora_rank,
        "qk_nope_head_dim": m.qk_head_dim,
        "qk_rope_head_dim": m.qk_pos_emb_head_dim,
        "v_head_dim": m.v_head_dim,
        "n_routed_experts": m.num_experts,
        "first_k_dense_replace": dense,
        "moe_intermediate_size": width,
        "n_shared_experts": (m.moe_shared_expert_intermediate_size or 0) // width,
        "num_experts_per_tok": m.moe_router_topk,
        "norm_topk_prob": m.moe_router_norm_topk_prob,
        "routed_scaling_factor": m.moe_router_topk_scaling_factor or 1.0,
        "n_group": m.moe_router_num_groups or 1,
        "topk_group": m.moe_router_group_topk or 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": m.mtp_num_layers or 0,
    }


COPIES = (r"model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight",)
DEEPSEEK_V3 = Family(
    "deepseek_v3", "DeepseekV3ForCausalLM", RULES, _args, _hf, ignored=IGNORED + COPIES, present=_present
)
