"""Saving and loading."""

from dataclasses import dataclass

from megafp8.config.flags import flag


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints."""

    save: str | None = flag(None, "Directory that checkpoints are written to.", metavar="DIR")
    save_interval: int | None = flag(
        None,
        "Iterations between checkpoints.",
        aliases=("--persistent-save-interval",),
        shown_default="only at the end",
    )
    save_retain_interval: int | None = flag(
        None, "Keep checkpoints at multiples of this and the newest one; delete the others.", shown_default="keep all"
    )
    async_save: bool = flag(
        False,
        "Write checkpoints in the background: training stands still only while the state is copied to host memory, "
        "of which a rank's part of a checkpoint is taken.",
    )
    no_save_optim: bool = flag(False, "Leave the optimizer's state out of checkpoints.")
    no_save_rng: bool = flag(False, "Leave the random states out of checkpoints.")
    load: str | None = flag(
        None, "Directory of checkpoints to resume from; an empty one starts a new run.", metavar="DIR"
    )
    ckpt_step: int | None = flag(
        None, "Iteration of the checkpoint in --load to resume from.", shown_default="the latest"
    )
    exit_on_missing_checkpoint: bool = flag(False, "End with an error when --load holds no checkpoint.")
    no_load_optim: bool = flag(False, "Load weights only; the optimizer starts fresh.")
    no_load_rng: bool = flag(False, "Don't load the random states.")
    finetune: bool = flag(False, "Load weights only and start at iteration 0 with fresh optimizer and data.")
    load_fallback: bool = flag(
        False, "Where the checkpoint in --load is damaged, take the newest one before it that isn't."
    )
    load_narrowing: bool = flag(
        False, "Also load tensors into narrower floating-point types (FP32 weights into BF16 ones), which rounds them."
    )
    dist_ckpt_strictness: str | None = flag(
        None,
        "Names that only the checkpoint or only the run has: raise_*, log_*, return_* (logs), ignore_all, "
        "assume_ok_unexpected; *_all minds both, *_unexpected what the checkpoint lacks (docs/checkpoints.md).",
        choices=(
            *("assume_ok_unexpected", "log_unexpected", "log_all", "raise_unexpected", "raise_all"),
            *("return_unexpected", "return_all", "ignore_all"),
        ),
        metavar="WORD",
        shown_default="raise_all",
    )
