"""Which checkpoint a run starts from, and how much of it, as the flags say."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megafp8.checkpoint.directory import checkpoint_path, iteration_of, latest_iteration, saved_iterations
from megafp8.checkpoint.index import INDEX_FILE, RUN_FILE, read_index
from megafp8.checkpoint.load import check_regular, load_checkpoint
from megafp8.checkpoint.tensor_file import DamagedFileError, check_file
from megafp8.params import StateItem

OPTIMIZER, RNG = "optimizer/", "rng/"
FP8 = "fp8_scaling/"
OPTIONAL = (FP8, RNG)
"""State that may be in a checkpoint or in the run alone: FP8's histories, and random states of other ranks."""


@dataclass(frozen=True)
class Found:
    """A checkpoint to start from. metadata: the content of its run.json."""

    directory: Path
    iteration: int
    metadata: Mapping[str, Any]


def find_checkpoint(load: str | Path, step: int | None = None) -> Found | None:
    """The checkpoint in `load` (--load) of iteration `step` (--ckpt-step), or the latest one.

    `load` may also be a checkpoint itself. None when there is no checkpoint at all: the run starts anew. Raises
    ValueError when `step` isn't there, DamagedFileError when the checkpoint is damaged.
    """
    load = Path(load)
    try:
        there = load.is_dir() or not load.exists()
    except OSError as error:
        raise ValueError(f"--load {load}: {error.strerror}; give a directory of checkpoints") from None
    if not there:
        raise ValueError(f"--load {load}: is no directory; give a directory of checkpoints")
    if (load / INDEX_FILE).is_file():
        return _found(load)
    if step is None:
        step = latest_iteration(load)
        if step is None:
            return None
    directory = checkpoint_path(load, step)
    if directory is None:
        raise ValueError(f"--ckpt-step {step}: --load {load} holds no such checkpoint, only {saved_iterations(load)}")
    return _found(directory)


def _found(directory: Path) -> Found:
    index = read_index(directory)
    if RUN_FILE not in index.files:
        raise DamagedFileError(f"{directory} has no {RUN_FILE}")
    check_regular(directory, RUN_FILE)
    check_file(directory / RUN_FILE, index.files[RUN_FILE])
    try:
        metadata = json.loads((directory / RUN_FILE).read_bytes())
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{directory / RUN_FILE} is not JSON: {error}") from None
    if type(metadata) is not dict or type(metadata.get("iteration")) is not int:
        raise DamagedFileError(f"{directory / RUN_FILE} does not say which iteration it is of")
    named = iteration_of(directory.name)
    if named is not None and named != metadata["iteration"]:
        raise DamagedFileError(f"{directory} is of iteration {metadata['iteration']}: it has been renamed")
    return Found(directory, metadata["iteration"], metadata)


def select_saved(
    items: Mapping[str, StateItem], *, no_save_optim: bool = False, no_save_rng: bool = False
) -> dict[str, StateItem]:
    """What --no-save-optim and --no-save-rng leave of the items to save."""
    dropped = (OPTIMIZER,) * no_save_optim + (RNG,) * no_save_rng
    return {name: item for name, item in items.items() if not name.startswith(dropped)}


def load_found(
    found: Found,
    items: Mapping[str, StateItem],
    *,
    finetune: bool = False,
    no_load_optim: bool = False,
    no_load_rng: bool = False,
    elsewhere: Collection[str] = (),
    allow_narrowing: bool = False,
) -> dict[str, Tensor]:
    """Fills the run's items from a checkpoint, as far as the flags ask for them; returns what was filled, by name.

    Args:
        items: everything the run has, from the owners' `state()`.
        finetune: weights alone; the run then starts at iteration 0.
        elsewhere: names of what other pipeline stages have.
        no_load_optim, no_load_rng: leave out the optimizer's or the random states.

    A run that didn't load `optimizer/...` resets its optimizer from the loaded weights. Raises what
    `load_checkpoint` raises, and ValueError when the checkpoint has no optimizer state but the run wants it.
    """
    skipped = (OPTIMIZER,) * (finetune or no_load_optim) + (RNG,) * (finetune or no_load_rng) + (FP8,) * finetune
    wanted = {name: item for name, item in items.items() if not name.startswith(skipped)}
    if OPTIMIZER not in skipped:
        saved = read_index(found.directory).tensors
        if any(n.startswith(OPTIMIZER) for n in wanted) and not any(n.startswith(OPTIMIZER) for n in saved):
            raise ValueError(
                f"{found.directory} has no optimizer state (--no-save-optim): give --no-load-optim to go on with a "
                "fresh optimizer, or --finetune"
            )
    return load_checkpoint(
        found.directory,
        wanted,
        optional=OPTIONAL,
        ignored=OPTIONAL + skipped,
        elsewhere=elsewhere,
        allow_narrowing=allow_narrowing,
    )


def check_tokenizer(found: Found, current: Mapping[str, Any]) -> None:
    """Raises ValueError when the checkpoint's `metadata["tokenizer"]` is not the run's.

    Both are {"type": --tokenizer-type, "vocab_size": int, "fingerprint": str}; a checkpoint that says nothing of its
    tokenizer passes.
    """
    saved = found.metadata.get("tokenizer")
    if saved is None or all(saved.get(key) == current.get(key) for key in ("vocab_size", "fingerprint")):
        return

    def describe(tokenizer: Mapping[str, Any]) -> str:
        return f"{tokenizer.get('type')} of {tokenizer.get('vocab_size')} tokens ({tokenizer.get('fingerprint')})"

    raise ValueError(
        f"--load {found.directory} was trained with the tokenizer {describe(saved)}, this run has {describe(current)}: "
        "give the checkpoint's --tokenizer-type, --tokenizer-model (or --vocab-file, --merge-file, --vocab-size)"
    )
