"""What a run saves, and how it resumes: every owner's state under global names, and the run's own counters.

Loading gives each owner its tensors back through `load_state()`, which publishes the weights as a step does, so no
FP8 copy of an older weight can survive.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megafp8.checkpoint import (
    STRICTNESS,
    CheckpointWriter,
    DamagedFileError,
    Found,
    RandomState,
    SaveJob,
    SavePlans,
    check_tokenizer,
    find_together,
    load_found,
    select_saved,
)
from megafp8.checkpoint.directory import checkpoints_below
from megafp8.checkpoint.resume import OPTIMIZER
from megafp8.config import Config, changes
from megafp8.config.config import flag_of
from megafp8.core.moe.shares import LastShares
from megafp8.optimizer import Schedule, resume_schedule, schedule_to_json
from megafp8.parallel import ParallelContext
from megafp8.params import StateItem
from megafp8.training.build import Parts, tokenizer_identity
from megafp8.training.progress import Progress

# What may differ between a run and its continuation without saying anything about the training.
UNREMARKABLE = (
    *("--log-dir", "--save", "--load", "--tensorboard-dir", "--wandb-save-dir", "--dry-run"),
    *("--ckpt-step", "--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler"),
)


class RunState:
    """The state of a run's owners: weights, optimizer, FP8 histories, random states."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._plans = SavePlans(parts.parallel)
        random_state = RandomState(parts.parallel.rank)
        random_state.seed(parts.config.train.seed)
        owners = [
            parts.optimizer.weights,
            parts.model,
            parts.optimizer,
            parts.scaling,
            LastShares(parts.model.routers()),
            random_state,
        ]
        self._owners = [owner for owner in owners if owner is not None]

    def items(self) -> dict[str, StateItem]:
        items: dict[str, StateItem] = {}
        for owner in self._owners:
            state = owner.state()
            assert not items.keys() & state.keys(), "two owners claim one name"
            items |= state
        return items

    def items_to_save(self) -> dict[str, StateItem]:
        """What the flags leave of the items."""
        checkpoint = self._parts.config.checkpoint
        return select_saved(self.items(), no_save_optim=checkpoint.no_save_optim, no_save_rng=checkpoint.no_save_rng)

    def writer(self, progress: Progress) -> CheckpointWriter:
        """Of the checkpoint in `--save` that has the run's place and flags."""
        checkpoint, metadata = self._parts.config.checkpoint, run_metadata(self._parts, progress)
        return CheckpointWriter(
            checkpoint.save, progress.iteration, metadata, retain_interval=checkpoint.save_retain_interval
        )

    def save(self, progress: Progress) -> bool:
        """Saves to `--save`; False when the disk refused (logged), which is no reason to end the run."""
        return SaveJob(self.writer(progress), self._plans).run(self.items_to_save()) is not None

    def load(self, found: Found) -> None:
        """Fills every owner from a checkpoint, as far as the flags ask for it. Raises ValueError on a mismatch."""
        check_tokenizer(found, tokenizer_identity(self._parts.tokenizer))
        checkpoint = self._parts.config.checkpoint
        with _naming_flags(found, self._parts.config):
            tensors = load_found(
                found,
                self.items(),
                finetune=checkpoint.finetune,
                no_load_optim=checkpoint.no_load_optim,
                no_load_rng=checkpoint.no_load_rng,
                strictness=STRICTNESS[checkpoint.dist_ckpt_strictness or "raise_all"],
                allow_narrowing=checkpoint.load_narrowing,
                parallel=self._parts.parallel,
            )
        with_optimizer = any(name.startswith(OPTIMIZER) for name in tensors)
        for owner in self._owners:
            if owner is self._parts.optimizer and not with_optimizer:
                owner.reset_from_weights()
            else:
                owner.load_state(tensors)
        self._parts.optimizer.write_weights()  # FP8 primary weights again, now that their scales are there


def run_metadata(parts: Parts, progress: Progress) -> dict[str, Any]:
    """What run.json of a checkpoint says beside the tensors."""
    return {
        "progress": progress.to_json(),
        "schedule": schedule_to_json(parts.schedule),
        "tokenizer": tokenizer_identity(parts.tokenizer),
        "args": parts.config.to_dict(),
    }


