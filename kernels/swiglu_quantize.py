"""SwiGLU and its gradient fused with the quantization of their results.

fc1's output is [T, 2f]: gate columns, then up columns. Forward: y = silu(gate) * up (* a weight a row), the input of
fc2. Backward, from dy and fc1's output: d(fc1 output) in both orientations (fc1's dgrad and wgrad), and y once more,
colwise, for fc2's wgrad, so that forward need not keep it. Results are rounded to the compute dtype before they are
quantized, so the bytes are the quantizer's bytes of the rounded values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
from torch import Tensor

from .launch import launch
from .quantize import BLOCK, Stored, allocate, pointers, quantize, scale_ld, spec_arguments, tile_epsilon
from .quantize_configs import Config, chosen
from .quantize_producer import UNSCALED, Share, TensorScaling, allocate_pair, check_spec
from .swiglu_kernels import swiglu_amax_kernel, swiglu_grad_amax_kernel, swiglu_grad_kernel, swiglu_kernel
from .zeros import zeros

if TYPE_CHECKING:
    from .quantize import Spec

_WALK = 32  # rows of one expert that a program of a first pass walks over


class SwigluQuantized(NamedTuple):
    """rowwise, colwise: (data, scale_inv) of y [T, f], or None; y: compute dtype [T, f], or None; x_rowwise: fc1's
    output [T, 2f] as bytes, or None."""

    rowwise: Stored | None
    colwise: Stored | None
    y: Tensor | None
    x_rowwise: Stored | None = None


class SwigluGradQuantized(NamedTuple):
    """rowwise, colwise: d(fc1 output) [T, 2f]; y_colwise: (data [f, T], scale_inv); dx: compute dtype [T, 2f];
    dweights: FP32 [T]. None where not asked for."""

    rowwise: Stored | None
    colwise: Stored | None
    y_colwise: Stored | None
    dx: Tensor | None
    dweights: Tensor | None


def swiglu_quantize(x: Tensor | Stored, spec: Spec, *, weights: Tensor | None = None, rowwise: bool = True,
                    colwise: bool = False, high_precision: bool = False, amax: Tensor | None = None,
                    scale: Tensor | None = None, amax_out: Tensor | None = None, share: Share | None = None,
                    x_spec: Spec | None = None, dtype: torch.dtype = torch.bfloat16,
                    ends: Tensor | None = None) -> SwigluQuantized:
    """silu(gate) * up of fc1's output `x [T, 2f]`, quantized under 1D or tensor tiles.

    x: BF16 or FP16 with contiguous rows; or (data, scale_inv) of it, rowwise 1D tiles, whose values in `dtype` are
    used.
    weights: FP32 [T], what rows are multiplied by before they are rounded. high_precision: also return y.
    x_spec: also return fc1's output (given in high precision) as rowwise bytes under these 1D tiles, for backward.
    amax, scale, amax_out: see `TensorScaling`; share: see `Share`. ends: int32 [G], multiples of 128, one past each
    expert's last row: each has a tensor tile of its own, so that all of these are FP32 [G]; rows past the last are not
    written.
    Raises ValueError for other tiles, dtypes or strides.
    """
    gated = _Gated.of("swiglu_quantize", x, dtype, ends)
    check_spec("swiglu_quantize", spec, amax, scale, amax_out, share)
    T, F = gated.tokens, gated.features
    y = torch.empty(T, F, dtype=gated.dtype, device=gated.data.device) if high_precision else None
    row, col = allocate_pair(T, F, spec, gated.data.device, rowwise, colwise, gated.groups)
    scaling = TensorScaling.of(spec, amax, scale, amax_out, gated.data.device, gated.groups)
    if scaling.measures and (row or col):
        _swiglu_amax(gated, weights, scaling.record)
        scaling = scaling.second_pass(share)
    keep = None
    if x_spec is not None:
        _check_keep(gated, x_spec)
        keep = allocate(T, 2 * F, x_spec, gated.data.device) if F % BLOCK == 0 else quantize(gated.data, x_spec)[0]
    _swiglu(gated, weights, y, row, col, spec, scaling, keep if F % BLOCK == 0 else None, x_spec)
    return SwigluQuantized(row, col, y, keep)


def swiglu_amax(x: Tensor | Stored, *, weights: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """FP32 [1]: amax of SwiGLU's output, for ranks to share before they quantize."""
    gated = _Gated.of("swiglu_amax", x, dtype)
    amax = zeros(1, torch.float32, gated.data.device)
    _swiglu_amax(gated, weights, amax)
    return amax


