"""Quantization on the GPU: the functions of `fp8/reference.py` with the same arguments, results and bytes.

A `Spec` says how an operand is stored (`fp8.formats.OperandSpec` is one; this package imports nothing from `fp8`).
Results are pairs (data, scale_inv): rowwise `[M, K]`, colwise physically transposed `[K, M]`, scales in the layout of
GEMMs: 1D scales M-major (strides `[1, ld]`), 2D scales row-major, the other stride padded to 16 bytes. The padding is
not initialized. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from .launch import launch
from .quantize_configs import chosen
from .quantize_tensorwise import amax_kernel, cast_kernel, finish_amax_kernel
from .quantize_tiles import quantize_1d_kernel, quantize_2d_kernel, tile_amax_kernel

Stored = tuple[Tensor, Tensor]
BLOCK = 128  # edge of the register tiles; quantization tiles must divide it
_SCALE_KINDS = {"fp32": 0, "pow2": 1, "e8m0": 2}


class Spec(Protocol):
    """How one operand is stored: format (dtype, fmax), tile (kind, block), scale (an enum), amax_epsilon."""

    format: Any
    tile: Any
    scale: Any
    amax_epsilon: float


def supports(spec: Spec) -> bool:
    """Whether these kernels know the tile: any tensor tile, 1D and 2D tiles of 16, 32, 64 or 128."""
    return spec.tile.kind == "tensor" or spec.tile.block in (16, 32, 64, 128)


def spec_arguments(spec: Spec) -> dict:
    """The spec as the kernels' compile-time arguments."""
    return {"SPEC": (spec.format.fmax, spec.tile.block or 0, _SCALE_KINDS[spec.scale.value])}


