"""AdamW, its schedule, clipping and decay."""

from dataclasses import dataclass

from megafp8.config.flags import flag


@dataclass(frozen=True)
class OptimizerConfig:
    """Optimizer, learning rate, weight decay."""

    optimizer: str = flag("adam", "Update rule (AdamW: decay is decoupled).", metavar="{adam}")
    lr: float | None = flag(None, "Peak learning rate. Required.")
    min_lr: float = flag(0.0, "Learning rate that decay ends at.")
    lr_decay_style: str = flag(
        "linear",
        "Shape of the decay after warm-up; WSD stays flat until the last --lr-wsd-decay-* steps.",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = flag(
        None, "Iterations, warm-up included, after which the rate is --min-lr.", shown_default="--train-iters"
    )
    lr_decay_samples: int | None = flag(None, "The same in samples.", shown_default="--train-samples")
    lr_wsd_decay_style: str = flag(
        "exponential", "Shape of WSD's final decay.", choices=("exponential", "linear", "cosine", "minus_sqrt")
    )
    lr_wsd_decay_iters: int | None = flag(None, "Iterations of WSD's final decay.")
    lr_wsd_decay_samples: int | None = flag(None, "Samples of WSD's final decay.")
    lr_warmup_fraction: float | None = flag(None, "Part of the decay iterations (or samples) used for linear warm-up.")
    lr_warmup_iters: int = flag(0, "Iterations of linear warm-up.")
    lr_warmup_samples: int = flag(0, "Samples of linear warm-up.")
    lr_warmup_init: float = flag(0.0, "Learning rate at which warm-up starts.")
    decoupled_lr: float | None = flag(None, "Peak learning rate of embedding and LM head.", shown_default="--lr")
    decoupled_min_lr: float | None = flag(
        None, "Final learning rate of embedding and LM head.", shown_default="--min-lr"
    )
    lr_multipliers: tuple[str, ...] = flag(
        (),
        "Factors of the learning rate by parameter name, e.g. 'layers.*.mlp.experts.*=0.5'; the last match counts.",
        nargs="+",
        metavar="PATTERN=FACTOR",
        shown_default="none",
    )
    weight_decay_multipliers: tuple[str, ...] = flag(
        (),
        "Factors of the weight decay by parameter name, e.g. 'embedding.*=0'; the last match counts.",
        nargs="+",
        metavar="PATTERN=FACTOR",
        shown_default="none",
    )
    override_opt_param_scheduler: bool = flag(
        False,
        "On resume take the schedule from the flags, not from the checkpoint.",
        spelling="--override-opt_param-scheduler",
        aliases=("--override-opt-param-scheduler",),
    )
    use_checkpoint_opt_param_scheduler: bool = flag(
        False,
        "On resume take the schedule from the checkpoint, even if the flags differ.",
        spelling="--use-checkpoint-opt_param-scheduler",
        aliases=("--use-checkpoint-opt-param-scheduler",),
    )
    weight_decay: float = flag(0.01, "Weight decay of matrices; norms and biases have none.")
    start_weight_decay: float | None = flag(
        None, "Weight decay at the start of training.", shown_default="--weight-decay"
    )
    end_weight_decay: float | None = flag(None, "Weight decay at the end of training.", shown_default="--weight-decay")
    weight_decay_incr_style: str = flag(
        "constant", "How weight decay goes from start to end.", choices=("constant", "linear", "cosine")
    )
    apply_wd_to_qk_layernorm: bool = flag(False, "Decay the weights of query and key norms too.")
    adam_beta1: float = flag(0.9, "Decay of the first moment.")
    adam_beta2: float = flag(0.999, "Decay of the second moment.")
    adam_eps: float = flag(1e-8, "Added to the root of the second moment.")
    clip_grad: float = flag(1.0, "Scale gradients down to this L2 norm over all parameters; 0 is off.")
    use_distributed_optimizer: bool = flag(
        False, "Shard masters and moments over the data-parallel ranks (ZeRO-1; no effect on one rank)."
    )
    use_precision_aware_optimizer: bool = flag(
        False,
        "Let --exp-avg-dtype, --exp-avg-sq-dtype and --store-param-remainders store state of matrices below FP32; "
        "norms and biases stay in FP32.",
    )
    main_params_dtype: str = flag(
        "fp32", "Precision of the masters; --store-param-remainders halves their memory.", choices=("fp32", "fp16")
    )
    main_grads_dtype: str = flag("fp32", "Precision in which gradients are added up.", choices=("fp32", "bf16"))
    exp_avg_dtype: str = flag(
        "fp32",
        "First moment: 4 bytes a parameter, bf16 2 (rounded stochastically), fp8 1.08 (blocks of 64 with an expanded "
        "range).",
        choices=("fp32", "fp16", "bf16", "fp8"),
    )
    exp_avg_sq_dtype: str = flag("fp32", "Second moment; as --exp-avg-dtype.", choices=("fp32", "fp16", "bf16", "fp8"))
    store_param_remainders: bool = flag(
        False,
        "Keep of each FP32 master only the 16 bits that its BF16 weight lacks: exact, 2 bytes a parameter less. "
        "Weights are then rounded half up instead of to even.",
    )
    keep_optimizer_state_in_fp32: tuple[str, ...] = flag(
        (),
        "Parameters whose masters and moments stay in FP32 under --use-precision-aware-optimizer, e.g. 'embedding.*'.",
        nargs="+",
        metavar="PATTERN",
        shown_default="none",
    )
