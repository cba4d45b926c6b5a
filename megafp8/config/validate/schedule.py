"""Checks of the optimizer's flags and of the learning-rate schedule."""

from megafp8.config.config import Config, flag_of
from megafp8.config.patterns import multipliers


def optimizer(c: Config) -> str | None:
    o = c.optimizer
    if o.optimizer != "adam":
        return f"--optimizer {o.optimizer}: only AdamW is here; use --optimizer adam"
    for low, high in (("min_lr", "lr"), ("lr_warmup_init", "lr"), ("decoupled_min_lr", "decoupled_lr")):
        if c.value(low) is not None and c.value(high) is not None and c.value(low) > c.value(high):
            return f"{flag_of(low)} {c.value(low)} is above {flag_of(high)} {c.value(high)}; lower it"
    if o.decoupled_min_lr is not None and o.decoupled_lr is None:
        return f"--decoupled-min-lr {o.decoupled_min_lr} needs --decoupled-lr; add it"
    if o.weight_decay_incr_style == "constant" and o.start_weight_decay != o.end_weight_decay:
        return (
            f"--start-weight-decay {o.start_weight_decay} and --end-weight-decay {o.end_weight_decay} differ; give "
            "--weight-decay-incr-style linear or cosine"
        )
    if o.override_opt_param_scheduler and o.use_checkpoint_opt_param_scheduler:
        return "--override-opt_param-scheduler contradicts --use-checkpoint-opt_param-scheduler; leave one out"
    return None


def precision(c: Config) -> str | None:
    """Masters and moments below FP32."""
    o = c.optimizer
    if o.main_params_dtype != "fp32":
        return (
            f"--main-params-dtype {o.main_params_dtype}: masters are FP32; use --store-param-remainders, which is exact"
        )
    if o.main_grads_dtype != "fp32":
        return f"--main-grads-dtype {o.main_grads_dtype}: gradients are added up in FP32; use --grad-reduce-in-bf16"
    lower = [f"{flag_of(n)} {c.value(n)}" for n in ("exp_avg_dtype", "exp_avg_sq_dtype") if c.value(n) != "fp32"]
    for shown in lower:
        if shown.endswith("fp16"):
            return f"{shown}: its range is too small for moments; use bf16"
    lower += ["--store-param-remainders"] * o.store_param_remainders
    if lower and not o.use_precision_aware_optimizer:
        return f"{lower[0]} needs --use-precision-aware-optimizer; add it"
    if o.keep_optimizer_state_in_fp32 and not lower:
        shown = " ".join(o.keep_optimizer_state_in_fp32)
        return f"--keep-optimizer-state-in-fp32 {shown}: all state is FP32; leave it out, or lower --exp-avg-dtype"
    if o.store_param_remainders and not c.train.bf16:
        return "--store-param-remainders needs --bf16: the weights are the masters' upper halves; add it"
    if o.store_param_remainders and c.fp8.fp8_param_gather:
        return "--store-param-remainders contradicts --fp8-param-gather, which keeps no BF16 weights; leave one out"
    return None


def multiplied(c: Config) -> str | None:
    for name in ("lr_multipliers", "weight_decay_multipliers"):
        try:
            multipliers(flag_of(name), c.value(name))
        except ValueError as error:
            return str(error)
    return None


def schedule_units(c: Config) -> str | None:
    """The schedule counts in iterations or in samples, as the training's length does."""
    if c.train.train_iters is None and c.train.train_samples is None:
        return None
    wrong, right = ("samples", "iters") if c.train.train_iters is not None else ("iters", "samples")
    for name in ("lr_decay", "lr_warmup", "lr_wsd_decay"):
        value = c.given.get(f"{name}_{wrong}")
        if value:
            flag = flag_of(f"{name}_{wrong}")
            return f"{flag} {value} doesn't go with --train-{right}; use {flag_of(f'{name}_{right}')}"
    return None


def warmup(c: Config) -> str | None:
    o = c.optimizer
    steps = o.lr_warmup_iters or o.lr_warmup_samples
    if o.lr_warmup_fraction is not None and steps:
        which = "iters" if o.lr_warmup_iters else "samples"
        return f"--lr-warmup-fraction {o.lr_warmup_fraction} contradicts --lr-warmup-{which} {steps}; leave one out"
    decay = o.lr_decay_iters or o.lr_decay_samples
    if decay is not None and steps and steps >= decay:
        unit = "iters" if o.lr_decay_iters else "samples"
        return f"--lr-warmup-{unit} {steps} must be less than --lr-decay-{unit} {decay}; lower it"
    return None


def wsd(c: Config) -> str | None:
    o = c.optimizer
    if o.lr_decay_style != "WSD":
        return None
    tail, decay = o.lr_wsd_decay_iters or o.lr_wsd_decay_samples, o.lr_decay_iters or o.lr_decay_samples
    unit = "iters" if o.lr_decay_iters else "samples"
    if tail is None:
        return f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}; give the length of the final decay"
    if decay is not None and tail > decay:
        return f"--lr-wsd-decay-{unit} {tail} is more than --lr-decay-{unit} {decay}; lower it"
    return None
