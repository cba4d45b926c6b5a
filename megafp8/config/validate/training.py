"""Checks of layout, batches, length, recomputation and checkpoints."""

from megafp8.config.config import Config, flag_of
from megafp8.config.parallel import layout_sizes
from megafp8.config.validate.limits import plain

MODULES = ("core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts")


def layout(c: Config) -> str | None:
    p = c.parallel
    try:
        layout_sizes(p)
    except ValueError as error:
        return str(error)
    if p.overlap_param_gather and not c.optimizer.use_distributed_optimizer:
        return "--overlap-param-gather needs --use-distributed-optimizer; add it"
    if p.overlap_param_gather and not p.overlap_grad_reduce:
        return "--overlap-param-gather needs --overlap-grad-reduce; add it"
    return None


def tensor_parallel(c: Config) -> str | None:
    """What tensor-parallel ranks share must come out even."""
    tp = c.parallel.tensor_model_parallel_size
    for name in ("num_attention_heads", "num_query_groups", "ffn_hidden_size"):
        if c.value(name) % tp:
            return (
                f"{flag_of(name)} {c.value(name)} is not divisible by --tensor-model-parallel-size {tp}; change one of "
                "them"
            )
    if c.parallel.sequence_parallel and c.data.seq_length % tp:
        return (
            f"--seq-length {c.data.seq_length} is not divisible by --tensor-model-parallel-size {tp}; change one of "
            "them, or drop --sequence-parallel"
        )
    return None


def batch(c: Config) -> str | None:
    t, dp = c.train, c.parallel.data_parallel_size
    if t.global_batch_size % (t.micro_batch_size * dp):
        return (
            f"--global-batch-size {t.global_batch_size} is not divisible by --micro-batch-size {t.micro_batch_size} x "
            f"{dp} data-parallel rank(s); make it a multiple of {t.micro_batch_size * dp}"
        )
    return None


def rampup(c: Config) -> str | None:
    """The ramp must meet the batch in whole increments, and every size must be dealt out evenly."""
    t = c.train
    if t.rampup_batch_size is None:
        return None
    start, increment, samples = t.rampup_batch_size
    shown = f"--rampup-batch-size {start} {increment} {samples}"
    micro = t.micro_batch_size * c.parallel.data_parallel_size
    if min(start, increment, samples) < 1:
        return f"{shown}: give three numbers of 1 or more"
    if start > t.global_batch_size or (t.global_batch_size - start) % increment:
        return (
            f"{shown}: {start} plus increments of {increment} never is --global-batch-size {t.global_batch_size}; "
            "change one of them"
        )
    if start % micro or increment % micro:
        return (
            f"{shown}: a size is not divisible by --micro-batch-size {t.micro_batch_size} x "
            f"{c.parallel.data_parallel_size} data-parallel rank(s); make both multiples of {micro}"
        )
    return None


def batch_steps(c: Config) -> str | None:
    """Every size must be dealt out evenly, and the largest is the global batch."""
    t = c.train
    if t.step_batch_size_schedule is None:
        return None
    shown = f'--step-batch-size-schedule "{" ".join(t.step_batch_size_schedule)}"'
    micro = t.micro_batch_size * c.parallel.data_parallel_size
    if t.rampup_batch_size is not None:
        return f"{shown} contradicts --rampup-batch-size; leave one out"
    for size in t.batch_size_steps[1::2]:
        if size % micro:
            return (
                f"{shown}: {size} is not divisible by --micro-batch-size {t.micro_batch_size} x "
                f"{c.parallel.data_parallel_size} data-parallel rank(s); make it a multiple of {micro}"
            )
    largest = max(t.batch_size_steps[1::2])
    if t.global_batch_size != largest:
        return f"--global-batch-size {t.global_batch_size} is not the largest of {shown}; leave it out"
    return None


def length(c: Config) -> str | None:
    t = c.train
    if t.train_iters is not None and t.train_samples is not None:
        return f"--train-iters {t.train_iters} contradicts --train-samples {t.train_samples}; leave one out"
    if t.train_iters is None and t.train_samples is None and not t.skip_train:
        return "--train-iters or --train-samples is required"
    if t.train_samples is not None and t.train_samples < t.global_batch_size:
        return (
            f"--train-samples {t.train_samples} is less than --global-batch-size {t.global_batch_size}; "
            "train for one step at least"
        )
    return None


def skipped_iterations(c: Config) -> str | None:
    try:
        _ = c.train.skipped_ranges
    except ValueError as error:
        return str(error)
    return None


def recompute(c: Config) -> str | None:
    t = c.train
    for name, wants in (
        ("recompute_method", "full"),
        ("recompute_num_layers", "full"),
        ("recompute_modules", "selective"),
    ):
        if c.is_given(name) and t.recompute_granularity != wants:
            return f"{flag_of(name)} {plain(c.value(name))} needs --recompute-granularity {wants}; add it"
    for module in t.recompute_modules or ():
        if module not in MODULES:
            return f"--recompute-modules {module}: no such part; use {', '.join(MODULES)}"
        if module in ("moe", "moe_act", "shared_experts") and c.model.num_experts is None:
            return f"--recompute-modules {module} needs --num-experts; use mlp"
        if module == "mla_up_proj" and not c.model.multi_latent_attention:
            return f"--recompute-modules {module} needs --multi-latent-attention; use core_attn"
    if (t.recompute_num_layers or 1) > c.model.num_layers:
        return (
            f"--recompute-num-layers {t.recompute_num_layers} is more than --num-layers {c.model.num_layers}; lower it"
        )
    return None


def checkpoints(c: Config) -> str | None:
    k = c.checkpoint
    if k.save_retain_interval and k.save_interval and k.save_retain_interval % k.save_interval:
        return (
            f"--save-retain-interval {k.save_retain_interval} is no multiple of --save-interval {k.save_interval}; "
            "make it one"
        )
    if c.train.skip_train and not k.load:
        return "--skip-train evaluates a checkpoint; give --load"
    return None