def allocate(rows: int, columns: int, spec: Spec, device: torch.device, groups: int = 1) -> Stored:
    """Uninitialized (data, scale_inv) of a stored `[rows, columns]` operand; of a tensor tile [groups] scales."""
    data = torch.empty(rows, columns, dtype=spec.format.dtype, device=device)
    if spec.tile.kind == "tensor":
        return data, torch.empty(groups, dtype=torch.float32, device=device)
    block, kind = spec.tile.block, spec.tile.kind
    dtype = torch.float8_e8m0fnu if spec.scale.value == "e8m0" else torch.float32
    return data, allocate_scales(rows if kind == "1d" else -(-rows // block), -(-columns // block), kind, dtype, device)


def allocate_scales(rows: int, columns: int, kind: str, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialized scales `[rows, columns]`: 1D contiguous along rows, 2D along columns, padded to 16 bytes."""
    step = 16 // dtype.itemsize
    if kind == "1d":
        if rows % step == 0:
            return torch.empty_strided((rows, columns), (1, rows), dtype=dtype, device=device)
        return torch.empty(columns, -(-rows // step) * step, dtype=dtype, device=device)[:, :rows].t()
    padded = -(-columns // step) * step
    scales = torch.empty(rows, padded, dtype=dtype, device=device)
    return scales if padded == columns else scales[:, :columns]


def scale_ld(stored: Stored | None) -> int:
    """The stride of scales that is not 1."""
    if stored is None:
        return 0
    strides = stored[1].stride()
    return strides[1] if strides[0] == 1 and stored[1].dim() == 2 else strides[0]


def quantize(
    x: Tensor,
    spec: Spec,
    rowwise: bool = True,
    colwise: bool = False,
    amax: Tensor | None = None,
    amax_colwise: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    amax_out: Tensor | None = None,
    share: Callable[[Tensor], object] | None = None,
    noop: Tensor | None = None,
    out: tuple[Stored | None, Stored | None] | None = None,
) -> tuple[Stored | None, Stored | None]:
    """Quantizes `x [M, K]` of any strides: (data, scale_inv) rowwise and colwise, None where not asked for.

    amax, amax_colwise: FP32 amaxes of the tiles, in the shape of the scales, instead of x's own; tensor and 2D tiles
        have one for both orientations.
    scale: FP32, one element, for tensor tiles (delayed scaling).
    amax_out: FP32, one element, tensor tiles: receives the amax; with `scale` it is only ever raised (a slot of a
        history that several microbatches share).
    share: tensor tiles: called once with x's own amax, FP32 [1], before x is quantized, to overwrite it with the
        maximum over the ranks; amax_out receives that. Without `amax` and `scale`.
    noop: one integer element on x's device; where it is not 0, nothing is written.
    out: the pair to write into, as an earlier call returned it.
    Raises ValueError for what the kernels don't know.
    """
    _check(x, spec, rowwise, colwise)
    if share is not None and (spec.tile.kind != "tensor" or amax is not None or scale is not None):
        raise ValueError("quantize: share is for a tensor tile's own amax, not for a given one or a scale")
    x, (M, K) = readable(x), x.shape
    row, col = out or (
        allocate(M, K, spec, x.device) if rowwise else None,
        allocate(K, M, spec, x.device) if colwise else None,
    )
    if spec.tile.kind == "tensor":
        if row and col:
            col = (col[0], row[1])  # one scale for both
        if share is not None:
            amax, amax_out = _finished(_partial_amaxes(x), amax_out), None
            share(amax)
        _quantize_tensorwise(x, spec, row, col, amax, scale, amax_out, noop)
    elif M and K:
        run = _quantize_1d if spec.tile.kind == "1d" else _quantize_2d
        run(x, spec, row, col, amax, amax_colwise, noop)
    return row, col


def amax(x: Tensor, tile: Any, orientation: str = "rowwise") -> Tensor:
    """Largest absolute finite value of each tile, FP32, in the shape of that orientation's scales."""
    x, (M, K) = readable(x), x.shape
    if tile.kind == "tensor":
        return _finished(_partial_amaxes(x))
    block = tile.block
    rows, columns = -(-M // block), -(-K // block)
    shape = {"1d": {"rowwise": (columns, M), "colwise": (rows, K)}}.get(tile.kind, {}).get(orientation, (rows, columns))
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    if out.numel():
        wanted = orientation if tile.kind == "1d" else "square"
        tile_amax_kernel[(-(-M // BLOCK) * -(-K // BLOCK),)](
            x, *(out if wanted == w else None for w in ("rowwise", "colwise", "square")), M, K, *x.stride(), B=block,
            BLOCK=BLOCK, R=4, C=16, W=8, num_warps=8,
        )
    return out.t() if tile.kind == "1d" or orientation == "colwise" else out


def _quantize_1d(x, spec, row, col, amax, amax_colwise, noop) -> None:
    if _is_transposed(x):
        x, row, col, amax, amax_colwise = x.t(), col, row, amax_colwise, amax
    config = chosen("rows" if not col else "columns" if not row else "both" if spec.tile.block > 32 else "both of 32")
    amax, amax_colwise = _blocks_first(amax), _blocks_first(amax_colwise)
    facts = spec, config, x.shape, x.stride(), scale_ld(row), scale_ld(col)
    tensors = x, *(row or (None, None)), amax, *(col or (None, None)), amax_colwise, noop
    launch(quantize_1d_kernel, facts, tensors, lambda: (
        config.grid(*x.shape, x.device),
        (x, *pointers(row), amax, *pointers(col), amax_colwise, noop, *x.shape, *x.stride(), scale_ld(row),
         scale_ld(col), tile_epsilon(spec)),
        {"EVEN": config.even(*x.shape), "ROWS": config.rows, **spec_arguments(spec), **config.options()},
    ))  # fmt: skip


def _quantize_2d(x, spec, row, col, amax, amax_colwise, noop) -> None:
    if _is_transposed(x):
        x, row, col, amax = x.t(), col, row, amax.t() if amax is not None else None
    config = chosen("squares" if spec.tile.block > 32 else "squares of 32")
    amax = amax.contiguous() if amax is not None else None
    facts = spec, config, x.shape, x.stride(), scale_ld(row), scale_ld(col)
    tensors = x, *(row or (None, None)), *(col or (None, None)), amax, noop
    launch(quantize_2d_kernel, facts, tensors, lambda: (
        config.grid(*x.shape, x.device),
        (x, *pointers(row), *pointers(col), amax, noop, *x.shape, *x.stride(), scale_ld(row), scale_ld(col),
         tile_epsilon(spec)),
        {"EVEN": config.even(*x.shape), **spec_arguments(spec), **config.options()},
    ))  # fmt: skip


def _quantize_tensorwise(x, spec, row, col, amax, scale, amax_out, noop) -> None:
    partials = None
    if scale is None:
        partials = _partial_amaxes(x) if amax is None else amax
    if _is_transposed(x):
        x, row, col = x.t(), col, row
    if x.is_contiguous() and col is None:
        x = x.view(1, x.numel())
    config = chosen("cast" if x.shape[0] == 1 and col is None else "cast transposed")
    count = partials.numel() if partials is not None else 0
    scale_inv = (row or col)[1]
    tensors = x, row and row[0], col and col[0], partials, scale, scale_inv, amax_out, noop
    launch(cast_kernel, (spec, config, x.shape, x.stride(), count), tensors, lambda: (
        config.grid(*x.shape, x.device),
        (x, pointers(row)[0], pointers(col)[0], *tensors[3:], *x.shape, *x.stride(), count, tile_epsilon(spec)),
        {**spec_arguments(spec), "PARTIALS": triton.next_power_of_2(max(count, 1)), "EVEN": config.even(*x.shape),
         **config.options()},
    ))  # fmt: skip


def _partial_amaxes(x: Tensor) -> Tensor:
    """FP32 [programs]: maxima of absolute finite values of x's parts; their maximum is x's amax."""
    if x.numel() == 0:
        return torch.zeros(1, dtype=torch.float32, device=x.device)
    x = x.t() if _is_transposed(x) else x
    x, config = (x.view(1, -1), chosen("amax")) if x.is_contiguous() else (x, chosen("amax strided"))
    grid = config.grid(*x.shape, x.device)
    partials = torch.empty(grid[0], dtype=torch.float32, device=x.device)
    launch(amax_kernel, (config, x.shape, x.stride()), (x, partials), lambda: (
        grid, (x, partials, *x.shape, *x.stride()), {"EVEN": config.even(*x.shape), **config.options()}
    ))  # fmt: skip
    return partials


def _finished(partials: Tensor, out: Tensor | None = None) -> Tensor:
    """FP32 [1], `out` if there is one: the maximum of `_partial_amaxes`."""
    out = torch.empty(1, dtype=torch.float32, device=partials.device) if out is None else out
    count = partials.numel()
    launch(finish_amax_kernel, count, (partials, out), lambda: (
        (1,), (partials, out, count), {"PARTIALS": triton.next_power_of_2(count), "W": 4, "num_warps": 4}
    ))  # fmt: skip
    return out


def pointers(stored: Stored | None) -> tuple[Tensor | None, Tensor | None]:
    """(data, scale_inv) as kernel arguments: FP8 data and E8M0 scales as their bytes."""
    if stored is None:
        return None, None
    data, scale_inv = stored
    return data.view(torch.uint8), scale_inv.view(torch.uint8) if scale_inv.dtype != torch.float32 else scale_inv


def readable(x: Tensor) -> Tensor:
    """x, or a copy if neither its rows nor its columns are contiguous (every second column, say)."""
    return x if 1 in x.stride() else x.contiguous()


def _is_transposed(x: Tensor) -> bool:
    """Whether x's columns are contiguous and its rows are not: then kernels read x.t(), rows and columns swapped."""
    return x.stride(0) == 1 and x.stride(1) != 1


def _blocks_first(amax: Tensor | None) -> Tensor | None:
    """Given amaxes of 1D tiles, contiguous as [blocks, rows]; those that `amax` returns are so already."""
    return None if amax is None else amax.t().contiguous()


def tile_epsilon(spec: Spec) -> float:
    """The floor under amaxes; E8M0 scales have none."""
    return 0.0 if spec.scale.value == "e8m0" else spec.amax_epsilon


def _check(x: Tensor, spec: Spec, rowwise: bool, colwise: bool) -> None:
    if x.dim() != 2 or not x.dtype.is_floating_point:
        raise ValueError(f"quantize: expected a 2-D floating point tensor, got {x.dtype} {tuple(x.shape)}")
    if not (rowwise or colwise):
        raise ValueError("quantize: ask for rowwise=True, colwise=True or both")
    if not supports(spec):
        raise ValueError(f"quantize: no kernel for {spec.tile}: 1D and 2D tiles are 16, 32, 64 or 128 wide")