def swiglu_grad_quantize(dy: Tensor, x: Tensor | Stored, spec: Spec, *, weights: Tensor | None = None,
                         rowwise: bool = True, colwise: bool = True, high_precision: bool = False,
                         amax: Tensor | None = None, scale: Tensor | None = None, amax_out: Tensor | None = None,
                         share: Share | None = None, y_spec: Spec | None = None, y_amax: Tensor | None = None,
                         y_scale: Tensor | None = None, ends: Tensor | None = None) -> SwigluGradQuantized:
    """Gradient of SwiGLU: `dy [T, f]`, fc1's output x (as in `swiglu_quantize`) -> d(fc1 output) quantized by `spec`.

    weights: as in forward; their gradient comes with them. high_precision: also return d(fc1 output).
    y_spec: also return SwiGLU's recomputed (weighted) output, quantized colwise by it (fc2's input role), under tensor
        tiles with the forward's `y_amax` or `y_scale`.
    amax, scale, amax_out, share: of d(fc1 output), see `TensorScaling`, `Share`. ends: as in `swiglu_quantize`; f must
    be a multiple of 128 then. Raises ValueError for other tiles, dtypes, strides or widths.
    """
    gated = _Gated.of("swiglu_grad_quantize", x, dy.dtype, ends)
    _check_grad(gated, dy, y_spec, y_amax, y_scale)
    check_spec("swiglu_grad_quantize", spec, amax, scale, amax_out, share)
    T, F, device = gated.tokens, gated.features, dy.device
    fused = F % BLOCK == 0  # otherwise register tiles of [T, 2f] straddle gate and up
    dx = torch.empty(T, 2 * F, dtype=dy.dtype, device=device) if high_precision or not fused else None
    row, col = allocate_pair(T, 2 * F, spec, device, rowwise and fused, colwise and fused, gated.groups)
    y_col = allocate_pair(T, F, y_spec, device, False, True, gated.groups)[1] if y_spec is not None else None
    scaling = TensorScaling.of(spec, amax, scale, amax_out, device, gated.groups)
    if scaling.measures and (row or col):
        _swiglu_grad_amax(gated, dy, weights, scaling.record)
        scaling = scaling.second_pass(share)
    y_scaling = TensorScaling.of(y_spec, y_amax, y_scale, None, device) if y_spec is not None else TensorScaling()
    dweights = _swiglu_grad(gated, dy, weights, dx, row, col, y_spec, y_col, spec, scaling, y_scaling)
    if not fused and (rowwise or colwise):
        row, col = quantize(dx, spec, rowwise, colwise, amax, scale=scale, amax_out=amax_out, share=share)
    return SwigluGradQuantized(row, col, y_col, dx if high_precision else None, dweights)


def swiglu_grad_amax(dy: Tensor, x: Tensor | Stored, *, weights: Tensor | None = None) -> Tensor:
    """FP32 [1]: amax of d(fc1 output), for ranks to share before they quantize."""
    gated = _Gated.of("swiglu_grad_amax", x, dy.dtype)
    _check_grad(gated, dy, None, None, None)
    amax = zeros(1, torch.float32, dy.device)
    _swiglu_grad_amax(gated, dy, weights, amax)
    return amax


