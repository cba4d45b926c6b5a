"""Jobs whose traffic is counted, each small: name -> (world size, rank, flags)."""

BASE = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "train_iters": 3,
    "lr": 1e-3,
    "bf16": True,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 255,
    "device": "cpu",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "eval_iters": 0,
    "log_interval": 100,
}
VOCABULARY = 256
LLAMA = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "untie_embeddings_and_output_weights": True,
}
MOE = LLAMA | {
    "num_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_force_load_balancing": True,
    "moe_aux_loss_coeff": (1e-2,),
}
MLA = LLAMA | {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
    "qk_layernorm": True,
}
SHARED, GATE = {"moe_shared_expert_intermediate_size": 64}, {"moe_shared_expert_gate": True}
TP, CP, EP = {"tensor_model_parallel_size": 2}, {"context_parallel_size": 2}, {"expert_model_parallel_size": 2}
PP, SP = {"pipeline_model_parallel_size": 2}, TP | {"sequence_parallel": True}
ZERO, APART = {"use_distributed_optimizer": True}, {"expert_tensor_parallel_size": 1}
BLOCKWISE, TENSORWISE = {"fp8_format": "e4m3"}, {"fp8_format": "hybrid"}
DELAYED, MXFP8 = TENSORWISE | {"fp8_recipe": "delayed"}, BLOCKWISE | {"fp8_recipe": "mxfp8"}
RECIPES = {"bf16": {}, "blockwise": BLOCKWISE, "tensorwise": TENSORWISE, "delayed": DELAYED, "mxfp8": MXFP8}
ALIGNED = {"hidden_size": 256, "ffn_hidden_size": 512, "seq_length": 256, "max_position_embeddings": 256}
SMALL = {"hidden_size": 512, "ffn_hidden_size": 4096, "seq_length": 1024, "max_position_embeddings": 1024}
SMALL |= {"num_layers": 1, "global_batch_size": 2}  # on two tensor-parallel ranks qkv is slower in FP8, fc1 and fc2 not
FP8_WIRE = {"moe_fp8_dispatch": True, "moe_fp8_combine_grad": True}
DEEPSEEK = MLA | MOE | SP | EP | APART | SHARED | ZERO | {
    "num_layers": 6,
    "global_batch_size": 8,
    "moe_layer_freq": "[0]*1+[1]*5",
    "pipeline_model_parallel_size": 4,
    "pipeline_model_parallel_layout": "Et|tt|tt|tmL",
    "mtp_num_layers": 1,
    "moe_per_layer_logging": True,
}  # fmt: skip


def selective(*modules: str) -> dict:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


FULL = {
    "uniform": {"recompute_granularity": "full"},
    "uniform 2": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "block": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}


