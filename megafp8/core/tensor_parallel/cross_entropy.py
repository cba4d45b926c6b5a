"""Vocabulary-parallel cross entropy: softmax in FP32, one token's loss at a time, no FP32 copy of the logits.

With target t, K classes and smoothing e (as in `torch.nn.functional.cross_entropy`):

    loss = (1 - e) * (lse - x_t) + e * (lse - mean_k x_k) + z * lse^2,      lse = log sum_k exp(x_k)
    dloss / dx_k = softmax(x)_k * (1 + 2 z * lse) - (1 - e) [k == t] - e / K

z weighs the z-loss (PaLM, section 5), which keeps lse near 0.

The logits are worked on in chunks of tokens, so that FP32 intermediates stay small. The mean of the smoothing term runs
over the whole logical vocabulary, never over a rank's part, and padding columns take part in nothing.

Losses by token (`vocab_parallel_cross_entropy`) leave the logits alone: backward needs them, and two FP32 numbers a
token. The sum of losses that training asks for (`summed_cross_entropy`) knows every token's weight in forward, and
writes the logits' gradient over the logits at once: one matrix of the vocabulary's width instead of two, the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafp8.fp8 import backend
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


@dataclass(frozen=True)
class _Loss:
    """The formulas of the module's docstring. vocab_size: logical; smoothing: e; z: weight of the z-loss; tp: the ranks
    that have the other columns."""

    vocab_size: int
    smoothing: float
    z: float
    tp: Axis

    def _columns(self, logits: Tensor) -> int:
        """How many of this rank's columns belong to the logical vocabulary."""
        return min(max(self.vocab_size - self.tp.rank * logits.shape[1], 0), logits.shape[1])

    def _first(self, logits: Tensor) -> int:
        """The label of this rank's first column."""
        return self.tp.rank * logits.shape[1]

    def _rows(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row the largest logit, the log of the sum of exp(logit - largest), and the label's logit - largest,
        over all ranks, FP32 [T]."""
        tp, columns = self.tp, self._columns(logits)
        kernels = _kernels_for(logits) if tp.size == 1 else None
        if kernels is not None:
            top, total, picked = kernels.loss_rows(logits, columns, labels)
            return top, total.log_(), picked
        top, log_sum = _log_sum_exp(logits, columns, tp)
        picked = torch.zeros_like(top)
        if columns:
            target, here = _local_targets(labels, self._first(logits), columns)
            picked = logits.gather(1, target[:, None])[:, 0].float().sub_(top).masked_fill_(~here, 0.0)
        return top, log_sum, tp.sum_(picked)

    def losses(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """FP32 [T], and what the gradient needs besides the logits: labels, top, log_sum."""
        smoothing, tp, columns = self.smoothing, self.tp, self._columns(logits)
        top, log_sum, picked = self._rows(logits, labels)
        losses = log_sum - picked
        if smoothing:
            losses *= 1 - smoothing
            total = torch.empty_like(top)
            for rows in _chunks(*logits.shape):
                total[rows] = _shifted(logits[rows, :columns], top[rows]).sum(1)
            losses += smoothing * (log_sum - tp.sum_(total) / self.vocab_size)
        if self.z:
            losses += self.z * (top + log_sum).square()
        return losses, (labels, top, log_sum)

    def write_gradient(self, logits: Tensor, kept: tuple[Tensor, ...], grad_losses: Tensor, grad: Tensor) -> None:
        """Writes the logits' gradient into `grad`, which may be the logits. grad_losses: FP32 [T]."""
        columns, (labels, top, log_sum), first = self._columns(logits), kept, self._first(logits)
        kernels = _kernels_for(logits)
        if kernels is not None:
            options = {"first": first, "smoothing": self.smoothing, "vocab_size": self.vocab_size, "z": self.z}
            kernels.loss_grad(logits, grad, labels, top, log_sum, grad_losses, columns, **options)
            return
        target, here = _local_targets(labels, first, columns)
        grad[:, columns:] = 0
        for rows in _chunks(*logits.shape) if columns else ():
            p = _shifted(logits[rows, :columns], top[rows]).sub_(log_sum[rows, None]).exp_()
            if self.z:
                p *= 1 + 2 * self.z * (top[rows, None] + log_sum[rows, None])
            if self.smoothing:
                p -= self.smoothing / self.vocab_size
            p.scatter_add_(1, target[rows, None], here[rows, None] * (self.smoothing - 1.0))
            grad[rows, :columns] = p.mul_(grad_losses[rows, None])


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, loss: _Loss) -> Tensor:
        losses, kept = loss.losses(logits, labels)
        ctx.loss = loss
        ctx.save_for_backward(logits, *kept)
        return losses

    @staticmethod
    def backward(ctx, grad_losses: Tensor) -> tuple[Tensor, None, None]:
        logits, *kept = ctx.saved_tensors
        grad = torch.empty_like(logits)
        ctx.loss.write_gradient(logits, tuple(kept), grad_losses, grad)
        return grad, None, None


