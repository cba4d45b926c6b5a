"""Grouped FP8 GEMMs over plain tensors, for experts: one launch for all groups, sizes read on the device.

Tokens are sorted by group in one buffer. `ends`: int32 `[G]` on the device, `ends[g]` is one past the last token of
group g (what `torch._grouped_mm` calls offs). Groups may be empty and of any size. Tokens past the last end are
neither used nor written. Nothing waits for the device. Other arguments are as in `gemm.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .gemm import blocks, check_operands, check_scales, output
from .gemm_hopper_problem import BLOCK_1D1D, BLOCK_1D2D, GROUPED_K, GROUPED_M, TENSORWISE
from .gemm_launch import Problem, launch, repeated


def grouped_gemm_tensorwise(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, *, out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, fast_accum: bool = False, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """out[t] = a[t] @ b[g].T for each token t of group g (fprop, dgrad).

    a `[T, K]`, b `[G, N, K]` (any first stride), one scale a group: scale_inv_a `[G]`, scale_inv_b `[G]`; out `[T, N]`.
    """

    def check() -> None:
        groups = _check_groups(a, b, ends)
        check_scales("scale_inv_a", scale_inv_a, (groups,))
        check_scales("scale_inv_b", scale_inv_b, (groups,))

    return _over_m(check, TENSORWISE, a, b, scale_inv_a, scale_inv_b, ends, out, out_dtype, fast_accum, backend)


def grouped_gemm_1d2d(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, *, out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """out[t] = a[t] @ b[g].T for each token t of group g (fprop, dgrad).

    a `[T, K]` with scale_inv_a `[T, ceil(K/128)]`; b `[G, N, K]`, any first stride, with scale_inv_b
    `[G, ceil(N/128), ceil(K/128)]` of any strides; out `[T, N]`.
    """

    def check() -> None:
        groups = _check_groups(a, b, ends)
        check_scales("scale_inv_a", scale_inv_a, (a.shape[0], blocks(a.shape[1])))
        check_scales("scale_inv_b", scale_inv_b, (groups, blocks(b.shape[1]), blocks(b.shape[2])))

    return _over_m(check, BLOCK_1D2D, a, b, scale_inv_a, scale_inv_b, ends, out, out_dtype, False, backend)


def grouped_wgrad_tensorwise(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, *, out: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32, accumulate: bool = False, fast_accum: bool = False, padding: int = 1,
    backend: str | None = None,
) -> Tensor:  # fmt: skip
    """out[g] (+)= a[:, tokens of g] @ b[:, tokens of g].T (wgrad). See `grouped_wgrad_1d1d`; scales are `[G]`."""

    def check() -> None:
        groups = _check_wgrad(a, b, ends, padding)
        check_scales("scale_inv_a", scale_inv_a, (groups,))
        check_scales("scale_inv_b", scale_inv_b, (groups,))

    return _over_k(check, TENSORWISE, a, b, scale_inv_a, scale_inv_b, ends, out, out_dtype, accumulate, fast_accum,
                   padding, backend)  # fmt: skip


def grouped_wgrad_1d1d(
    a: Tensor, b: Tensor, scale_inv_a: Tensor, scale_inv_b: Tensor, ends: Tensor, *, out: Tensor | None = None,
    out_dtype: torch.dtype = torch.float32, accumulate: bool = False, padding: int = 1, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """out[g] (+)= a[:, tokens of g] @ b[:, tokens of g].T (wgrad), FP32 unless out_dtype says otherwise.

    a `[M, T]`, b `[N, T]`: colwise copies, whose 128-wide tiles restart at each group's first token; out `[G, M, N]`.
    scale_inv_a `[M, S]`, scale_inv_b `[N, S]`, S at least the number of tiles, sum(ceil(m_g / 128)).
    padding: where groups begin along T, namely at the next multiple of it after the group before; 1 means no gaps. If
    it is no multiple of 16, operands are copied first, since TMA cannot read from unaligned columns. What lies in
    the gaps is not used. An empty group's out is zero, or with accumulate left as it is.
    """

    def check() -> None:
        _check_wgrad(a, b, ends, padding)
        for name, operand, scale in (("scale_inv_a", a, scale_inv_a), ("scale_inv_b", b, scale_inv_b)):
            if scale.dim() != 2 or scale.shape[0] != operand.shape[0] or scale.dtype != torch.float32:
                wanted = f"FP32 [{operand.shape[0]}, tiles]"
                raise ValueError(f"{name} must be {wanted}, not {scale.dtype} {tuple(scale.shape)}")

    return _over_k(check, BLOCK_1D1D, a, b, scale_inv_a, scale_inv_b, ends, out, out_dtype, accumulate, False, padding,
                   backend)  # fmt: skip


def _over_m(check, scaling, a, b, scale_a, scale_b, ends, out, out_dtype, fast, backend) -> Tensor:
    out = output(out, (a.shape[0], b.shape[1]), out_dtype, a, False)
    problem = Problem(GROUPED_M, scaling, a, b, scale_a, scale_b, out, ends, fast=fast)
    return _solved(problem, check, backend)


def _over_k(check, scaling, a, b, scale_a, scale_b, ends, out, out_dtype, accumulate, fast, padding, backend) -> Tensor:
    out = output(out, (ends.numel(), a.shape[0], b.shape[0]), out_dtype, a, accumulate)
    problem = Problem(GROUPED_K, scaling, a, b, scale_a, scale_b, out, ends, None, accumulate, fast, padding)
    return _solved(problem, check, backend)


def _solved(problem: Problem, check: Callable[[], None], backend: str | None) -> Tensor:
    """C. One of a kind that was run before was checked then."""
    if not repeated(problem, backend):
        check()
        launch(problem, backend)
    return problem.out


def check_ends(ends: Tensor) -> int:
    """The number of groups. Raises ValueError unless ends are a contiguous int32 vector."""
    if ends.dim() != 1 or ends.dtype != torch.int32 or not ends.is_contiguous():
        raise ValueError(f"ends must be contiguous int32 [G], not {ends.dtype} {tuple(ends.shape)}")
    return ends.numel()


def _check_groups(a: Tensor, b: Tensor, ends: Tensor) -> int:
    check_operands(a, b, b_dims=3)
    if b.shape[0] != check_ends(ends):
        raise ValueError(f"b has {b.shape[0]} groups, ends {ends.numel()}")
    return b.shape[0]


def _check_wgrad(a: Tensor, b: Tensor, ends: Tensor, padding: int) -> int:
    check_operands(a, b)
    if padding < 1:
        raise ValueError(f"padding must be positive, not {padding}")
    return check_ends(ends)
