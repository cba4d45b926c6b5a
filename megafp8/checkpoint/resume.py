"""Which checkpoint a run starts from, and how much of it, as the flags say."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from megafp8.checkpoint.directory import (
    checkpoint_path,
    iteration_name,
    iteration_of,
    latest_iteration,
    saved_iterations,
)
from megafp8.checkpoint.index import INDEX_FILE, RUN_FILE, read_index
from megafp8.checkpoint.load import ONE_RANK, load_checkpoint
from megafp8.checkpoint.ranks import agreed, exchange
from megafp8.checkpoint.strictness import STRICT, Strictness
from megafp8.checkpoint.tensor_file import DamagedFileError, check_file, check_regular
from megafp8.parallel import ParallelContext
from megafp8.params import StateItem, name_of

log = logging.getLogger(__name__)
WEIGHTS, MASTERS = "model/", "optimizer/master/"
OPTIMIZER, RNG = "optimizer/", "rng/"
FP8, BALANCE = "fp8_scaling/", "balance/"
OPTIONAL = (FP8, RNG, BALANCE)
"""State that may be in a checkpoint or in the run alone: FP8's histories, random states of other ranks, and what the
global auxiliary loss of experts goes on with."""


@dataclass(frozen=True)
class Found:
    """A checkpoint to start from. metadata: the content of its run.json."""

    directory: Path
    iteration: int
    metadata: Mapping[str, Any]


def find_checkpoint(
    load: str | Path, step: int | None = None, *, before: int | None = None, fallback: bool = False
) -> Found | None:
    """The checkpoint in `load` (--load) of iteration `step` (--ckpt-step), or the latest one.

    Args:
        load: a directory of checkpoints, or a checkpoint itself.
        before: the newest one of an iteration before this.
        fallback: where its index.json or run.json is damaged, the newest one before it that isn't (--load-fallback).

    None when there is no checkpoint at all: the run starts anew. Raises ValueError when `step` isn't there,
    DamagedFileError when the checkpoint is damaged.
    """
    load = Path(load)
    try:
        if not load.is_dir() and load.exists():
            raise ValueError(f"--load {load}: is no directory; give a directory of checkpoints")
        if (load / INDEX_FILE).is_file():
            return _found(load) if before is None else None
        first = _first(load, step, before)
    except OSError as error:
        raise ValueError(f"--load {load}: {error.strerror}; give a directory of checkpoints") from None
    if first is None:
        return None
    older = [iteration for iteration in reversed(saved_iterations(load)) if iteration < first]
    damage: list[DamagedFileError] = []
    for iteration in [first, *(older if fallback else ())]:
        try:
            found = _found(checkpoint_path(load, iteration) or load / iteration_name(iteration))
        except DamagedFileError as error:
            damage.append(error)
            continue
        for error in damage:
            log.warning("--load-fallback: %s; taking iteration %d", error, iteration)
        return found
    raise damage[0]


def _first(load: Path, step: int | None, before: int | None) -> int | None:
    """The iteration that flags ask for, None without checkpoints."""
    saved = saved_iterations(load)
    if before is not None:
        return max((iteration for iteration in saved if iteration < before), default=None)
    if step is None:
        return latest_iteration(load)
    if step not in saved:
        raise ValueError(f"--ckpt-step {step}: --load {load} holds no such checkpoint, only {saved}")
    return step


def find_together(
    parallel: ParallelContext,
    load: str | Path,
    step: int | None = None,
    *,
    before: int | None = None,
    fallback: bool = False,
) -> Found | None:
    """`find_checkpoint` for a job: rank 0 chooses, so that no two ranks take different ones. Every rank calls it."""
    choose = {"before": before, "fallback": fallback}
    first = agreed(parallel, lambda: find_checkpoint(load, step, **choose) if parallel.is_first else None)
    iteration = exchange(parallel, None if first is None else first.iteration)[0]
    if iteration is None:
        return None
    return agreed(parallel, lambda: first or find_checkpoint(load, iteration))


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
    strictness: Strictness = STRICT,
    allow_narrowing: bool = False,
    parallel: ParallelContext = ONE_RANK,
) -> dict[str, Tensor]:
    """Fills the run's items from a checkpoint, as far as the flags ask for them; returns what was filled, by name.

    Args:
        items: everything the run has, from the owners' `state()`.
        finetune: weights alone; the run then starts at iteration 0.
        no_load_optim, no_load_rng: leave out the optimizer's or the random states.
        elsewhere, strictness, allow_narrowing, parallel: as for `load_checkpoint`.

    Of weights and optimizer, what the checkpoint lacks and `strictness` lets pass keeps its initial value and is
    returned as well; but a master whose weight is there starts from that. A run that didn't load `optimizer/...` resets
    its optimizer from the loaded weights. Raises what `load_checkpoint` raises, and ValueError when the checkpoint has
    no optimizer state but the run wants it.
    """
    skipped = (OPTIMIZER,) * (finetune or no_load_optim) + (RNG,) * (finetune or no_load_rng) + (FP8,) * finetune
    wanted = {name: item for name, item in items.items() if not name.startswith(skipped)}
    sources: dict[str, str] = {}
    if any(name.startswith(OPTIMIZER) for name in wanted):
        saved = agreed(parallel, lambda: read_index(found.directory)).tensors
        if not any(n.startswith(OPTIMIZER) for n in saved):
            raise ValueError(
                f"{found.directory} has no optimizer state (--no-save-optim): give --no-load-optim to go on with a "
                "fresh optimizer, or --finetune"
            )
        if strictness.lacks != "raise":
            sources = _weights_for_masters(wanted, saved)
    tensors = load_checkpoint(
        found.directory,
        wanted,
        optional=OPTIONAL,
        ignored=OPTIONAL + skipped,
        elsewhere=elsewhere,
        sources=sources,
        strictness=strictness,
        allow_narrowing=allow_narrowing,
        parallel=parallel,
    )
    kept = {key: item.tensor for key, item in wanted.items() if key not in tensors and not key.startswith(OPTIONAL)}
    return tensors | kept


def _weights_for_masters(wanted: Mapping[str, StateItem], saved: Collection[str]) -> dict[str, str]:
    """Which weight a master that the checkpoint lacks starts from: master -> weight, both global names."""
    masters = {name_of(key) for key in wanted if key.startswith(MASTERS)} - set(saved)
    weights = {name: WEIGHTS + name.removeprefix(MASTERS) for name in masters}
    return {name: weight for name, weight in weights.items() if weight in saved}


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
