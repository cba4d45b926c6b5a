"""The grouped GEMMs of experts in high precision: the twins of `gemm.grouped_fprop`, `grouped_dgrad`, `grouped_wgrad`.

Tokens are sorted by expert in one buffer; ends: int32 `[G]` on the device, one past each expert's last token. BF16 on
GPUs runs in `torch._grouped_mm`, which waits for nothing; all else in a loop over experts. Rows past the last end are
not read, and hold anything in results. Where there are no rows at all, as on an expert-parallel rank that no token goes
to, nobody is asked to multiply.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.fp8.wgrad import put


def fprop(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`Y [T, N]`: `Y[t] = X[t] @ W[g].T`. x `[T, K]`, weight `[G, N, K]` of any first stride, both of one dtype."""
    if _grouped(x, weight.shape[1:]):
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends)
    y = x.new_empty(x.shape[0], weight.shape[1])
    if not len(x):
        return y
    for index, rows in enumerate(_rows(ends)):
        y[rows] = x[rows] @ weight[index].t()
    return y


def dgrad(grad_output: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`dX [T, K]`: `dX[t] = dY[t] @ W[g]`. grad_output `[T, N]`, weight `[G, N, K]` of any first stride."""
    if _grouped(grad_output, weight.shape[1:]):
        return torch._grouped_mm(grad_output, weight, offs=ends)
    dx = grad_output.new_empty(grad_output.shape[0], weight.shape[2])
    if not len(dx):
        return dx
    for index, rows in enumerate(_rows(ends)):
        dx[rows] = grad_output[rows] @ weight[index]
    return dx


def wgrad(grad_output: Tensor, x: Tensor, ends: Tensor, out: Tensor | None = None, adds: bool = True) -> Tensor:
    """`dW [G, N, K]`: `dW[g] = dY[rows of g].T @ X[rows of g]` in FP32; with `out` (FP32) it is added there, or written
    over what is there, and `out` returned.

    `torch._grouped_mm` rounds an expert's product to BF16 before it is added. An expert without tokens has zeros.
    """
    if out is None:
        out, adds = torch.empty(len(ends), grad_output.shape[1], x.shape[1], device=x.device), False
    if not len(x):
        return out if adds else out.zero_()
    if _grouped(x, out.shape[1:]):
        return put(torch._grouped_mm(grad_output.t(), x, offs=ends), out, adds)
    for index, rows in enumerate(_rows(ends)):
        put(grad_output[rows].t().float() @ x[rows].float(), out[index], adds)
    return out


def _grouped(x: Tensor, features: tuple[int, ...]) -> bool:
    """Whether `torch._grouped_mm` takes these operands: it wants rows of a multiple of 16 bytes, and some."""
    return x.is_cuda and len(x) > 0 and x.dtype == torch.bfloat16 and not any(n % 8 for n in features)


def _rows(ends: Tensor) -> list[slice]:
    """Each expert's rows. Waits for the device."""
    last = ends.tolist()
    return [slice(start, end) for start, end in zip([0, *last], last, strict=False)]