class _Gated(NamedTuple):
    """fc1's output [T, 2f] as kernel arguments: values or FP8 bytes, scales of the latter, compute dtype, experts."""

    data: Tensor
    scale_inv: Tensor | None
    dtype: torch.dtype
    ends: Tensor | None = None

    @classmethod
    def of(cls, name: str, x: Tensor | Stored, dtype: torch.dtype, ends: Tensor | None = None) -> _Gated:
        data, scale_inv = x if isinstance(x, tuple) else (x, None)
        dtype = data.dtype if scale_inv is None else dtype
        fits = data.dim() == 2 and data.shape[1] % 2 == 0 and data.stride(1) == 1
        if not fits or dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"{name}: x must be BF16 or FP16 [T, 2f] with contiguous rows, or FP8 of it, "
                             f"got {data.dtype} {tuple(data.shape)} of strides {data.stride()}")
        return cls(data, scale_inv, dtype, ends)

    @property
    def tokens(self) -> int:
        return self.data.shape[0]

    @property
    def features(self) -> int:
        return self.data.shape[1] // 2

    @property
    def groups(self) -> int:
        """How many scales a tensor tile has."""
        return 1 if self.ends is None else self.ends.numel()

    @property
    def facts(self) -> tuple:
        scales = self.scale_inv
        stored = scales is not None and (scales.shape, scales.stride())
        return self.data.shape, self.data.stride(0), stored, self.dtype, self.groups

    @property
    def row_facts(self) -> tuple:
        """Without the number of rows, where nothing else follows from it."""
        facts = self.facts
        return facts if self.scale_inv is not None else (self.data.shape[1], *facts[1:])

    def arguments(self) -> tuple:
        scale = pointers((self.data, self.scale_inv))[1] if self.scale_inv is not None else None
        return self.data, scale, self.data.stride(0), *(self.scale_inv.stride() if scale is not None else (0, 0))

    def options(self) -> dict:
        """X_BLOCK: width of the bytes' tiles, 0 if they are none; X_ALIGNED: whether up starts with a tile."""
        block = 0
        if self.scale_inv is not None:
            block = next(b for b in (128, 64, 32, 16) if -(-2 * self.features // b) == self.scale_inv.shape[1])
        names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
        aligned = block == 0 or self.features % block == 0
        named = {"X_BLOCK": block, "X_ALIGNED": aligned, "DTYPE": names[self.dtype]}
        return named | {"EXPERTS": triton.next_power_of_2(self.groups)}

    def walk(self, config: Config) -> tuple[tuple[int], dict]:
        """The grid of a first pass and what it walks over: with experts, rows of one."""
        rows = 0 if self.ends is None else _WALK
        grid = (-(-self.tokens // rows),) if rows else config.grid(self.tokens, self.features, self.data.device)
        return grid, {"WALK": rows}


def _swiglu_amax(gated: _Gated, weights: Tensor | None, record: Tensor) -> None:
    T, F = gated.tokens, gated.features
    config = chosen("swiglu amax")
    grid, walk = gated.walk(config)
    if T and F:
        tensors = gated.data, gated.scale_inv, weights, record, gated.ends
        launch(swiglu_amax_kernel, (config, gated.facts), tensors, lambda: (
            grid,
            (*gated.arguments(), weights, record, T, F, gated.ends, gated.groups),
            {"EVEN": config.even(T, F), **walk, **gated.options(), **config.options()},
        ))  # fmt: skip


def _swiglu_grad_amax(gated: _Gated, dy: Tensor, weights: Tensor | None, record: Tensor) -> None:
    T, F = gated.tokens, gated.features
    config = chosen("swiglu gradient amax")
    grid, walk = gated.walk(config)
    if T and F:
        tensors = dy, gated.data, gated.scale_inv, weights, record, gated.ends
        launch(swiglu_grad_amax_kernel, (config, gated.facts, dy.stride(0)), tensors, lambda: (
            grid,
            (dy, *gated.arguments(), weights, record, T, F, dy.stride(0), gated.ends, gated.groups),
            {"EVEN": config.even(T, F), **walk, **gated.options(), **config.options()},
        ))  # fmt: skip


def _swiglu(gated: _Gated, weights: Tensor | None, y: Tensor | None, row: Stored | None, col: Stored | None,
            spec: Spec | None, scaling: TensorScaling, keep: Stored | None = None, x_spec: Spec | None = None) -> None:
    T, F = gated.tokens, gated.features
    config = chosen("swiglu rows" if not col else "swiglu both" if row else "swiglu columns")
    if not col and (keep is not None or spec.tile.kind == "tensor" or not config.even(T, F)):
        config = chosen("swiglu rows, plain")
    if T and F:
        copies = keep or (None, None), row or (None, None), col or (None, None)
        arguments, grid, even = gated.arguments(), config.grid(T, F, gated.data.device), config.even(T, F)
        facts = spec, x_spec, config, even, gated.row_facts, scale_ld(keep), scale_ld(row), scale_ld(col)
        tensors = (gated.data, gated.scale_inv, weights, y, *copies[0], *copies[1], *copies[2], *scaling,
                   gated.ends)
        launch(swiglu_kernel, facts, tensors, lambda: (
            grid,
            (*arguments, weights, y, *pointers(keep), *pointers(row), *pointers(col), *scaling, T, F,
             scale_ld(keep), scale_ld(row), scale_ld(col), tile_epsilon(x_spec) if keep else 0.0,
             tile_epsilon(spec) if spec is not None else 0.0, gated.ends, gated.groups),
            {"EVEN": even, "ROWS": config.rows, "KEEP_SPEC": _spec_or_none(x_spec)["SPEC"],
             **gated.options(), **_spec_or_none(spec), **config.options()},
        ), grid=(*grid, 1, 1), numbers=((len(arguments) + 8 + len(scaling), T),))  # fmt: skip


def _swiglu_grad(gated: _Gated, dy: Tensor, weights: Tensor | None, dx: Tensor | None, row: Stored | None,
                 col: Stored | None, y_spec: Spec | None, y_col: Stored | None, spec: Spec | None,
                 scaling: TensorScaling, y_scaling: TensorScaling = UNSCALED) -> Tensor | None:
    T, F = gated.tokens, gated.features
    config = chosen("swiglu gradient, y" if y_col and dx is None else "swiglu gradient")
    if y_col and dx is None and spec.tile.kind == "tensor" and config.even(T, F):
        config = chosen("swiglu gradient, y, tensor")
    partials = None
    if weights is not None:
        partials = torch.empty(-(-F // config.block_k), T, dtype=torch.float32, device=dy.device)
    if T and F:
        copies = row or (None, None), col or (None, None), y_col or (None, None)
        arguments, grid, even = gated.arguments(), config.grid(T, F, dy.device), config.even(T, F)
        lds = scale_ld(row), scale_ld(col), scale_ld(y_col)
        facts = spec, y_spec, config, even, gated.row_facts, dy.stride(0), *lds
        tensors = (dy, gated.data, gated.scale_inv, weights, partials, dx, *copies[0], *copies[1], *scaling, *copies[2],
                   *y_scaling[:2], gated.ends)
        launch(swiglu_grad_kernel, facts, tensors, lambda: (
            grid,
            (dy, *arguments, weights, partials, dx, *pointers(row), *pointers(col), *scaling, *pointers(y_col),
             *y_scaling[:2], T, F, dy.stride(0), *lds,
             tile_epsilon(spec) if spec is not None else 0.0, tile_epsilon(y_spec) if y_spec is not None else 0.0,
             gated.ends, gated.groups),
            {"EVEN": even, **gated.options(), **_spec_or_none(spec),
             "Y_SPEC": _spec_or_none(y_spec)["SPEC"], "ROWS": config.rows, **config.options()},
        ), grid=(*grid, 1, 1), numbers=((len(arguments) + 12 + len(scaling), T),))  # fmt: skip
    return partials.sum(0) if partials is not None else None


def _spec_or_none(spec: Spec | None) -> dict:
    return spec_arguments(spec) if spec is not None else {"SPEC": (448.0, 0, 0)}


def _check_keep(gated: _Gated, x_spec: Spec) -> None:
    if gated.scale_inv is not None or x_spec.tile.kind != "1d" or BLOCK % x_spec.tile.block:
        raise ValueError(f"swiglu_quantize: x_spec needs x in high precision, and 1D tiles of a size that divides "
                         f"{BLOCK}, got {gated.data.dtype} and {x_spec.tile}")


def _check_grad(gated: _Gated, dy: Tensor, y_spec: Spec | None, y_amax: Tensor | None, y_scale: Tensor | None) -> None:
    shape = (gated.tokens, gated.features)
    if gated.ends is not None and gated.features % BLOCK:
        raise ValueError(f"swiglu_grad_quantize: with experts f must be a multiple of {BLOCK}, got {gated.features}")
    if dy.shape != shape or dy.dtype != gated.dtype or dy.stride(1) != 1:
        raise ValueError(f"swiglu_grad_quantize: dy must be {gated.dtype} {list(shape)} with contiguous rows, "
                         f"got {dy.dtype} {tuple(dy.shape)} of strides {dy.stride()}")
    if y_spec is not None:
        check_spec("swiglu_grad_quantize: y_spec", y_spec, y_amax, y_scale, None)
        if y_spec.tile.kind == "tensor" and y_amax is None and y_scale is None:
            raise ValueError("swiglu_grad_quantize: y_spec with tensor tiles needs the forward's y_amax or y_scale")
