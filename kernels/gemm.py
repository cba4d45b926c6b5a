"""FP8 GEMMs over plain tensors: C = A @ B^T, tensorwise or blockwise scales, all operands K-major.

`scale_inv` is what dequantizes: the value is `data * scale_inv`. Every function returns C and waits for nothing.
Common arguments:

* a `[M, K]`, b `[N, K]`: `torch.float8_e4m3fn` or `torch.float8_e5m2`, mixed as one likes;
* out: `[M, N]`, BF16 or FP32, rows contiguous; allocated (BF16 unless out_dtype says otherwise) when absent;
* accumulate: add to `out` in its dtype instead of overwriting it, which is what wgrad does with FP32 `main_grad`;
* bias: `[N]`, added in FP32;
* backend: "gluon" (Hopper), "tl" (plain Triton), None for the one that suits the device.

Operands that TMA cannot address (rows not a multiple of 16 bytes, unaligned views) are copied first. Products are
accumulated in FP32 over 128-wide K blocks; `fast_accum` leaves that to the tensor cores, which is faster and keeps
about 13 bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .gemm_hopper_problem import BLOCK_1D1D, BLOCK_1D2D, DENSE, TENSORWISE
from .gemm_launch import BLOCK, FP8, Problem, launch, repeated


def gemm_tensorwise(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, *, bias: Tensor | None = None,
    out: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, accumulate: bool = False,
    fast_accum: bool = False, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """One FP32 scale an operand (a one-element tensor each)."""
    out = output(out, (a.shape[0], b.shape[0]), out_dtype, a, accumulate)
    problem = Problem(DENSE, TENSORWISE, a, b, scale_inv_a, scale_inv_b, out, None, bias, accumulate, fast_accum)
    if repeated(problem, backend):
        return out
    check_operands(a, b)
    for name, scale in (("scale_inv_a", scale_inv_a), ("scale_inv_b", scale_inv_b)):
        if scale.numel() != 1 or scale.dtype != torch.float32:
            raise ValueError(f"{name} must be one FP32 element, not {scale.dtype} {tuple(scale.shape)}")
    check_bias(bias, b.shape[0])
    launch(problem._replace(scale_a=scale_inv_a.reshape(1), scale_b=scale_inv_b.reshape(1)), backend)
    return out


def gemm_1d2d(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, *, bias: Tensor | None = None,
    out: Tensor | None = None, out_dtype: torch.dtype = torch.bfloat16, accumulate: bool = False,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Blockwise fprop and dgrad: scale_inv_a `[M, ceil(K/128)]` (fastest M-major), scale_inv_b 128 x 128 blocks
    `[ceil(N/128), ceil(K/128)]` of any strides."""
    out = output(out, (a.shape[0], b.shape[0]), out_dtype, a, accumulate)
    problem = Problem(DENSE, BLOCK_1D2D, a, b, scale_inv_a, scale_inv_b, out, None, bias, accumulate)
    if repeated(problem, backend):
        return out
    check_operands(a, b)
    check_scales("scale_inv_a", scale_inv_a, (a.shape[0], blocks(a.shape[1])))
    check_scales("scale_inv_b", scale_inv_b, (blocks(b.shape[0]), blocks(a.shape[1])))
    check_bias(bias, b.shape[0])
    launch(problem, backend)
    return out


def gemm_1d1d(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, *, bias: Tensor | None = None,
    out: Tensor | None = None, out_dtype: torch.dtype = torch.float32, accumulate: bool = False,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Blockwise wgrad: scale_inv_a `[M, ceil(K/128)]`, scale_inv_b `[N, ceil(K/128)]`, both fastest when contiguous
    along M and N. FP32 unless out_dtype says otherwise."""
    out = output(out, (a.shape[0], b.shape[0]), out_dtype, a, accumulate)
    problem = Problem(DENSE, BLOCK_1D1D, a, b, scale_inv_a, scale_inv_b, out, None, bias, accumulate)
    if repeated(problem, backend):
        return out
    check_operands(a, b)
    check_scales("scale_inv_a", scale_inv_a, (a.shape[0], blocks(a.shape[1])))
    check_scales("scale_inv_b", scale_inv_b, (b.shape[0], blocks(a.shape[1])))
    check_bias(bias, b.shape[0])
    launch(problem, backend)
    return out


def blocks(length: int) -> int:
    """128-wide blocks that cover `length`."""
    return -(-length // BLOCK)


def check_operands(a: Tensor, b: Tensor, b_dims: int = 2) -> None:
    """Raises ValueError unless a and b are FP8 and share K, their last dimension."""
    if a.dim() != 2 or b.dim() != b_dims or a.shape[-1] != b.shape[-1]:
        raise ValueError(f"operands must be K-major with one K, not {tuple(a.shape)} and {tuple(b.shape)}")
    if a.dtype not in FP8 or b.dtype not in FP8:
        raise ValueError(f"operands must be FP8, not {a.dtype} and {b.dtype}")


def check_scales(name: str, scale: Tensor, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless a scale tensor is FP32 of the given shape."""
    if tuple(scale.shape) != shape or scale.dtype != torch.float32:
        raise ValueError(f"{name} must be FP32 {shape}, not {scale.dtype} {tuple(scale.shape)}")


def check_bias(bias: Tensor | None, N: int) -> Tensor | None:
    """Raises ValueError unless bias is absent or a contiguous `[N]`."""
    if bias is not None and (bias.shape != (N,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be a contiguous [{N}], not {tuple(bias.shape)}")
    return bias


def output(out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, like: Tensor, accumulate: bool) -> Tensor:
    """The given result tensor, checked, or a new one."""
    if out is None:
        if accumulate:
            raise ValueError("accumulate needs the tensor to add to: pass out=")
        return torch.empty(shape, dtype=dtype, device=like.device)
    if tuple(out.shape) != shape or out.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out must be BF16 or FP32 {shape}, not {out.dtype} {tuple(out.shape)}")
    if out.numel() and out.stride(-1) != 1:
        raise ValueError(f"out must have contiguous rows, not strides {out.stride()}")
    return out