@contextmanager
def _naming_flags(found: Found, config: Config) -> Iterator[None]:
    """Names the model's flags that differ from the checkpoint's where its tensors don't fit."""
    try:
        yield
    except DamagedFileError:
        raise
    except ValueError as error:
        saved = found.metadata.get("args", {}).get("config", {}).get("model", {})
        pairs = [(name, saved.get(name), config.value(name)) for name in _SHAPES]
        other = [f"{flag_of(name)} is {was} there, {now} here" for name, was, now in pairs if was not in (None, now)]
        if not other:
            raise
        raise ValueError(f"--load {found.directory}: another model: {', '.join(other)} ({error})") from None


_SHAPES = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_experts")


def find_to_resume(config: Config, parallel: ParallelContext) -> Found | None:
    """The checkpoint that `--load` names, or None for a new run. ValueError where the flags ask for one in vain."""
    checkpoint = config.checkpoint
    found = None
    if checkpoint.load is not None:
        fallback = checkpoint.load_fallback
        found = find_together(parallel, checkpoint.load, checkpoint.ckpt_step, fallback=fallback)
    if found is None and checkpoint.exit_on_missing_checkpoint:
        below = checkpoint.load and checkpoints_below(checkpoint.load)
        raise ValueError(
            f"--exit-on-missing-checkpoint: --load {checkpoint.load} holds no checkpoint; give "
            f"{below or 'the directory of one'}, "
            "or drop the flag to start anew"
        )
    return found


def resume(parts: Parts, state: RunState, found: Found) -> tuple[Progress, Schedule, list[str]]:
    """Loads `found`; returns where the run goes on, the schedule it follows, and lines that say what changed.

    With `--load-fallback` a damaged checkpoint is left for the newest one before it that isn't; no owner has seen
    anything of the damaged one.
    """
    checkpoint, notes = parts.config.checkpoint, []
    while True:
        try:
            with _reading(found):
                progress, schedule, lines = _resume(parts, state, found)
            return progress, schedule, notes + lines
        except DamagedFileError as error:
            if not checkpoint.load_fallback:
                raise DamagedFileError(f"{error}; --load-fallback takes the checkpoint before") from None
            older = find_together(parts.parallel, checkpoint.load, before=found.iteration, fallback=True)
            if older is None:
                raise
            notes.append(f"--load-fallback: {error}; taking iteration {older.iteration}")
            found = older


@contextmanager
def _reading(found: Found) -> Iterator[None]:
    """Makes one line of a run.json that is whole but lacks what a run writes there, or has it in another form."""
    try:
        yield
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{found.directory} was not written by a run of this version of megafp8 (run.json or a tensor: "
            f"{type(error).__name__} {error}); give another checkpoint, or --finetune for its weights alone"
        ) from error


def check_data_left(parts: Parts, progress: Progress) -> None:
    """Raises ValueError when the training data ends before the place where the run goes on."""
    samples = len(parts.datasets.train)
    if progress.consumed_samples > samples:
        raise ValueError(
            f"--load {parts.config.checkpoint.load}: {progress.consumed_samples} samples were consumed but the data "
            f"has {samples}; resume with the data, --seq-length, --global-batch-size and --train-iters the run had, "
            "or more"
        )


def _resume(parts: Parts, state: RunState, found: Found) -> tuple[Progress, Schedule, list[str]]:
    state.load(found)
    checkpoint, optimizer = parts.config.checkpoint, parts.config.optimizer
    if checkpoint.finetune:
        return Progress(), parts.schedule, [f"weights from {found.directory}; training starts at iteration 0"]
    progress = Progress.from_json(found.metadata["progress"])
    schedule = parts.schedule
    if checkpoint.no_load_optim:  # a fresh optimizer starts with its schedule, as in Megatron-LM
        progress.schedule_start = progress.consumed_samples
    else:
        schedule = resume_schedule(
            parts.schedule,
            found.metadata["schedule"],
            override=optimizer.override_opt_param_scheduler,
            use_checkpoint=optimizer.use_checkpoint_opt_param_scheduler,
        )
    notes = [f"resumed from {found.directory} at iteration {progress.iteration}"]
    saved = Config.from_dict(found.metadata["args"])
    return progress, schedule, notes + changes(saved, parts.config, UNREMARKABLE)
