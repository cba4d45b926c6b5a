"""A directory of a Hugging Face model: which tensors it holds, and reading them one at a time.

The directory may come from anywhere. Before a tensor is read every file is known to be a regular file within the
directory (links are not followed), every header to be whole and to describe exactly the bytes that are there, and
every shape to fit. No pickle: of weights, only safetensors are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megafp8.checkpoint.hf.block_fp8 import SCALE_SUFFIX, BlockFP8, dequantize, grid
from megafp8.checkpoint.hf.family import Family, canonical
from megafp8.checkpoint.hf.values import Values, read_json
from megafp8.checkpoint.index import FILE_NAME
from megafp8.checkpoint.tensor_file import DTYPES, DamagedFileError, check_regular

CONFIG = "config.json"
WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Stored:
    """Where a tensor lies. scale: name of its block scales, None unless it is FP8."""

    file: str
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    scale: str | None = None


class Source:
    """The tensors of an open directory, under the family's names. fp8: how its FP8 weights are scaled, or None."""

    def __init__(self, directory: Path, tensors: dict[str, Stored], scales: dict[str, Stored], handles, fp8):
        self.directory, self.tensors, self.fp8 = directory, tensors, fp8
        self._scales, self._handles = scales, handles

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: stored.shape for name, stored in self.tensors.items()}

    def read(self, name: str) -> Tensor:
        """A tensor in its stored dtype; FP8 ones dequantized, in FP32."""
        stored = self.tensors[name]
        tensor = self._get(stored)
        if stored.scale is None:
            return tensor
        return dequantize(tensor, self._get(self._scales[stored.scale]), self.fp8.block)

    def power_of_two_scales(self) -> bool:
        """Whether all scales of FP8 tensors are powers of two (no mantissa bits). Reads them, one at a time."""
        return all((torch.frexp(self._get(s).float()).mantissa == 0.5).all() for s in self._scales.values())

    def _get(self, stored: Stored) -> Tensor:
        return self._handles[stored.file].get_tensor(stored.key)


@contextmanager
def open_source(directory: Path, family: Family, hf: Values) -> Iterator[Source]:
    """Opens the weights in `directory`. Raises ValueError (DamagedFileError for files that aren't whole)."""
    fp8 = BlockFP8.of(hf)
    with ExitStack() as stack:
        handles, found = {}, {}
        for file in _files(directory):
            handles[file] = stack.enter_context(_open(directory, file))
            for key in handles[file].keys():  # noqa: SIM118 - safe_open is no dict
                name = canonical(key, family)
                if name in found:
                    raise DamagedFileError(f"{directory}: '{name}' is in {found[name].file} and in {file}")
                found[name] = _stored(directory, file, key, handles[file])
        scales = {name: stored for name, stored in found.items() if name.endswith(SCALE_SUFFIX)}
        tensors = {
            name: _with_scale(directory, name, stored, scales, fp8)
            for name, stored in found.items()
            if name not in scales
        }
        if unused := scales.keys() - {s.scale for s in tensors.values()}:
            raise ValueError(f"{directory}: '{min(unused)}' scales no FP8 tensor")
        yield Source(directory, tensors, scales, handles, fp8)


def read_config(directory: Path) -> Values:
    """The checked-on-access content of config.json. Raises ValueError."""
    if not directory.is_dir():
        raise ValueError(f"--hf {directory}: no such directory")
    check_regular(directory, CONFIG)
    return Values(read_json(directory / CONFIG), str(directory / CONFIG))


def _files(directory: Path) -> Sequence[str]:
    """Names of the safetensors files: those of the index, or the one file."""
    if not (directory / WEIGHTS_INDEX).exists():
        if not (directory / WEIGHTS).exists() and not (directory / WEIGHTS).is_symlink():
            raise ValueError(
                f"{directory} has neither {WEIGHTS} nor {WEIGHTS_INDEX}: other formats (pickled .bin files) are not "
                "read; save the model as safetensors"
            )
        return (WEIGHTS,)
    check_regular(directory, WEIGHTS_INDEX)
    weight_map = read_json(directory / WEIGHTS_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise DamagedFileError(f"{directory / WEIGHTS_INDEX} has no weight_map")
    for file in weight_map.values():
        if not isinstance(file, str) or not FILE_NAME.fullmatch(file):
            raise DamagedFileError(f"{directory / WEIGHTS_INDEX}: {file!r} is not a plain file name")
    return sorted(set(weight_map.values()))


@contextmanager
def _open(directory: Path, file: str):
    try:
        check_regular(directory, file)
    except DamagedFileError as error:
        raise DamagedFileError(f"{error}: download the model with `hf download NAME --local-dir DIR`") from None
    try:
        handle = safe_open(directory / file, framework="pt", device="cpu")
    except FileNotFoundError:
        raise DamagedFileError(f"{directory / file} is missing") from None
    except (SafetensorError, OSError) as error:
        raise DamagedFileError(f"{directory / file} is damaged or no safetensors file: {error}") from None
    with handle as opened:
        yield opened


def _stored(directory: Path, file: str, key: str, handle) -> Stored:
    part = handle.get_slice(key)
    if part.get_dtype() not in DTYPES:
        raise ValueError(f"{directory / file}: '{key}' is {part.get_dtype()}, which is not read here")
    return Stored(file, key, DTYPES[part.get_dtype()], tuple(part.get_shape()))


def _with_scale(directory: Path, name: str, stored: Stored, scales: dict[str, Stored], fp8: BlockFP8 | None) -> Stored:
    """The same with the name of its scales, when it is FP8 and they fit."""
    if stored.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        return stored
    scale = name.removesuffix("weight") + SCALE_SUFFIX
    if fp8 is None or scale not in scales:
        raise ValueError(f"{directory}: '{name}' is FP8, but has no block scales ('{SCALE_SUFFIX}') to read it with")
    expected = grid(stored.shape, fp8.block)
    if scales[scale].shape != expected or scales[scale].dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"{directory}: '{scale}' is {scales[scale].dtype} {list(scales[scale].shape)}; blocks of {list(fp8.block)} "
            f"make it float32 {list(expected)}"
        )
    return Stored(stored.file, stored.key, stored.dtype, stored.shape, scale)
