"""Limits of single values, as data: which flags are required, and how small or large their values may be."""

import math

from megafp8.config.config import Config, flag_of

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size", "lr")

AT_LEAST: dict[int, tuple[str, ...]] = {
    1: (
        *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels", "num_query_groups"),
        *("max_position_embeddings", "seq_length", "make_vocab_size_divisible_by", "vocab_size"),
        *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        *("num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank", "wgrad_queue_mib"),
        *("expert_model_parallel_size", "expert_tensor_parallel_size", "distributed_timeout_minutes"),
        *("micro_batch_size", "global_batch_size", "train_iters", "train_samples", "eval_interval"),
        *("exit_interval", "exit_duration_in_mins", "iterations_to_skip", "recompute_num_layers"),
        *("lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
        *("save_interval", "save_retain_interval", "log_interval"),
        *("fp8_amax_history_len", "rotary_seq_len_interpolation_factor", "original_max_position_embeddings"),
        *("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rotary_scaling_factor"),
        *("num_experts", "moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_router_topk"),
        *("moe_router_num_groups", "moe_router_group_topk"),
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
            "extra_vocab_size",
            "seed",
        ),
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16", "fp8_amax_epsilon", "fp8_monitor_interval"),
        *("fp8_margin", "tiktoken_num_special_tokens", "mscale", "mscale_all_dim", "mtp_num_layers"),
        *("moe_router_bias_update_rate", "moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_loss_scaling_factor"),
    ),
}
ABOVE_ZERO = (
    *("rotary_base", "rotary_percent", "rope_scaling_factor", "beta_fast", "beta_slow"),
    *("moe_router_topk_scaling_factor", "norm_epsilon", "adam_eps"),
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
    for _, name, value in config.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{flag_of(name)} {value}: give a finite number")
    for low, names in AT_LEAST.items():
        for name in names:
            value = config.value(name)
            for item in value if isinstance(value, tuple) else (value,):
                if item is not None and item < low:
                    raise ValueError(f"{flag_of(name)} {item}: give {low} or more")
    for name in ABOVE_ZERO:
        if config.value(name) is not None and config.value(name) <= 0:
            raise ValueError(f"{flag_of(name)} {config.value(name)}: give more than 0")
    for name in BELOW_ONE:
        value = config.value(name)
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"{flag_of(name)} {value}: give 0 or more, and less than 1")
    if config.model.rotary_percent > 1:
        raise ValueError(f"--rotary-percent {config.model.rotary_percent}: give 1.0 or less")


def number(text: str) -> float | None:
    """Returns the number that `text` spells, or None."""
    try:
        return float(text)
    except ValueError:
        return None


def plain(value: object) -> str:
    """Returns a value as it is typed on a command line."""
    return " ".join(str(item) for item in value) if isinstance(value, tuple | list) else str(value)
