"""Flags of Megatron-LM that do nothing in a given combination: one log line each, as data."""

from collections.abc import Callable
from dataclasses import dataclass

from megafp8.config.config import Config, flag_of
from megafp8.config.pipeline import chunks_per_rank


@dataclass(frozen=True)
class Idle:
    """Fields that have no effect when `applies` holds, and why."""

    names: tuple[str, ...]
    applies: Callable[[Config], bool]
    why: str


TOKENIZER_RULES = (
    Idle(
        ("vocab_file", "merge_file"),
        lambda c: c.data.tokenizer_type != "GPT2BPETokenizer",
        "only GPT2BPETokenizer reads it",
    ),
    Idle(
        ("tokenizer_model",),
        lambda c: c.data.tokenizer_type in ("GPT2BPETokenizer", "ByteTokenizer", "NullTokenizer"),
        "this --tokenizer-type reads no model",
    ),
    Idle(
        ("tiktoken_pattern", "tiktoken_num_special_tokens", "tiktoken_special_tokens"),
        lambda c: c.data.tokenizer_type != "TikTokenizer",
        "only TikTokenizer reads it",
    ),
)
"""Of flags that the data tools have, too."""
IDLE = (
    Idle(
        ("rotary_base", "rotary_percent", "rotary_seq_len_interpolation_factor"),
        lambda c: c.model.position_embedding_type != "rope",
        "positions are not rotary",
    ),
    Idle(
        ("rope_type",),
        lambda c: c.model.position_embedding_type != "rope",
        "positions are not rotary",
    ),
    Idle(
        ("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale")
        + ("mscale_all_dim",),
        lambda c: c.model.rope_type != "yarn",
        "without --rope-type yarn",
    ),
    Idle(
        ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "latent_norm_epsilon"),
        lambda c: not c.model.multi_latent_attention,
        "without --multi-latent-attention",
    ),
    Idle(
        ("kv_channels",),
        lambda c: c.model.multi_latent_attention,
        "latent attention has --qk-head-dim, --qk-pos-emb-head-dim and --v-head-dim",
    ),
    Idle(("rotary_interleaved",), lambda c: c.model.multi_latent_attention, "latent attention always interleaves"),
    Idle(
        (
            *("moe_layer_freq", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
            *("moe_router_topk", "moe_router_score_function", "moe_router_pre_softmax", "moe_router_num_groups"),
            *("moe_router_group_topk", "moe_router_topk_scaling_factor", "moe_router_dtype", "moe_z_loss_coeff"),
            *("moe_router_enable_expert_bias", "moe_router_bias_update_rate", "moe_router_load_balancing_type"),
            *("moe_aux_loss_coeff", "moe_expert_capacity_factor", "moe_token_drop_policy", "moe_per_layer_logging"),
            *("moe_pad_expert_input_to_capacity", "moe_router_force_load_balancing", "moe_router_group_scores"),
        ),
        lambda c: c.model.num_experts is None,
        "without --num-experts",
    ),
    Idle(
        ("moe_router_pre_softmax",),
        lambda c: c.model.num_experts is not None and c.model.moe_router_score_function != "softmax",
        "scores are not a softmax",
    ),
    Idle(
        ("moe_router_score_function", "moe_router_pre_softmax", "moe_router_topk_scaling_factor"),
        lambda c: c.model.num_experts is not None and "sinkhorn" in c.model.moe_router_load_balancing_type,
        "sinkhorn has weights of its own",
    ),
    Idle(
        ("moe_token_drop_policy",),
        lambda c: c.model.num_experts is not None and c.model.moe_expert_capacity_factor is None,
        "without --moe-expert-capacity-factor",
    ),
    Idle(
        ("moe_router_bias_update_rate",),
        lambda c: c.model.num_experts is not None and not c.model.moe_router_enable_expert_bias,
        "without --moe-router-enable-expert-bias",
    ),
    Idle(
        ("bias_gelu_fusion",),
        lambda c: c.model.swiglu or c.model.squared_relu or not c.model.add_bias_linear,
        "GELU without biases is exact already, and other activations are no GELU",
    ),
    Idle(("mtp_loss_scaling_factor",), lambda c: not c.model.mtp_num_layers, "without --mtp-num-layers"),
    Idle(("rope_scaling_factor",), lambda c: not c.model.use_rope_scaling, "without --use-rope-scaling"),
    Idle(
        ("sequence_parallel", "tp_comm_overlap"),
        lambda c: c.parallel.tensor_model_parallel_size == 1,
        "tensor-parallel size is 1",
    ),
    Idle(
        (
            *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
            *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
            *("microbatch_group_size_per_vp_stage", "pipeline_model_parallel_layout"),
            *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"),
        ),
        lambda c: c.parallel.pipeline_model_parallel_size == 1,
        "there is one pipeline stage",
    ),
    Idle(
        ("microbatch_group_size_per_vp_stage",),
        lambda c: c.parallel.pipeline_model_parallel_size > 1 and chunks_per_rank(c.model, c.parallel) == 1,
        "stages are not interleaved",
    ),
    Idle(
        ("moe_flex_dispatcher_backend",),
        lambda c: c.parallel.moe_token_dispatcher_type != "flex",
        "--moe-token-dispatcher-type is not flex",
    ),
    Idle(("cp_comm_type",), lambda c: c.parallel.context_parallel_size == 1, "context-parallel size is 1"),
    Idle(
        ("cuda_graph_modules", "cuda_graph_warmup_steps"),
        lambda c: c.train.cuda_graph_impl == "none",
        "without --cuda-graph-impl local",
    ),
    Idle(("distributed_backend",), lambda c: c.train.device == "cpu", "--device cpu always uses gloo"),
    Idle(
        ("lr_wsd_decay_style", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        lambda c: c.optimizer.lr_decay_style != "WSD",
        "--lr-decay-style is not WSD",
    ),
    Idle(
        ("save_interval", "save_retain_interval", "no_save_optim", "no_save_rng", "async_save"),
        lambda c: c.checkpoint.save is None,
        "without --save",
    ),
    Idle(
        ("no_load_optim", "no_load_rng", "finetune", "ckpt_step")
        + ("load_fallback", "load_narrowing", "dist_ckpt_strictness"),
        lambda c: c.checkpoint.load is None,
        "without --load",
    ),
    Idle(("split",), lambda c: c.data.mock_data, "--mock-data has all splits"),
    Idle(("data_cache_path",), lambda c: c.data.mock_data, "--mock-data needs no indices"),
    *TOKENIZER_RULES,
    Idle(
        ("timing_log_option", "log_timers_to_tensorboard"),
        lambda c: c.logging.timing_log_level == 0,
        "--timing-log-level 0 measures no phases",
    ),
    Idle(
        (
            *("profile_step_start", "profile_step_end", "profile_ranks", "use_pytorch_profiler"),
            *("pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack"),
        ),
        lambda c: not c.logging.profile,
        "without --profile",
    ),
    Idle(
        ("wandb_exp_name", "wandb_entity", "wandb_save_dir"),
        lambda c: not c.logging.wandb_project,
        "without --wandb-project",
    ),
)


def idle_notes(config: Config) -> list[str]:
    """Returns a log line per given flag that has no effect in this configuration."""
    return [
        f"{flag_of(name)}: no effect ({rule.why})"
        for rule in IDLE
        for name in rule.names
        if config.is_given(name) and rule.applies(config)
    ]
