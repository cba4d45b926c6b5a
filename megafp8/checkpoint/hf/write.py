"""Writing converted models: whole or not at all, streamed, a progress bar on a terminal.

Everything goes into a hidden directory beside the target, which is renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.checkpoint.directory import LATEST, iteration_name, sync_directory
from megafp8.checkpoint.hf.source import WEIGHTS, WEIGHTS_INDEX
from megafp8.checkpoint.index import INDEX_FILE, RUN_FILE, Index, Part, TensorRecord, dump_index, group_of, versions
from megafp8.checkpoint.tensor_file import write_bytes, write_tensors

Load = Callable[[str], Tensor]


@contextmanager
def published(target: Path, flag: str) -> Iterator[Path]:
    """A directory to write into; it becomes `target` when the block ends well, and vanishes when it doesn't.

    Raises ValueError when `target` exists and isn't an empty directory.
    """
    if target.is_symlink() or (target.exists() and not (target.is_dir() and not any(target.iterdir()))):
        raise ValueError(f"{flag} {target}: is there already; give a new directory")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".partial-{target.name}-", dir=target.parent))
    except OSError as error:
        raise ValueError(f"{flag} {target}: can't be written: {error.strerror}") from None
    try:
        yield partial
        partial.chmod(0o777 & ~_umask())
        sync_directory(partial)
        partial.rename(target)
        sync_directory(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file as transformers lays it out."""
    write_bytes(path, (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode())


def write_checkpoint(
    directory: Path, iteration: int, tensors: Mapping[str, Tensor], load: Load, metadata: Mapping[str, Any]
) -> None:
    """Writes a checkpoint of ours into the new directory of checkpoints `directory`.

    tensors: global name (`<group>/...`) -> a tensor on "meta" with dtype and shape; load: gives it by that name.
    metadata: for run.json.
    """
    target = directory / iteration_name(iteration)
    target.mkdir()
    files, records = {}, {}
    with progress(tensors, "writing") as count:
        for group in sorted({group_of(name) for name in tensors}):
            members = {name: tensor for name, tensor in tensors.items() if group_of(name) == group}
            file = f"{group}-00000.safetensors"
            files[file] = write_tensors(target / file, members, load=lambda name: count(load(name)))
            for name, tensor in members.items():
                box = tuple((0, n) for n in tensor.shape)
                records[name] = TensorRecord(tensor.dtype, tuple(tensor.shape), (Part(file, name, box),))
    run = {**metadata, "iteration": iteration, "versions": versions()}
    files[RUN_FILE] = write_bytes(target / RUN_FILE, json.dumps(run, indent=1).encode() + b"\n")
    write_bytes(target / INDEX_FILE, dump_index(Index(files, records)))
    write_bytes(directory / LATEST, f"{iteration_name(iteration)}\n".encode())


def write_hf_weights(directory: Path, tensors: Mapping[str, Tensor], load: Load, max_shard_bytes: int) -> None:
    """Writes model.safetensors, or several files of at most `max_shard_bytes` (a larger tensor alone) and their index.

    tensors, load: as in `write_checkpoint`.
    """
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in sorted(tensors.items()):
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    names = [WEIGHTS]
    if len(shards) > 1:
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        total = sum(tensor.nbytes for tensor in tensors.values())
        write_json(directory / WEIGHTS_INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    with progress(tensors, "writing") as count:
        for name, shard in zip(names, shards, strict=True):
            write_tensors(directory / name, shard, load=lambda key: count(load(key)), metadata={"format": "pt"})


@contextmanager
def progress(tensors: Mapping[str, Tensor], what: str) -> Iterator[Callable[[Tensor], Tensor]]:
    """A bar over the bytes of `tensors`, on a terminal only; call what it gives with each tensor."""
    from tqdm import tqdm

    total = sum(tensor.nbytes for tensor in tensors.values())
    off = not sys.stderr.isatty()
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, disable=off, leave=False) as bar:

        def count(tensor: Tensor) -> Tensor:
            bar.update(tensor.nbytes)
            return tensor

        yield count


def meta(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Dtype and shape of a tensor, without its bytes."""
    return torch.empty(shape, dtype=dtype, device="meta")
