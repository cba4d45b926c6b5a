"""Learning rate and weight decay as pure functions of the samples consumed before a step.

There is no state: a resume, a skipped step or a second call can't count a step twice. The shapes are those of
Megatron-LM's optimizer_param_scheduler.py, including its units: iterations times the global batch size.

A step that is skipped for a non-finite gradient consumes its samples, so the schedule moves on with the data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from megafp8.config import Config

FLAGS = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "init_lr": "--lr-warmup-init",
    "warmup_steps": "--lr-warmup-fraction/-iters/-samples",
    "decay_steps": "--lr-decay-iters/-samples (default: the length of training)",
    "decay_style": "--lr-decay-style",
    "wsd_decay_steps": "--lr-wsd-decay-iters/-samples",
    "wsd_decay_style": "--lr-wsd-decay-style",
    "start_wd": "--start-weight-decay (default: --weight-decay)",
    "end_wd": "--end-weight-decay (default: --weight-decay)",
    "wd_incr_steps": "--train-iters/-samples",
    "wd_incr_style": "--weight-decay-incr-style",
    "decoupled_max_lr": "--decoupled-lr",
    "decoupled_min_lr": "--decoupled-min-lr",
}
"""Field of `Schedule` -> the flag it comes from, for messages."""


@dataclass(frozen=True)
class Schedule:
    """All `*_steps` are samples. Rates are per optimizer step.

    decay_steps: end of the decay, warm-up included; later the rate is `min_lr`. wsd_decay_steps: length of WSD's
    final decay, which ends at `decay_steps`. decoupled_*: bounds for embedding and LM head, None: as the others.
    """

    max_lr: float
    decay_steps: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    warmup_steps: float = 0
    decay_style: str = "linear"
    wsd_decay_steps: float | None = None
    wsd_decay_style: str = "exponential"
    start_wd: float = 0.0
    end_wd: float = 0.0
    wd_incr_steps: float = 0
    wd_incr_style: str = "constant"
    decoupled_max_lr: float | None = None
    decoupled_min_lr: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps < self.decay_steps:
            raise ValueError(
                f"warm-up ({self.warmup_steps} samples, {FLAGS['warmup_steps']}) must be shorter than the decay "
                f"({self.decay_steps} samples, {FLAGS['decay_steps']}), which includes it"
            )
        if not (0 <= self.min_lr <= self.max_lr and self.init_lr <= self.max_lr):
            raise ValueError(
                f"--min-lr {self.min_lr} and --lr-warmup-init {self.init_lr} must not exceed --lr {self.max_lr}"
            )
        if self.decay_style == "WSD" and self.wsd_decay_steps is None:
            raise ValueError("--lr-decay-style WSD needs --lr-wsd-decay-iters or --lr-wsd-decay-samples")
        if self.wd_incr_style == "constant" and self.start_wd != self.end_wd:
            raise ValueError(
                f"--start-weight-decay {self.start_wd} and --end-weight-decay {self.end_wd} differ: "
                "give --weight-decay-incr-style linear or cosine"
            )

    def lr(self, consumed_samples: int) -> float:
        """Rate of the step that comes after `consumed_samples` samples: 0 at first if there is a warm-up."""
        return self._lr(consumed_samples, self.max_lr, self.min_lr)

    def decoupled_lr(self, consumed_samples: int) -> float:
        """The same for embedding and LM head."""
        max_lr = self.max_lr if self.decoupled_max_lr is None else self.decoupled_max_lr
        min_lr = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
        return self._lr(consumed_samples, max_lr, min_lr)

    def weight_decay(self, consumed_samples: int) -> float:
        if consumed_samples > self.wd_incr_steps or self.wd_incr_style == "constant":
            return self.end_wd
        ratio = consumed_samples / self.wd_incr_steps
        if self.wd_incr_style == "cosine":
            ratio = 0.5 * (math.cos(math.pi * (1 - ratio)) + 1)
        return self.start_wd + ratio * (self.end_wd - self.start_wd)

    def _lr(self, step: int, max_lr: float, min_lr: float) -> float:
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return self.init_lr + (max_lr - self.init_lr) * step / self.warmup_steps
        if self.decay_style == "constant":
            return max_lr
        if step > self.decay_steps:
            return min_lr
        if self.decay_style == "inverse-square-root":
            return max(min_lr, max_lr * math.sqrt(max(self.warmup_steps, 1) / max(step, 1)))
        return min_lr + self._decay_coefficient(step) * (max_lr - min_lr)

    def _decay_coefficient(self, step: int) -> float:
        """Between 1 at the start of the decay and 0 at its end."""
        ratio = (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps)
        style = self.decay_style
        if style == "WSD":
            start = self.decay_steps - self.wsd_decay_steps
            if step <= start:
                return 1.0
            ratio = (step - start) / self.wsd_decay_steps
            style = self.wsd_decay_style
        return DECAYS[style](ratio)


DECAYS = {
    "linear": lambda ratio: 1 - ratio,
    "cosine": lambda ratio: 0.5 * (math.cos(math.pi * ratio) + 1),
    "exponential": lambda ratio: 2 * 0.5**ratio - 1,
    "minus_sqrt": lambda ratio: 1 - math.sqrt(ratio),
}


def build_schedule(config: Config) -> Schedule:
    """The schedule that the flags ask for; ValueError names those that contradict each other."""
    o, t = config.optimizer, config.train
    if t.train_iters is not None:
        batch = t.global_batch_size
        length = t.train_iters * batch
        decay = length if o.lr_decay_iters is None else o.lr_decay_iters * batch
        warmup = o.lr_warmup_iters * batch
        wsd = None if o.lr_wsd_decay_iters is None else o.lr_wsd_decay_iters * batch
    else:
        assert t.train_samples is not None, "the configuration checks that a length is given"
        length = t.train_samples
        decay = length if o.lr_decay_samples is None else o.lr_decay_samples
        warmup = o.lr_warmup_samples
        wsd = o.lr_wsd_decay_samples
    if o.lr_warmup_fraction is not None:
        warmup = o.lr_warmup_fraction * decay
    start_wd = o.weight_decay if o.start_weight_decay is None else o.start_weight_decay
    end_wd = o.weight_decay if o.end_weight_decay is None else o.end_weight_decay
    return Schedule(
        max_lr=o.lr,
        min_lr=o.min_lr,
        init_lr=o.lr_warmup_init,
        warmup_steps=warmup,
        decay_steps=decay,
        decay_style=o.lr_decay_style,
        wsd_decay_steps=wsd,
        wsd_decay_style=o.lr_wsd_decay_style,
        start_wd=start_wd,
        end_wd=end_wd,
        wd_incr_steps=length,
        wd_incr_style=o.weight_decay_incr_style,
        decoupled_max_lr=o.decoupled_lr,
        decoupled_min_lr=o.decoupled_min_lr,
    )


def schedule_to_json(schedule: Schedule) -> dict[str, float | str | None]:
    """For a checkpoint's metadata; `resume_schedule` takes it back."""
    return asdict(schedule)


