"""Limits of single values, as data: which flags are required, and how small or large their values may be.

Upper limits are far above what anybody trains: they turn a slip of the finger into a line instead of an overflow, or
of hours spent on building something that fits no machine.
"""

import math

from megafp8.config.config import Config, field_table, flag_of

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr")

AT_LEAST: dict[int, tuple[str, ...]] = {
    1: (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"),
        *("max_position_embeddings", "seq_length", "make_vocab_size_divisible_by", "vocab_size"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "wgrad_queue_mib"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size", "distributed_timeout_minutes"),
        *("micro_batch_size", "global_batch_size", "train_iters", "train_samples", "eval_interval"),
        *("exit_interval", "exit_duration_in_mins", "recompute_num_layers", "fp8_fallback_after"),
        *("cross_entropy_chunks", "cuda_graph_warmup_steps"),
        *("lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        *("save_interval", "save_retain_interval", "log_interval"),
        *("microbatch_group_size_per_vp_stage",),
        *("fp8_amax_history_len", "rotary_seq_len_interpolation_factor", "original_max_position_embeddings"),
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rotary_scaling_factor"),
        *("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_topk"),
        *("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_scores"),
    ),
    0: (
        *("lr", "min_lr", "lr_warmup_init", "lr_warmup_iters", "lr_warmup_samples", "decoupled_lr", "decoupled_min_lr"),
        *(
            "weight_decay",
            "start_weight_decay",
            "end_weight_decay",
            "clip_grad",
            "init_method_std",
            "eval_iters",
            "num_workers",
            "ckpt_step",
            "extra_vocab_size",
            "seed",
        ),
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp8_amax_epsilon", "fp8_monitor_interval"),
        *("fp8_fallback_for", "fp8_fallback_sqnr", "profile_step_start", "profile_step_end", "profile_ranks"),
        *("fp8_margin", "tiktoken_num_special_tokens", "mscale", "mscale_all_dim", "mtp_num_layers"),
        *("moe_router_bias_update_rate", "moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_loss_scaling_factor"),
    ),
}
AT_MOST: dict[int, tuple[str, ...]] = {
    100: ("fp8_margin",),  # in powers of two: beyond that FP32 scales underflow
    1024: ("num_workers", "mtp_num_layers"),
    10**5: ("num_layers", "num_experts", "num_attention_heads", "num_query_groups"),
    10**6: ("fp8_amax_history_len", "distributed_timeout_minutes"),
    10**7: (
        *("hidden_size", "ffn_hidden_size", "kv_channels", "q_lora_rank", "kv_lora_rank", "qk_head_dim"),
        *("qk_pos_emb_head_dim", "v_head_dim", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size"),
        *("make_vocab_size_divisible_by", "micro_batch_size", "global_batch_size"),
    ),
    2**31 - 1: (  # token ids and positions are 32-bit in files and kernels
        *("vocab_size", "extra_vocab_size", "seq_length", "max_position_embeddings", "tiktoken_num_special_tokens"),
    ),
    10**10: ("train_iters", "eval_iters"),
    10**12: ("train_samples",),
}
LARGEST_COUNT = 2**63 - 1
LARGEST, SMALLEST = 3.4e38, 1.2e-38
"""Of FP32's normal numbers: what a flag says is computed with in FP32."""
ABOVE_ZERO = (
    *("rotary_base", "rotary_percent", "rope_scaling_factor", "beta_fast", "beta_slow"),
    *("moe_router_topk_scaling_factor", "norm_epsilon", "latent_norm_epsilon", "adam_eps"),
    "moe_expert_capacity_factor",
)
BELOW_ONE = ("hidden_dropout", "attention_dropout", "adam_beta1", "adam_beta2", "lr_warmup_fraction")


def check_limits(config: Config) -> None:
    """Checks every flag on its own, before defaults are derived from it.

    Raises:
        ValueError: a required flag is missing, or a value is out of range.
    """
    for name in REQUIRED:
        if config.value(name) is None:
            raise ValueError(f"{flag_of(name)} is required")
    _check_ranges(config)


def _check_ranges(config: Config) -> None:
    for name in config.given:
        for item in _items(config, name):
            _check_representable(name, item)
    for low, names in AT_LEAST.items():
        for name in names:
            for item in _items(config, name):
                if item < low:
                    raise ValueError(f"{flag_of(name)} {item}: give {low} or more")
    for high, names in AT_MOST.items():
        for name in names:
            for item in _items(config, name):
                if item > high:
                    raise ValueError(f"{flag_of(name)} {item}: give {high} or less")
    for name in ABOVE_ZERO:
        for item in _items(config, name):
            if item <= 0:
                raise ValueError(f"{flag_of(name)} {item}: give more than 0")
            if item < SMALLEST:
                raise ValueError(f"{flag_of(name)} {item}: is 0 in FP32; give {SMALLEST} or more")
    for name in BELOW_ONE:
        value = config.value(name)
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"{flag_of(name)} {value}: give 0 or more, and less than 1")
    if config.model.rotary_percent > 1:
        raise ValueError(f"--rotary-percent {config.model.rotary_percent}: give 1.0 or less")


def _items(config: Config, name: str) -> list:
    """The values of a field: those of its tuple, or the one it has; none where it is None."""
    value = config.value(name)
    return [item for item in (value if isinstance(value, tuple) else (value,)) if item is not None]


def _check_representable(name: str, value: object) -> None:
    """Raises ValueError for numbers that FP32 or 64-bit integers can't hold, and for texts that name nothing."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{flag_of(name)} {value}: give a finite number")
    if isinstance(value, float) and abs(value) > LARGEST:
        raise ValueError(f"{flag_of(name)} {value}: is infinite in FP32; give {LARGEST} or less")
    if type(value) is int and value > LARGEST_COUNT:
        raise ValueError(f"{flag_of(name)} {value}: give {LARGEST_COUNT} or less")
    if isinstance(value, str) and value != field_table()[name][1].default and (not value.strip() or "\0" in value):
        raise ValueError(f"{flag_of(name)} {value!r}: the value is empty or has a NUL; give one, or leave the flag out")


def number(text: str) -> float | None:
    """Returns the number that `text` spells, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def plain(value: object) -> str:
    """Returns a value as it is typed on a command line."""
    return " ".join(str(item) for item in value) if isinstance(value, tuple | list) else str(value)
