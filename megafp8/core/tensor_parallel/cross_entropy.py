"""Vocabulary-parallel cross entropy: softmax in FP32, one token's loss at a time, no FP32 copy of the logits.

With target t, K classes and smoothing e (as in `torch.nn.functional.cross_entropy`):

    loss = (1 - e) * (lse - x_t) + e * (lse - mean_k x_k) + z * lse^2,      lse = log sum_k exp(x_k)
    dloss / dx_k = softmax(x)_k * (1 + 2 z * lse) - (1 - e) [k == t] - e / K

z weighs the z-loss (PaLM, section 5), which keeps lse near 0.

The logits are worked on in chunks of tokens, so that FP32 intermediates stay small; backward needs only the logits
and two FP32 numbers a token. The mean of the smoothing term runs over the whole logical vocabulary, never over a
rank's part, and padding columns take part in nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megafp8.parallel import Axis

CHUNK_ELEMENTS = 1 << 24
"""Largest number of logits held in FP32 at once."""


def _chunks(tokens: int, width: int) -> Iterator[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, width))
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


def _shifted(logits: Tensor, top: Tensor) -> Tensor:
    """logits - top, a new FP32 tensor (`logits.float()` would be the caller's own when they are FP32)."""
    return torch.sub(logits, top[:, None])


def _local_targets(labels: Tensor, start: int, columns: int) -> tuple[Tensor, Tensor]:
    """(column of each label in this rank's part, clamped; whether it is there)."""
    local = labels - start
    here = (local >= 0) & (local < columns)
    return torch.where(here, local, 0), here


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, vocab_size: int, smoothing: float, z: float, tp: Axis) -> Tensor:
        start = tp.rank * logits.shape[1]
        columns = min(max(vocab_size - start, 0), logits.shape[1])
        target, here = _local_targets(labels, start, columns)
        top, log_sum = _log_sum_exp(logits, columns, tp)
        picked = torch.zeros_like(top)
        if columns:
            picked = logits.gather(1, target[:, None])[:, 0].float().sub_(top).masked_fill_(~here, 0.0)
        losses = (1 - smoothing) * (log_sum - tp.sum_(picked))
        if smoothing:
            total = torch.empty_like(top)
            for rows in _chunks(*logits.shape):
                total[rows] = _shifted(logits[rows, :columns], top[rows]).sum(1)
            losses += smoothing * (log_sum - tp.sum_(total) / vocab_size)
        if z:
            losses += z * (top + log_sum).square()
        ctx.save_for_backward(logits, target, here, top, log_sum)
        ctx.columns, ctx.vocab_size, ctx.smoothing, ctx.z = columns, vocab_size, smoothing, z
        return losses

    @staticmethod
    def backward(ctx, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, here, top, log_sum = ctx.saved_tensors
        columns = ctx.columns
        grad = torch.empty_like(logits)
        grad[:, columns:] = 0
        for rows in _chunks(*logits.shape) if columns else ():
            p = _shifted(logits[rows, :columns], top[rows]).sub_(log_sum[rows, None]).exp_()
            if ctx.z:
                p *= 1 + 2 * ctx.z * (top[rows, None] + log_sum[rows, None])
            if ctx.smoothing:
                p -= ctx.smoothing / ctx.vocab_size
            p.scatter_add_(1, target[rows, None], here[rows, None] * (ctx.smoothing - 1.0))
            grad[rows, :columns] = p.mul_(grad_losses[rows, None])
        return grad, None, None, None, None, None


def _log_sum_exp(logits: Tensor, columns: int, tp: Axis) -> tuple[Tensor, Tensor]:
    """(largest logit, log of the sum of exp(logit - largest)) of each row over all ranks, FP32 [T].

    They stay apart: added, the small one would be lost beside large logits.
    """
    top = torch.full((logits.shape[0],), -torch.inf, device=logits.device)
    if columns:
        top = logits[:, :columns].amax(1).float()
    tp.max_(top)
    total = torch.zeros_like(top)
    for rows in _chunks(*logits.shape) if columns else ():
        total[rows] = _shifted(logits[rows, :columns], top[rows]).exp_().sum(1)
    return top, tp.sum_(total).log_()


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    padded_vocab_size: int,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    tp: Axis | None = None,
) -> Tensor:
    """Per-token losses, FP32 [T].

    logits: [T, padded_vocab_size / tp size], FP32 or BF16; this rank's columns. Not changed.
    labels: int64 [T], ids below `vocab_size`.
    z_loss: weight of the z-loss.
    vocab_size: the logical vocabulary; columns past it are ignored and their gradient is exactly zero.
    tp: the tensor-parallel axis; none or size 1 posts no collective.
    Raises ValueError when `logits` isn't this rank's part of the padded vocabulary (gathered logits, for one).
    """
    tp = tp or Axis()
    if logits.shape[1] * tp.size != padded_vocab_size:
        raise ValueError(
            f"logits have {logits.shape[1]} columns; each of {tp.size} ranks must pass its part of the "
            f"{padded_vocab_size} of the padded vocabulary"
        )
    return _CrossEntropy.apply(logits, labels, vocab_size, label_smoothing, z_loss, tp)
