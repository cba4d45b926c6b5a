"""What storage is made to do, on the kernels of the device at hand: the reference's bytes and values, faster."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from megafp8.fp8 import reference
from megafp8.fp8.formats import OperandSpec, Tile


@cache
def kernels(name: str) -> ModuleType | None:
    """That module of `kernels/`, imported when it is first asked for; None where Triton is not installed."""
    try:
        return import_module(f"megafp8.kernels.{name}")
    except ImportError:
        return None


def dequantize(data: Tensor, scale_inv: Tensor, tile: Tile, dtype: torch.dtype = torch.float32) -> Tensor:
    """`reference.dequantize`, of one operand or of a stack of them, `[G, M, K]` with scales `[G, ...]`."""
    own = kernels("dequantize") if data.is_cuda else None
    if own is not None and own.supports(data, scale_inv):
        return own.dequantize(data, scale_inv, tile, dtype)
    if data.dim() == 3:
        return torch.stack([reference.dequantize(*one, tile, dtype) for one in zip(data, scale_inv, strict=True)])
    return reference.dequantize(data, scale_inv, tile, dtype)


def flip(data: Tensor, scale_inv: Tensor, tile: Tile) -> tuple[Tensor, Tensor]:
    """`reference.flip`."""
    own = kernels("quantize_derive") if data.is_cuda else None
    if own is None:
        return reference.flip(data, scale_inv, tile)
    return own.transpose(data), (scale_inv if tile.kind == "tensor" else scale_inv.t())


def transpose(data: Tensor) -> Tensor:
    """`reference.transpose`."""
    own = kernels("quantize_derive") if data.is_cuda else None
    return reference.transpose(data) if own is None else own.transpose(data)


def transpose_each(data: Tensor) -> Tensor:
    """`reference.transpose` of each of `[G, N, K]`: `[G, K, N]`."""
    own = kernels("quantize_derive") if data.is_cuda else None
    if own is not None:
        return own.transpose(data)
    return data.view(torch.uint8).transpose(1, 2).contiguous().view(data.dtype)


def derive_colwise(data: Tensor, scale_inv: Tensor, spec: OperandSpec) -> tuple[Tensor, Tensor]:
    """`reference.derive_colwise`."""
    own = kernels("quantize_derive") if data.is_cuda else None
    if own is None or spec.tile.block not in (16, 32, 64, 128):
        return reference.derive_colwise(data, scale_inv, spec)
    return own.derive_colwise(data, scale_inv, spec)


def zero(device: torch.device, count: int = 1) -> Tensor:
    """FP32 [count], zeros, on the current stream: places for amaxes."""
    own = kernels("zeros") if device.type == "cuda" else None
    if own is None:
        return torch.zeros(count, dtype=torch.float32, device=device)
    return own.zeros(count, torch.float32, device)


def expert_kernels(x: Tensor, block: int) -> ModuleType | None:
    """Kernels for one scale an expert; None where there are none for `x`, or for experts that begin at multiples of
    `block` rows."""
    own = kernels("quantize_experts") if x.is_cuda else None
    return own if own is not None and block % own.ALIGNMENT == 0 else None


def pick(x: Tensor, index: Tensor, fill: float = 0) -> Tensor:
    """Rows `index` (int64) of `x [T, K]`, `fill` where that is negative."""
    own = kernels("permute") if x.is_cuda and not fill else None
    if own is not None and len(x) and own.supports(x):
        return own.spread(x, index)
    if not len(x):
        return x.new_full((len(index), *x.shape[1:]), fill)
    return x[index.clamp(min=0)].masked_fill_((index < 0)[:, None], fill)


def together(data: Tensor) -> Tensor:
    """FP8 rows that lie apart, copied together."""
    own = kernels("permute") if data.is_cuda else None
    if own is None:
        return data.view(torch.uint8).contiguous().view(data.dtype)
    rows = torch.arange(len(data), device=data.device)
    return own.spread(data.view(torch.uint8), rows).view(data.dtype)


def pick_and_quantize(
    x: Tensor | tuple[Tensor, Tensor], index: Tensor, spec: OperandSpec, colwise: bool, derived: bool
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None] | None:
    """Rows `index` (zeros where negative) of `x`, high precision or rowwise bytes, quantized: (rowwise, colwise).

    derived: the colwise copy comes from the rowwise bytes. None where no kernel does it in one pass.
    """
    own = kernels("quantize_derive") if (x if isinstance(x, Tensor) else x[0]).is_cuda else None
    if own is None or spec.tile.kind != "1d" or spec.tile.block not in (16, 32, 64, 128):
        return None
    return own.quantize_grouped(x, None, spec, True, colwise, index=index, derived=derived)
