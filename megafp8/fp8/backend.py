"""What storage is made to do, on the kernels of the device at hand: the reference's bytes and values, faster."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from megafp8.fp8 import reference
from megafp8.fp8.formats import OperandSpec, Tile


@cache
def _kernels() -> tuple[ModuleType, ModuleType] | None:
    """(dequantize, quantize_derive); None where Triton is not installed."""
    try:
        from megafp8.kernels import dequantize, quantize_derive
    except ImportError:
        return None
    return dequantize, quantize_derive


def dequantize(data: Tensor, scale_inv: Tensor, tile: Tile, dtype: torch.dtype = torch.float32) -> Tensor:
    """`reference.dequantize`, of one operand or of a stack of them, `[G, M, K]` with scales `[G, ...]`."""
    kernels = _kernels() if data.is_cuda else None
    if kernels is not None and kernels[0].supports(data, scale_inv):
        return kernels[0].dequantize(data, scale_inv, tile, dtype)
    if data.dim() == 3:
        return torch.stack([reference.dequantize(*one, tile, dtype) for one in zip(data, scale_inv, strict=True)])
    return reference.dequantize(data, scale_inv, tile, dtype)


def flip(data: Tensor, scale_inv: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """`reference.flip`."""
    kernels = _kernels() if data.is_cuda else None
    if kernels is None:
        return reference.flip(data, scale_inv, tile)
    return kernels[1].transpose(data), (scale_inv if tile.kind == "tensor" else scale_inv.t())


def transpose(data: Tensor) -> Tensor:
    """`reference.transpose`."""
    kernels = _kernels() if data.is_cuda else None
    return reference.transpose(data) if kernels is None else kernels[1].transpose(data)


def transpose_each(data: Tensor) -> Tensor:
    """`reference.transpose` of each of `[G, N, K]`: `[G, K, N]`."""
    kernels = _kernels() if data.is_cuda else None
    if kernels is not None:
        return kernels[1].transpose(data)
    return data.view(torch.uint8).transpose(1, 2).contiguous().view(data.dtype)


def derive_colwise(data: Tensor, scale_inv: Tensor, spec: OperandSpec) -> tuple[Tensor, Tensor]:
    """`reference.derive_colwise`."""
    kernels = _kernels() if data.is_cuda else None
    if kernels is None or spec.tile.block not in (16, 32, 64, 128):
        return reference.derive_colwise(data, scale_inv, spec)
    return kernels[1].derive_colwise(data, scale_inv, spec)


@cache
def _fresh_zeros() -> Callable[[int, torch.dtype, torch.device], Tensor] | None:
    try:
        from megafp8.kernels.zeros import zeros
    except ImportError:
        return None
    return zeros


def zero(device: torch.device, count: int = 1) -> Tensor:
    """FP32 [count], zeros, on the current stream: places for amaxes."""
    make = _fresh_zeros() if device.type == "cuda" else None
    if make is None:
        return torch.zeros(count, dtype=torch.float32, device=device)
    return make(count, torch.float32, device)


@cache
def row_kernels() -> ModuleType | None:
    """Rows copied and summed by index; None where Triton is not installed."""
    try:
        from megafp8.kernels import permute
    except ImportError:
        return None
    return permute


@cache
def choice_kernels() -> ModuleType | None:
    """The largest scores of tokens; None where Triton is not installed."""
    try:
        from megafp8.kernels import best_experts
    except ImportError:
        return None
    return best_experts


@cache
def place_kernels() -> ModuleType | None:
    """Rows found for the choices of tokens; None where Triton is not installed."""
    try:
        from megafp8.kernels import place_rows
    except ImportError:
        return None
    return place_rows


@cache
def _expert_kernels() -> ModuleType | None:
    try:
        from megafp8.kernels import quantize_experts
    except ImportError:
        return None
    return quantize_experts


def expert_kernels(x: Tensor, block: int) -> ModuleType | None:
    """Kernels for one scale an expert; None where there are none for `x`, or for experts that begin at multiples of
    `block` rows."""
    kernels = _expert_kernels() if x.is_cuda else None
    return kernels if kernels is not None and block % kernels.ALIGNMENT == 0 else None


def pick(x: Tensor, index: Tensor, fill: float = 0) -> Tensor:
    """Rows `index` (int64) of `x [T, K]`, `fill` where that is negative."""
    kernels = row_kernels() if x.is_cuda and not fill else None
    if kernels is not None and len(x) and kernels.supports(x):
        return kernels.spread(x, index)
    if not len(x):
        return x.new_full((len(index), *x.shape[1:]), fill)
    return x[index.clamp(min=0)].masked_fill_((index < 0)[:, None], fill)


def together(data: Tensor) -> Tensor:
    """FP8 rows that lie apart, copied together."""
    kernels = row_kernels() if data.is_cuda else None
    if kernels is None:
        return data.view(torch.uint8).contiguous().view(data.dtype)
    rows = torch.arange(len(data), device=data.device)
    return kernels.spread(data.view(torch.uint8), rows).view(data.dtype)


def pick_and_quantize(
    x: Tensor | tuple[Tensor, Tensor], index: Tensor, spec: OperandSpec, colwise: bool, derived: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None] | None:
    """Rows `index` (zeros where negative) of `x`, high precision or rowwise bytes, quantized: (rowwise, colwise).

    derived: the colwise copy comes from the rowwise bytes. None where no kernel does it in one pass.
    """
    device = (x if isinstance(x, Tensor) else x[0]).device
    kernels = _kernels() if device.type == "cuda" else None
    if kernels is None or spec.tile.kind != "1d" or spec.tile.block not in (16, 32, 64, 128):
        return None
    return kernels[1].quantize_grouped(x, None, spec, True, colwise, index=index, derived=derived)
