"""Small random models of transformers' families, each with our configuration and the mapping of weights by hand."""

from dataclasses import dataclass, replace

import pytest
import torch

from megafp8.config.model import ModelConfig
from tests.core.helpers import LLAMA, VOCAB

QUICK_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}


@dataclass(frozen=True)
class Family:
    """name: transformers' prefix, e.g. "Mixtral". model: our configuration. options: of theirs, beside the common."""

    name: str
    model: ModelConfig
    options: dict

    def build(self, seed: int = 0) -> torch.nn.Module:
        """Their model, with random weights everywhere."""
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(seed)
        m = self.model
        common = {
            "vocab_size": VOCAB,
            "hidden_size": m.hidden_size,
            "intermediate_size": m.ffn_hidden_size,
            "num_hidden_layers": m.num_layers,
            "num_attention_heads": m.num_attention_heads,
            "num_key_value_heads": m.num_query_groups,
            "rms_norm_eps": m.norm_epsilon,
            "max_position_embeddings": m.max_position_embeddings,
            "rope_parameters": {"rope_type": "default", "rope_theta": m.rotary_base},
            "tie_word_embeddings": not m.untie_embeddings_and_output_weights,
            "initializer_range": 0.2,
        }
        config = getattr(transformers, f"{self.name}Config")(**common | self.options)
        model = getattr(transformers, f"{self.name}ForCausalLM")(config)
        with torch.no_grad():
            for tensor in (*model.parameters(), *(b for name, b in model.named_buffers() if "bias" in name)):
                tensor.add_(torch.randn_like(tensor) * 0.1)
        return model.eval()

    def mapped(self, value) -> dict[str, torch.Tensor]:
        """Our names -> tensors; `value(name)` gives one of theirs."""
        m = self.model
        found = {
            "embedding.word_embeddings.weight": value("model.embed_tokens.weight"),
            "final_norm.weight": value("model.norm.weight"),
        }
        if m.untie_embeddings_and_output_weights:
            found["lm_head.weight"] = value("lm_head.weight")
        for i, experts in enumerate(m.moe_layers):
            ours, theirs = f"layers.{i}", f"model.layers.{i}"
            found[f"{ours}.input_norm.weight"] = value(f"{theirs}.input_layernorm.weight")
            found[f"{ours}.mlp_norm.weight"] = value(f"{theirs}.post_attention_layernorm.weight")
            attention = _latent_attention if m.multi_latent_attention else _attention
            found |= attention(m, f"{ours}.attention", f"{theirs}.self_attn", value)
            mlp = _experts if experts else _mlp
            found |= mlp(m, f"{ours}.mlp", f"{theirs}.mlp", value)
        return found


def fused_qkv(q, k, v, groups):
    """Rows of all heads' q, k and v -> our order: each group's query heads, then its key, then its value."""
    parts = (x.view(groups, -1, *x.shape[1:]) for x in (q, k, v))
    return torch.cat(list(parts), 1).flatten(0, 1)


def _attention(m, ours, theirs, value):
    found = {f"{ours}.proj.weight": value(f"{theirs}.o_proj.weight")}
    for field in ("weight", "bias") if m.add_qkv_bias else ("weight",):
        q, k, v = (value(f"{theirs}.{x}_proj.{field}") for x in "qkv")
        found[f"{ours}.qkv.{field}"] = fused_qkv(q, k, v, m.num_query_groups)
    if m.qk_layernorm:
        found |= {f"{ours}.{x}_norm.weight": value(f"{theirs}.{x}_norm.weight") for x in "qk"}
    return found


def _latent_attention(m, ours, theirs, value):
    names = {
        "kv_down": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm",
        "kv_up": "kv_b_proj",
        "proj": "o_proj",
    }
    names |= {"q_proj": "q_proj"} if m.q_lora_rank is None else {}
    names |= {} if m.q_lora_rank is None else {"q_down": "q_a_proj", "q_norm": "q_a_layernorm", "q_up": "q_b_proj"}
    return {f"{ours}.{a}.weight": value(f"{theirs}.{b}.weight") for a, b in names.items()}


def _mlp(m, ours, theirs, value):
    gate_up = [value(f"{theirs}.{x}_proj.weight") for x in ("gate", "up")]
    return {f"{ours}.fc1.weight": torch.cat(gate_up), f"{ours}.fc2.weight": value(f"{theirs}.down_proj.weight")}


