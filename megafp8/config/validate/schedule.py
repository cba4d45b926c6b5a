"""Checks of the optimizer's flags and of the learning-rate schedule."""

from megafp8.config.config import Config, flag_of


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
