"""Cross entropy over rows of logits [T, V], BF16 or FP32: what the softmax needs of a row, and the logits' gradient.

    top = max_k x_k        total = sum_k exp(x_k - top)        log_sum = log total, over all ranks
    dx_k = weight * (exp(x_k - top - log_sum) * (1 + 2 z (top + log_sum)) - e / K - (1 - e) [k == target])

FP32 inside. The first pass reads a row twice, the second time from the cache; the second pass reads and writes the
logits once, in place if the caller likes. Only the first `columns` of a row count; gradients of the others are 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .quantize_configs import multiprocessors

_BLOCK = 4096
"""Logits a program holds at once."""


@triton.jit
def loss_rows_kernel(logits, labels, top, total, picked, columns, stride, BLOCK: tl.constexpr):
    """labels may be None; then nothing is picked."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    logits += row * stride
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, columns, BLOCK):
        x = tl.load(logits + start + cols, mask=start + cols < columns, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, x)
    most = tl.max(largest, 0)
    base = tl.where(most == float("-inf"), 0.0, most)  # all are -inf: their sum is 0, to which other ranks may add
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        x = tl.load(logits + start + cols, mask=start + cols < columns, other=float("-inf")).to(tl.float32)
        sums += tl.exp(x - base)
    tl.store(top + row, most)
    tl.store(total + row, tl.sum(sums, 0))
    if labels is not None:
        label = tl.load(labels + row)
        here = (label >= 0) & (label < columns)
        x = tl.load(logits + label, mask=here, other=0.0).to(tl.float32)
        tl.store(picked + row, tl.where(here, x - most, 0.0))


@triton.jit
def loss_grad_kernel(logits, grad, labels, top, log_sum, weight, first, columns, width, stride, grad_stride, smoothing,
                     uniform, z, BLOCK: tl.constexpr):  # fmt: skip
    """uniform: e / K; width: of a row of `grad`, padding included; first: the label of the first column."""
    blocks = tl.cdiv(width, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    cols = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    live = cols < columns
    most, log_total = tl.load(top + row), tl.load(log_sum + row)
    x = tl.load(logits + row * stride + cols, mask=live, other=0.0).to(tl.float32)
    p = tl.exp((x - most) - log_total) * (1 + 2 * z * (most + log_total)) - uniform
    hit = cols == tl.load(labels + row) - first
    p = (p + tl.where(hit, smoothing - 1.0, 0.0)) * tl.load(weight + row)
    p = tl.where(live, p, 0.0)
    tl.store(grad + row * grad_stride + cols, p.to(grad.dtype.element_ty), mask=cols < width)


@triton.jit
def loss_grad_scale_kernel(x, factor, count, BLOCK: tl.constexpr):
    f = tl.load(factor).to(x.dtype.element_ty).to(tl.float32)
    if f != 1.0:
        for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
            at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            product = tl.load(x + at, mask=at < count).to(tl.float32) * f
            tl.store(x + at, product.to(x.dtype.element_ty), mask=at < count)


def loss_rows(logits: Tensor, columns: int, labels: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    """(top, total), FP32 [T], of the first `columns` logits of each row; -inf and 0 for none.

    labels: int64 [T]; with them also x_t - top, FP32 [T], of each row's label, 0 where it is not among the columns.
    """
    rows = logits.shape[0]
    top, total = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    picked = None if labels is None else torch.empty_like(top)
    if not columns:
        return top.fill_(float("-inf")), total.zero_(), picked if picked is None else picked.zero_()
    if rows:
        labels = None if labels is None else labels.contiguous()
        facts = rows, columns, logits.stride(0)
        launch(loss_rows_kernel, facts, (logits, labels, top, total, picked), lambda: (
            (rows,),
            (logits, labels, top, total, picked, columns, logits.stride(0)),
            {"BLOCK": _BLOCK, "num_warps": 8},
        ))  # fmt: skip
    return top, total, picked


def loss_grad(
    logits: Tensor,
    grad: Tensor,
    labels: Tensor,
    top: Tensor,
    log_sum: Tensor,
    weight: Tensor,
    columns: int,
    *,
    first: int,
    smoothing: float,
    vocab_size: int,
    z: float,
) -> None:
    """Writes the gradient into `grad`, which may be `logits`.

    labels: int64 [T], of which `first` is that of the first column. top, log_sum, weight: FP32 [T], weight of any
    stride. vocab_size: K.
    """
    rows, width = grad.shape
    if rows and width:
        tensors = logits, grad, labels.contiguous(), top, log_sum, weight.contiguous()
        facts = rows, first, columns, width, logits.stride(0), grad.stride(0), smoothing, vocab_size, z
        launch(loss_grad_kernel, facts, tensors, lambda: (
            (rows * triton.cdiv(width, _BLOCK),),
            (*tensors, first, columns, width, logits.stride(0), grad.stride(0), smoothing, smoothing / vocab_size, z),
            {"BLOCK": _BLOCK, "num_warps": 8},
        ))  # fmt: skip


def scale(x: Tensor, factor: Tensor) -> None:
    """Multiplies contiguous `x` in place by `factor`, one element on its device, in the bits of `x.mul_(factor)`, which
    rounds the factor to x's dtype first. Where it is 1, as the device finds out, x is left alone and unread."""
    if x.numel():
        programs = min(triton.cdiv(x.numel(), _BLOCK), 8 * multiprocessors(x.device))
        launch(loss_grad_scale_kernel, (programs, x.numel()), (x, factor), lambda: (
            (programs,), (x, factor, x.numel()), {"BLOCK": _BLOCK, "num_warps": 8}
        ))  # fmt: skip


def supports(logits: Tensor) -> bool:
    """Whether the kernels read these logits."""
    return logits.dtype in (torch.float32, torch.bfloat16) and logits.stride(1) == 1
