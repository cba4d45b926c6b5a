"""FP8 GEMMs through the project's own kernels: Gluon on Hopper, plain Triton on what came after it, and for MXFP8.

The kernels add into an FP32 buffer in their epilogue, read scales in whatever strides quantizers leave them, and find
group sizes on the device. Nothing here waits for the device. A kernel is compiled once for a kind of GEMM (scales,
formats, output, groups) and alignment of N, never for a number of tokens, and is never tuned at run time.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from megafp8.fp8.backend import kernels
from megafp8.fp8.formats import Scale
from megafp8.fp8.storage import QuantizedStorage

NO_MXFP8 = "this device has no MXFP8 GEMM"
_BLOCK = 128  # K block of the kernels
_KINDS = {("tensor", "tensor"): "tensorwise", ("1d", "2d"): "1d2d", ("1d", "1d"): "1d1d"}


def kind(a: QuantizedStorage, b: QuantizedStorage) -> str | None:
    """How the operands' scales lie: "tensorwise", "1d2d", "1d1d" or "mxfp8"; None for what the kernels don't know."""
    return "mxfp8" if _is_mxfp8(a, b) else _KINDS.get((a.tile.kind, b.tile.kind))


def _is_mxfp8(a: QuantizedStorage, b: QuantizedStorage) -> bool:
    return a.scale is b.scale is Scale.E8M0


def refuses(a: QuantizedStorage, b: QuantizedStorage, out_dtype: torch.dtype, native_mxfp8: bool = False) -> str | None:
    """Why the kernels can't multiply these operands; None if they can. native_mxfp8: the device multiplies MXFP8."""
    if kernels("gemm") is None:
        return "Triton is not installed"
    if _is_mxfp8(a, b) and not native_mxfp8:
        return NO_MXFP8
    if kind(a, b) is None:
        return f"the kernels take no {a.tile.kind} x {b.tile.kind} scales"
    if not _is_mxfp8(a, b) and {a.tile.block, b.tile.block} - {0, _BLOCK}:
        return f"the kernels take scale tiles of {_BLOCK}, not {max(a.tile.block, b.tile.block)}"
    if out_dtype not in (torch.bfloat16, torch.float32):
        return f"the kernels write BF16 or FP32, not {out_dtype}"
    return None


def matmul(
    a: QuantizedStorage,
    b: QuantizedStorage,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    out: Tensor | None = None,
    fast: bool = False,
    adds: bool = True,
) -> Tensor:
    """`A [M, K] @ B [N, K].T + bias [N]`, `[M, N]` of `out_dtype`, rounded once; with `out` (FP32) added there, or
    written over what is there.

    fast: tensorwise products are added up by the tensor cores alone.
    """
    gemm, scaled = kernels("gemm"), kernels("gemm_scaled")
    run = {
        "tensorwise": partial(gemm.gemm_tensorwise, fast_accum=fast),
        "1d2d": gemm.gemm_1d2d,
        "1d1d": gemm.gemm_1d1d,
        "mxfp8": scaled.gemm_mxfp8,
    }[kind(a, b)]
    bias = bias if bias is None else bias.contiguous()
    adds = adds and out is not None
    return run(a.data, b.data, a.scale_inv, b.scale_inv, bias=bias, out=out, out_dtype=out_dtype, accumulate=adds)


def matmul_grouped(
    a: QuantizedStorage, b: QuantizedStorage, ends: Tensor, out_dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """`out[t] = A[t] @ B[g].T` for the tokens t of group g: A `[T, K]`, B `[G, N, K]`, out `[T, N]`.

    MXFP8 is decoded to BF16 in the kernel where the device doesn't multiply it.
    """
    grouped, scaled = kernels("grouped_gemm"), kernels("gemm_scaled")
    run = {
        "tensorwise": partial(grouped.grouped_gemm_tensorwise, fast_accum=fast),
        "1d2d": grouped.grouped_gemm_1d2d,
        "mxfp8": scaled.grouped_gemm_mxfp8,
    }[kind(a, b)]
    return run(a.data, b.data, a.scale_inv, b.scale_inv, ends, out_dtype=out_dtype)


def refuses_grouped(
    a: QuantizedStorage, b: QuantizedStorage, out_dtype: torch.dtype, native_mxfp8: bool = False
) -> str | None:
    """Why `matmul_grouped` can't multiply these operands; None if it can."""
    if kind(a, b) == "1d1d":
        return "the kernels of experts take weights with 128 x 128 tiles only"
    return refuses(a, b, out_dtype, native_mxfp8)


def decodes(a: QuantizedStorage, b: QuantizedStorage, reason: str | None) -> bool:
    """Whether the grouped kernels multiply MXFP8 operands in BF16 that they refuse for `reason`."""
    return _is_mxfp8(a, b) and reason == NO_MXFP8


def refuses_wgrad_grouped(a: QuantizedStorage, b: QuantizedStorage, native_mxfp8: bool = False) -> str | None:
    """Why `wgrad_grouped` can't multiply these operands; None if it can."""
    if "2d" in (a.tile.kind, b.tile.kind):
        return "tiles that restart at each expert's first token are 1D"
    return refuses(a, b, torch.float32, native_mxfp8)


def wgrad_grouped(
    a: QuantizedStorage, b: QuantizedStorage, ends: Tensor, out: Tensor | None, alignment: int, adds: bool = True
) -> Tensor:
    """`out[g] (+)= A[:, tokens of g] @ B[:, tokens of g].T`, FP32: A `[N, T]`, B `[K, T]`, out `[G, N, K]`.

    MXFP8 is decoded as in `matmul_grouped`.
    """
    grouped, scaled = kernels("grouped_gemm"), kernels("gemm_scaled")
    run = {
        "tensorwise": grouped.grouped_wgrad_tensorwise,
        "1d1d": grouped.grouped_wgrad_1d1d,
        "mxfp8": scaled.grouped_wgrad_mxfp8,
    }[kind(a, b)]
    padding = 16 if alignment % 16 == 0 else 1  # ends at multiples of 16 are also where padded groups would begin
    adds = adds and out is not None
    return run(a.data, b.data, a.scale_inv, b.scale_inv, ends, out=out, accumulate=adds, padding=padding)