class _SummedCrossEntropy(torch.autograd.Function):
    """Backward scales what forward wrote: not at all where the sum itself is what is trained on (its gradient is 1)."""

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, weights: Tensor, loss: _Loss) -> Tensor:
        losses, kept = loss.losses(logits, labels)
        if ctx.needs_input_grad[0]:
            place = logits.detach()
            loss.write_gradient(place, kept, weights, place)
            ctx.save_for_backward(place)
        return (losses * weights).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (place,) = ctx.saved_tensors  # a second backward finds it written to, and is refused
        _scale(place, grad)
        return place, None, None, None


def _scale(place: Tensor, factor: Tensor) -> None:
    """Multiplies by a number, without a pass over `place` where it is 1; a GPU isn't waited for to see that."""
    kernels = _kernels_for(place)
    if kernels is not None and place.is_contiguous():
        kernels.scale(place, factor)
    elif place.is_cuda or factor != 1:
        place.mul_(factor)
    torch.autograd.graph.increment_version(place)


def _log_sum_exp(logits: Tensor, columns: int, tp: Axis) -> tuple[Tensor, Tensor]:
    """(largest logit, log of the sum of exp(logit - largest)) of each row over all ranks, FP32 [T].

    They stay apart: added, the small one would be lost beside large logits.
    """
    kernels = _kernels_for(logits)
    if kernels is not None:
        own, total, _ = kernels.loss_rows(logits, columns)
        top = tp.max_(own.clone())
        return top, tp.sum_(total.mul_(own.sub_(top).exp_())).log_()
    top = torch.full((logits.shape[0],), -torch.inf, device=logits.device)
    if columns:
        top = logits[:, :columns].amax(1).float()
    tp.max_(top)
    total = torch.zeros_like(top)
    for rows in _chunks(*logits.shape) if columns else ():
        total[rows] = _shifted(logits[rows, :columns], top[rows]).exp_().sum(1)
    return top, tp.sum_(total).log_()


def _kernels_for(logits: Tensor) -> ModuleType | None:
    """The GPU kernels, which read and write the logits once where the formulas do many times; None for the CPU."""
    kernels = backend.kernels("cross_entropy") if logits.is_cuda else None
    return kernels if kernels is not None and kernels.supports(logits) else None


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
    _check(logits, padded_vocab_size, tp)
    return _CrossEntropy.apply(logits, labels, _Loss(vocab_size, label_smoothing, z_loss, tp))


def summed_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    vocab_size: int,
    padded_vocab_size: int,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    tp: Axis | None = None,
) -> Tensor:
    """The sum of the tokens' losses times `weights` (FP32 [T], without a gradient): FP32 scalar.

    Where the logits need a gradient it takes their place: nobody may read them afterwards, and backward runs once. All
    else is as in `vocab_parallel_cross_entropy`, bit for bit, if the sum's own gradient is 1; another factor rounds the
    logits' gradient a second time.
    """
    tp = tp or Axis()
    _check(logits, padded_vocab_size, tp)
    return _SummedCrossEntropy.apply(logits, labels, weights, _Loss(vocab_size, label_smoothing, z_loss, tp))


def _check(logits: Tensor, padded_vocab_size: int, tp: Axis) -> None:
    if logits.shape[1] * tp.size != padded_vocab_size:
        raise ValueError(
            f"logits have {logits.shape[1]} columns; each of {tp.size} ranks must pass its part of the "
            f"{padded_vocab_size} of the padded vocabulary"
        )
