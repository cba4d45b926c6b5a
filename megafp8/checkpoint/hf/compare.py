"""What a directory holds, a checkpoint of ours or a Hugging Face model, and how two differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megafp8.checkpoint.directory import saved_iterations
from megafp8.checkpoint.hf import family_of
from megafp8.checkpoint.hf.source import CONFIG, open_source, read_config
from megafp8.checkpoint.hf.stored import open_checkpoint
from megafp8.checkpoint.hf.write import meta
from megafp8.checkpoint.index import INDEX_FILE
from megafp8.checkpoint.resume import find_checkpoint


@dataclass(frozen=True)
class Opened:
    """title: what it is; tensors: name -> dtype and shape (on "meta"); read: a tensor by name, FP8 dequantized."""

    title: str
    tensors: Mapping[str, Tensor]
    read: Callable[[str], Tensor]

    @property
    def groups(self) -> dict[str, tuple[int, int, int]]:
        """First component of the names -> number of tensors, elements, bytes. A model of theirs is one group."""
        found: dict[str, tuple[int, int, int]] = {}
        for name, tensor in self.tensors.items():
            group = name.partition("/")[0] if "/" in name else "model"
            count, elements, size = found.get(group, (0, 0, 0))
            found[group] = (count + 1, elements + tensor.numel(), size + tensor.nbytes)
        return found


@contextmanager
def open_any(path: Path, step: int | None = None) -> Iterator[Opened]:
    """Opens a checkpoint, a directory of them (the latest, or iteration `step`), or a Hugging Face model.

    Raises ValueError, one line, for anything else, and for what is damaged.
    """
    if (path / INDEX_FILE).is_file() or saved_iterations(path):
        found = find_checkpoint(path, step)
        with open_checkpoint(found, ("",)) as stored:
            tensors = {name: meta(record.shape, record.dtype) for name, record in sorted(stored.records.items())}
            yield Opened(f"checkpoint of iteration {found.iteration}, {found.directory}", tensors, stored.read)
        return
    if not (path / CONFIG).exists():
        raise ValueError(f"{path} holds neither a checkpoint of megafp8 nor a Hugging Face model")
    hf = read_config(path)
    with open_source(path, family_of(hf), hf) as source:
        tensors = {name: meta(s.shape, s.dtype) for name, s in sorted(source.tensors.items())}
        precision = " in block-FP8" if source.fp8 else ""
        yield Opened(f"Hugging Face model {hf.text('model_type')}{precision}, {path}", tensors, source.read)


def differences_of(a: Opened, b: Opened, count: Callable[[Tensor], Tensor]) -> list[str]:
    """A line for each tensor that is not the same, bit for bit, on both sides. count: is called with each one read."""
    lines = [f"only in the first: {name}" for name in a.tensors if name not in b.tensors]
    lines += [f"only in the second: {name}" for name in b.tensors if name not in a.tensors]
    for name in a.tensors:
        if name in b.tensors and (line := _difference(a, b, name, count)):
            lines.append(f"{name}: {line}")
    return lines


def _difference(a: Opened, b: Opened, name: str, count: Callable[[Tensor], Tensor]) -> str | None:
    x, y = a.tensors[name], b.tensors[name]
    if x.shape != y.shape:
        return f"shape {list(x.shape)} and {list(y.shape)}"
    dtypes = "" if x.dtype == y.dtype else f"{x.dtype} and {y.dtype}, "
    left, right = count(a.read(name)), b.read(name)
    if left.dtype == right.dtype and _same_bits(left, right):
        return dtypes + "equal values" if dtypes else None
    if not left.dtype.is_floating_point:
        return dtypes + f"{int((left != right).sum())} of {left.numel()} elements differ"
    left, right = left.double(), right.double()
    largest = (left - right).abs().max().item() if left.numel() else 0.0
    relative = ((left - right).norm() / left.norm().clamp(min=1e-300)).item()
    return dtypes + (f"differ by {largest:.3e} at most, {relative:.3e} of the norm" if largest else "equal values")


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
