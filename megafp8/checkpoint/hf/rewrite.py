"""Checkpoints made of checkpoints: averages, and what is left without the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from megafp8.checkpoint.hf.stored import StoredCheckpoint, open_checkpoint
from megafp8.checkpoint.hf.streams import PREFIX
from megafp8.checkpoint.hf.write import meta, published, write_checkpoint
from megafp8.checkpoint.resume import FP8, Found

MASTER = "optimizer/master/"


def prune(found: Found, save: Path) -> list[str]:
    """Writes the checkpoint without optimizer and random states into the new directory of checkpoints `save`.

    Raises ValueError or DamagedFileError, one line; then `save` isn't there.
    """
    with open_checkpoint(found, (PREFIX, FP8)) as stored, published(save, "--save") as partial:
        tensors = {name: meta(record.shape, record.dtype) for name, record in stored.records.items()}
        write_checkpoint(partial, found.iteration, tensors, stored.read, found.metadata)
    return [f"{len(tensors)} tensors kept: load them with --finetune or --no-load-optim"]


def average(several: Sequence[Found], save: Path) -> list[str]:
    """Writes the mean of several checkpoints' weights, with the arguments of the last, into the new directory `save`.

    FP32 masters are averaged where all checkpoints have them, and the mean rounded once. Raises ValueError for
    checkpoints of different models; then `save` isn't there.
    """
    if len(several) < 2:
        raise ValueError("average: give two checkpoints or more")
    with ExitStack() as stack:
        opened = [stack.enter_context(open_checkpoint(found, (PREFIX, MASTER))) for found in several]
        weights = [{n: r.shape for n, r in one.records.items() if n.startswith(PREFIX)} for one in opened]
        for found, names in zip(several, weights, strict=True):
            if names != weights[-1]:
                raise ValueError(f"average: {found.directory} and {several[-1].directory} are not of one model")
        last = opened[-1].records
        tensors = {name: meta(last[name].shape, last[name].dtype) for name in weights[-1]}
        partial = stack.enter_context(published(save, "--save"))
        metadata = {**several[-1].metadata, "averaged": [str(found.directory) for found in several]}
        write_checkpoint(
            partial, several[-1].iteration, tensors, lambda name: _mean(opened, name, tensors[name].dtype), metadata
        )
    return [f"mean of {len(several)} checkpoints: load it with --finetune or --no-load-optim"]


def _mean(opened: Sequence[StoredCheckpoint], name: str, dtype: torch.dtype) -> torch.Tensor:
    """The mean of one weight, summed in FP64."""
    master = MASTER + name.removeprefix(PREFIX)
    source = master if all(master in one.records for one in opened) else name
    total = opened[0].read(source).double()
    for one in opened[1:]:
        total += one.read(source)
    return (total / len(opened)).float().to(dtype)
