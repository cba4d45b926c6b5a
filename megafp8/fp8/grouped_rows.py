"""Rows of tokens for grouped linears: picked, quantized by row, and packed for the wire.

A row is quantized by itself, whatever its neighbours, so it may be quantized before it is copied to its expert, before
it travels or after: the bytes are the same. The colwise copy is made where the rows lie by expert. It is derived from
the bytes wherever they could have travelled (power-of-two scales, 1D tiles), so that it doesn't depend on whether they
did; else it comes from the values. Where each expert has one scale rows are quantized where they lie by expert, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megafp8.fp8 import backend
from megafp8.fp8.expert_scales import Groups
from megafp8.fp8.formats import Scale
from megafp8.fp8.producer import Want
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.storage import Quantized, QuantizedStorage, gemm_layout
from megafp8.fp8.tensor import QuantizedTensor


@dataclass(frozen=True)
class RowSpec:
    """What a grouped linear wants of the rows it is given.

    quantizer: None for high precision. colwise: backward needs that copy. alignment: each expert's rows begin at a
    multiple of it, rows of zeros between; None: experts run one by one. each: where each expert has one scale, of all
    its rows, how they are wanted (but for where they lie).
    """

    quantizer: Quantizer | None = None
    colwise: bool = False
    alignment: int | None = None
    each: Want | None = None


def travels(quantizer: Quantizer) -> bool:
    """Whether rows may travel in FP8: each has its own scales, and the colwise copy can be derived from its bytes."""
    spec = quantizer.spec
    return spec.tile.kind == "1d" and spec.scale is not Scale.FP32


def take_rows(
    x: Tensor | QuantizedStorage,
    index: Tensor,
    spec: RowSpec,
    dtype: torch.dtype,
    ends: Tensor | None = None,
    *,
    derives: bool = True,
) -> Tensor | QuantizedTensor:
    """Rows `index` (int64 [R]; -1: zeros) of `x` [T, K], high precision or rowwise FP8, as `spec` wants them.

    ends: int32 [G], one past each expert's last row; only `spec.each` asks for it. derives: the colwise copy comes from
    the bytes where those could have travelled; else it comes from the values.
    """
    quantizer = spec.quantizer
    if spec.each is not None:
        x = x if isinstance(x, Tensor) else x.dequantize(dtype)
        want = spec.each.of_experts(Groups(ends, len(index), spec.alignment)).measuring(x.device)
        quantized = want.quantize(x, index)
        want.measured()
        return QuantizedTensor(quantized, dtype)
    if quantizer is None:
        return backend.pick(x if isinstance(x, Tensor) else x.dequantize(dtype), index)
    derived = derives and travels(quantizer)
    source = x if isinstance(x, Tensor) else (x.data, x.scale_inv)
    if (pair := backend.pick_and_quantize(source, index, quantizer.spec, spec.colwise, derived)) is not None:
        row, col = quantizer.store(pair[0], "rowwise"), quantizer.store(pair[1], "colwise")
        return QuantizedTensor(Quantized(row, col), dtype)
    if isinstance(x, Tensor) and not derived:
        return QuantizedTensor(quantizer.quantize(backend.pick(x, index), True, spec.colwise), dtype)
    stored = quantizer.quantize(x, rowwise=True).rowwise if isinstance(x, Tensor) else x
    rows = _pick_stored(stored, index, quantizer)
    return QuantizedTensor(Quantized(rows, quantizer.derive_colwise(rows) if spec.colwise else None), dtype)


def _pick_stored(x: QuantizedStorage, index: Tensor, quantizer: Quantizer) -> QuantizedStorage:
    """Rows of 1D-tiled storage; what is filled up has the bytes and scales of zeros."""
    data = backend.pick(x.data.view(torch.uint8), index).view(x.data.dtype)
    if x.scale is Scale.E8M0:
        scale_inv = backend.pick(x.scale_inv.view(torch.uint8), index).view(x.scale_inv.dtype)
    else:
        of_zeros = quantizer.scales(torch.zeros(1))[1].item()  # the scale of the floor under amaxes, if there is one
        scale_inv = gemm_layout(backend.pick(x.scale_inv, index, of_zeros), x.tile)
    return QuantizedStorage(data, scale_inv, x.tile, x.scale, x.orientation)


def row_bytes(quantizer: Quantizer, features: int) -> int:
    """Bytes of a packed row: a byte a feature, and its scales."""
    scales = quantizer.spec.tile.scale_shape(1, features)[1]
    return features + scales * (1 if quantizer.spec.scale is Scale.E8M0 else 4)


def pack(rows: QuantizedStorage) -> Tensor:
    """uint8 `[T, row_bytes]`: each row's data, then its scales."""
    scales = rows.scale_inv.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return torch.cat([rows.data.view(torch.uint8), scales], 1)


def unpack(quantizer: Quantizer, packed: Tensor, features: int) -> QuantizedStorage:
    """The rows that were packed, `[T, features]`, for those who pick them; data are a view, whose rows lie apart, and
    scales another where FP32 may lie there."""
    spec = quantizer.spec
    data, scales = packed.split([features, packed.shape[1] - features], 1)
    scale_dtype = torch.float8_e8m0fnu if spec.scale is Scale.E8M0 else torch.float32
    size = scale_dtype.itemsize
    if packed.stride(0) % size or (packed.storage_offset() + features) % size or len(packed) == 1:
        scales = scales.clone(memory_format=torch.contiguous_format)  # of one row too
    scale_inv = scales.view(scale_dtype)
    assert tuple(scale_inv.shape) == spec.tile.scale_shape(*data.shape), packed.shape
    return QuantizedStorage(data.view(spec.format.dtype), scale_inv, spec.tile, spec.scale, "rowwise")


def unpack_values(quantizer: Quantizer, packed: Tensor, features: int, dtype: torch.dtype) -> Tensor:
    """Their values, in `dtype`."""
    rows = unpack(quantizer, packed, features)
    return replace(rows, data=backend.together(rows.data)).dequantize(dtype)
