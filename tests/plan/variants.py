"""Kinds of small models, as the flags that make them."""

LLAMA = {
    "group_query_attention": True,
    "num_query_groups": 2,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
MOE = LLAMA | {"num_experts": 8, "moe_ffn_hidden_size": 96, "moe_aux_loss_coeff": (1e-2,)}
LATENT = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 24,
}
DEEPSEEK = LATENT | {
    "untie_embeddings_and_output_weights": True,
    "num_experts": 8,
    "moe_layer_freq": "[0]+[1]*2",
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 40,
    "moe_router_score_function": "sigmoid",
    "moe_router_topk": 4,
    "moe_router_num_groups": 4,
    "moe_router_group_topk": 2,
    "moe_router_enable_expert_bias": True,
    "mtp_num_layers": 2,
}
VARIANTS = {
    "gpt2": {},
    "llama": LLAMA,
    "qwen": LLAMA | {"qk_layernorm": True, "kv_channels": 24, "untie_embeddings_and_output_weights": False},
    "qkv bias": LLAMA | {"add_qkv_bias": True},
    "one group": {"group_query_attention": True, "squared_relu": True},
    "wide heads": {"kv_channels": 48, "apply_layernorm_1p": True, "qk_layernorm": True},
    "odd width": LLAMA | {"ffn_hidden_size": 100},
    "experts": MOE,
    "gated shared expert": MOE | {"moe_shared_expert_intermediate_size": 72, "moe_shared_expert_gate": True},
    "latent attention": LATENT,
    "latent attention, queries at once": LATENT | {"q_lora_rank": None, "qk_layernorm": False},
    "deepseek": DEEPSEEK,
    "prediction, tied": {"mtp_num_layers": 1},
}
