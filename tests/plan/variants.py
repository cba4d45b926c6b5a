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
VARIANTS = {
    "gpt2": {},
    "llama": LLAMA,
    "qwen": LLAMA | {"qk_layernorm": True, "kv_channels": 24, "untie_embeddings_and_output_weights": False},
    "qkv bias": LLAMA | {"add_qkv_bias": True},
    "one group": {"group_query_attention": True, "squared_relu": True},
    "wide heads": {"kv_channels": 48, "apply_layernorm_1p": True, "qk_layernorm": True},
    "odd width": LLAMA | {"ffn_hidden_size": 100},
}