def _cases() -> dict[str, tuple[int, int, dict]]:
    found = {
        "overlapped, BF16 gradients": (
            8, 0, SP | ZERO | BLOCKWISE | {
                "overlap_grad_reduce": True, "overlap_param_gather": True, "grad_reduce_in_bf16": True,
                "log_num_zeros_in_grad": True, "log_params_norm": True,
            },
        ),
        "FP32 scales": (2, 0, SP | LLAMA | ALIGNED | BLOCKWISE | {"fp8_power_of_two_scales": False}),
        "primary, cut": (4, 0, SP | ZERO | TENSORWISE | LLAMA | {"fp8_param_gather": True}),
        "state in FP8": (2, 0, LLAMA | ZERO | {
            "use_precision_aware_optimizer": True, "store_param_remainders": True, "exp_avg_dtype": "fp8",
        }),
        "loss in parts": (2, 0, SP | BLOCKWISE | {"cross_entropy_chunks": 3}),
        "loss in parts, prediction": (2, 0, TP | MLA | {"cross_entropy_chunks": 2, "mtp_num_layers": 1}),
        "biases": (2, 0, SP | TENSORWISE | {"squared_relu": True}),
        "BF16 among FP8": (2, 1, SP | LLAMA | TENSORWISE | {"keep_modules_in_bf16": ("*.fc2",)}),
        "BF16 where FP8 is slow": (2, 0, SP | LLAMA | ZERO | SMALL | BLOCKWISE | {"fp8_param_gather": True}),
        "contexts, gathered": (2, 0, CP),
        "contexts, ring": (2, 1, CP | {"cp_comm_type": ("p2p",)} | selective("core_attn")),
        "four axes": (8, 5, CP | SP | ZERO | TENSORWISE | LLAMA),
        "pipeline, tied, first": (2, 0, PP),
        "pipeline, tied, last": (2, 1, PP | BLOCKWISE),
        "pipeline, interleaved": (2, 1, PP | LLAMA | {
            "num_layers": 4, "num_layers_per_virtual_pipeline_stage": 1,
        }),
        "pipeline, zero-bubble": (2, 0, PP | LLAMA | BLOCKWISE | {"pipeline_schedule": "zero-bubble"}),
        "experts, apart": (4, 0, MOE | SP | EP | APART | SHARED | GATE | BLOCKWISE | FP8_WIRE),
        "experts, apart, one by one": (4, 1, MOE | SP | EP | TENSORWISE),
        "experts, in place": (2, 0, MOE | SP | SHARED | GATE | BLOCKWISE),
        "experts, in place, whole tokens": (2, 0, MOE | TP | DELAYED),
        "experts, gathered": (4, 0, MOE | EP | SHARED | ZERO | BLOCKWISE | {
            "moe_fp8_dispatch": True, "moe_token_dispatcher_type": "allgather", "moe_shared_expert_overlap": True,
        }),
        "experts, all losses": (4, 3, MOE | EP | PP | {
            "moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "global_aux_loss"),
            "moe_aux_loss_coeff": (0.1, 0.1, 0.1), "moe_z_loss_coeff": 1e-3, "moe_per_layer_logging": True,
            "num_layers": 4, "moe_layer_freq": "[0]*1+[1]*3",
        }),
        "experts and contexts": (4, 0, MOE | EP | CP | MXFP8),
        "experts, capacity": (2, 0, MOE | EP | {"moe_expert_capacity_factor": 1.5}),
        "experts, filled up": (2, 0, MOE | EP | {
            "moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True,
        }),
        "experts, uneven": (4, 1, MOE | EP | SP | APART | {"num_experts": 6, "moe_router_topk": 3}),
        "latent attention": (2, 0, MLA | SP | BLOCKWISE),
        "latent attention, contexts, prediction": (4, 1, MLA | TP | CP | {"q_lora_rank": None, "mtp_num_layers": 2}),
        "prediction, recomputed": (4, 2, MLA | SP | CP | BLOCKWISE | FULL["uniform"] | {"mtp_num_layers": 1}),
    }  # fmt: skip
    for name, recipe in RECIPES.items():
        found[f"tensor parallel, {name}"] = (2, 0, TP | recipe)
        found[f"sequence parallel, {name}"] = (2, 1, SP | LLAMA | recipe)
        found[f"in chunks, {name}"] = (2, 1, SP | LLAMA | ALIGNED | recipe | {"tp_comm_overlap": True})
        if recipe:
            found[f"primary, {name}"] = (2, 0, ZERO | LLAMA | recipe | {"fp8_param_gather": True})
    for stage in range(4):
        found[f"DeepSeek-V3's kind, stage {stage}"] = (
            16, 4 * stage, DEEPSEEK | BLOCKWISE | selective("mla_up_proj", "layernorm", "moe_act"),
        )  # fmt: skip
    for name, recompute in FULL.items():
        found[f"layers again, {name}"] = (4, 0, SP | CP | LLAMA | TENSORWISE | recompute)
        found[f"layers with experts again, {name}"] = (4, 0, MOE | EP | SP | APART | recompute)
        found[f"layers with shared experts again, {name}"] = (2, 0, MOE | SP | SHARED | BLOCKWISE | recompute)
    for modules in (("core_attn",), ("layernorm",), ("mlp",)):
        found[f"again: {modules}"] = (4, 0, SP | CP | LLAMA | TENSORWISE | selective(*modules))
        found[f"again with biases: {modules}"] = (2, 0, SP | BLOCKWISE | selective(*modules))
    for modules in (("moe",), ("shared_experts",), ("moe_act",), ("moe", "shared_experts")):
        found[f"again: {modules}"] = (4, 0, MOE | EP | SP | APART | SHARED | BLOCKWISE | selective(*modules))
        if "shared_experts" not in modules:
            found[f"again without shared experts: {modules}"] = (4, 0, MOE | EP | CP | selective(*modules))
    for modules in (("mla_up_proj",), ("core_attn", "mla_up_proj"), ("layernorm",)):
        found[f"latent attention again: {modules}"] = (4, 0, MLA | SP | CP | TENSORWISE | selective(*modules))
    return found


CASES = _cases()