def _experts(m, ours, theirs, value):
    found = {f"{ours}.router.weight": value(f"{theirs}.gate.weight")}
    fc1, fc2 = value(f"{theirs}.experts.gate_up_proj"), value(f"{theirs}.experts.down_proj")
    for e in range(m.num_experts):
        found[f"{ours}.experts.{e}.fc1.weight"], found[f"{ours}.experts.{e}.fc2.weight"] = fc1[e], fc2[e]
    if m.moe_shared_expert_gate:
        found |= _mlp(m, f"{ours}.shared_experts", f"{theirs}.shared_expert", value)
        found[f"{ours}.shared_experts.gate.weight"] = value(f"{theirs}.shared_expert_gate.weight")
    elif m.moe_shared_expert_intermediate_size:
        found |= _mlp(m, f"{ours}.shared_experts", f"{theirs}.shared_experts", value)
    return found


MOE = replace(LLAMA, num_experts=8, moe_ffn_hidden_size=24, moe_router_topk=2)
QWEN2_MOE = replace(
    MOE,
    add_qkv_bias=True,
    moe_router_pre_softmax=True,
    moe_shared_expert_intermediate_size=40,
    moe_shared_expert_gate=True,
)
DEEPSEEK = replace(
    MOE,
    num_layers=3,
    norm_epsilon=1e-5,
    latent_norm_epsilon=1e-6,  # theirs, whatever rms_norm_eps says
    num_query_groups=4,
    multi_latent_attention=True,
    qk_layernorm=True,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=10,
    moe_layer_freq="[0]+[1]*2",
    moe_router_topk=4,
    moe_router_score_function="sigmoid",
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.5,
    moe_router_enable_expert_bias=True,
    moe_shared_expert_intermediate_size=48,
)
QWEN_MOE_OPTIONS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DEEPSEEK_OPTIONS = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "moe_intermediate_size": 24,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 2,
}
FAMILIES = {
    "llama, yarn": Family(
        "Llama",
        replace(LLAMA, rope_type="yarn", rotary_scaling_factor=4.0, original_max_position_embeddings=8),
        {"rope_parameters": QUICK_YARN, "head_dim": 8},
    ),
    "llama, llama3 rope": Family(
        "Llama",
        replace(LLAMA, use_rope_scaling=True, rope_scaling_factor=8.0, rotary_base=500000.0),
        {
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "llama, linear rope": Family(
        "Llama",
        replace(LLAMA, rotary_seq_len_interpolation_factor=4),
        {"head_dim": 8, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral, window": Family("Mistral", replace(LLAMA, window_size="6,0"), {"sliding_window": 7, "head_dim": 8}),
    "qwen3": Family(
        "Qwen3",
        replace(LLAMA, qk_layernorm=True, kv_channels=16, norm_epsilon=1e-6, untie_embeddings_and_output_weights=False),
        {"head_dim": 16},
    ),
    "mixtral": Family("Mixtral", replace(MOE, moe_ffn_hidden_size=48), {"num_local_experts": 8, "head_dim": 8}),
    "qwen3 moe": Family(
        "Qwen3Moe",
        replace(MOE, qk_layernorm=True, moe_layer_freq="[0,1]"),
        QWEN_MOE_OPTIONS | {"head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [0]},
    ),
    "qwen3 moe, not normalized": Family(
        "Qwen3Moe",
        replace(MOE, qk_layernorm=True, moe_router_pre_softmax=True),
        QWEN_MOE_OPTIONS | {"head_dim": 8, "norm_topk_prob": False},
    ),
    "qwen2 moe, gated shared expert": Family(
        "Qwen2Moe", QWEN2_MOE, QWEN_MOE_OPTIONS | {"shared_expert_intermediate_size": 40, "norm_topk_prob": False}
    ),
    "deepseek v3": Family("DeepseekV3", DEEPSEEK, DEEPSEEK_OPTIONS),
    "deepseek v3, yarn, queries at once": Family(
        "DeepseekV3",
        replace(
            DEEPSEEK,
            q_lora_rank=None,
            rope_type="yarn",
            rotary_scaling_factor=4.0,
            original_max_position_embeddings=8,
            mscale=0.8,
            mscale_all_dim=0.7,
            moe_router_norm_topk_prob=False,
        ),
        DEEPSEEK_OPTIONS
        | {
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "rope_parameters": QUICK_YARN | {"mscale": 0.8, "mscale_all_dim": 0.7},
        },
    ),
}