def resume_schedule(
    current: Schedule, saved: Mapping[str, float | str | None], *, override: bool, use_checkpoint: bool
) -> Schedule:
    """Which schedule a resumed run follows, as Megatron-LM decides it.

    override (--override-opt_param-scheduler): the flags'. use_checkpoint (--use-checkpoint-opt_param-scheduler): the
    checkpoint's. Neither: they must agree, or ValueError names the flags that differ. Fields without effect (the end
    of a constant rate's decay, the length over which a constant weight decay grows) may differ.
    """
    assert not (override and use_checkpoint), "the configuration refuses both flags together"
    if override:
        return current
    known = {f.name for f in fields(Schedule)}
    loaded = Schedule(**{name: value for name, value in saved.items() if name in known})
    if use_checkpoint:
        return loaded
    differing = [n for n in sorted(known - _without_effect(current, loaded)) if _differs(n, current, loaded)]
    if differing:
        values = "; ".join(f"{FLAGS[n]}: {_told(n, loaded)} saved, {_told(n, current)} now" for n in differing)
        raise ValueError(
            f"the schedule differs from the checkpoint's ({values}); give --override-opt_param-scheduler to follow "
            "the flags, or --use-checkpoint-opt_param-scheduler to follow the checkpoint"
        )
    return current


def _differs(name: str, a: Schedule, b: Schedule) -> bool:
    return getattr(a, name) != getattr(b, name)


def _told(name: str, schedule: Schedule) -> str:
    return f"{getattr(schedule, name)}{' samples' if name.endswith('_steps') else ''}"


def _without_effect(a: Schedule, b: Schedule) -> set[str]:
    ignored = set()
    if a.decay_style == b.decay_style == "constant":
        ignored |= {"decay_steps", "min_lr", "decoupled_min_lr"}
    if a.decay_style == b.decay_style != "WSD":
        ignored |= {"wsd_decay_steps", "wsd_decay_style"}
    if a.wd_incr_style == b.wd_incr_style == "constant":
        ignored.add("wd_incr_steps")
    return ignored
