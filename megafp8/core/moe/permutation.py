"""Tokens by expert: rows in the order of experts, and back to tokens as sums.

Rows of an expert lie in the order of tokens. The two operations are each other's transposes, so each one's backward
is the other; sums over a token's k rows are FP32, in the order of its choices (no floating-point atomics).

A choice that the capacity drops names the expert E. Its rows are the last ones, past the sum of `counts`: experts leave
them alone, and whatever lies there, NaN too, is seen by no sum, forward or backward. Rows that fill an expert up, to
its capacity or to whole FP8 tiles, belong to no choice: they are zeros, and so are their gradients.

Numbers of rows stay on the device: where experts are filled up to whole tiles, the buffer is as long as it can get.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megafp8.core.moe.routing import count_tokens
from megafp8.fp8 import backend
from megafp8.fp8.grouped_rows import RowSpec, take_rows
from megafp8.fp8.tensor import QuantizedTensor

if TYPE_CHECKING:
    from megafp8.kernels.place_rows import Placed


@dataclass(frozen=True)
class Permutation:
    """R rows, one a (token, choice): R = T * k, or more where experts are filled up.

    choices: int64 [R], number token * k + choice of each row; -1 for a row that fills up.
    rows: int64 [T, k], the row of each choice (any, where it has none). counts: int64 [E], rows of each expert.
    kept: bool [T, k], which choices count; None: all. filled: whether there may be rows that fill up.
    """

    choices: Tensor
    rows: Tensor
    counts: Tensor
    kept: Tensor | None = None
    filled: bool = False

    @staticmethod
    def of(
        experts: Tensor, num_experts: int, *, drops: bool = False, capacity: int | None = None, alignment: int = 1
    ) -> Permutation:
        """experts: int64 [T, k]. drops: choices may be E, dropped. capacity: rows that each expert is filled up to.
        alignment: each expert's rows are filled up to a multiple of it."""
        filled, most = alignment > 1 and capacity is None, min(num_experts, experts.numel())
        total = (experts.numel() + most * (alignment - 1)) // alignment * alignment
        if capacity is None and not drops and (placed := _placed(experts, num_experts, alignment, total)) is not None:
            rows = placed.rows.view(experts.shape)
            return _known(Permutation(placed.choices, rows, placed.room, None, filled), placed)
        choices = experts.reshape(-1).argsort(stable=True)
        rows = torch.empty_like(choices)
        rows[choices] = torch.arange(choices.numel(), device=choices.device)
        rows, counts = rows.view(experts.shape), count_tokens(experts, num_experts)
        kept = experts < num_experts if drops else None
        if capacity is None and alignment == 1:
            return Permutation(choices, rows, counts, kept)
        if capacity is not None:
            room = torch.full_like(counts, -(-capacity // alignment) * alignment)
            total = num_experts * (-(-capacity // alignment) * alignment)
            kept = experts < num_experts
        else:
            room = (counts + (alignment - 1)).div(alignment, rounding_mode="floor") * alignment
        return _filled_up(experts, rows, counts, kept, room, total)

    def cut(self, total: int) -> Permutation:
        """Without the rows from `total` on, which are nobody's."""
        rows = self.rows if self.kept is None else self.rows.where(self.kept, 0)
        order = replace(self, choices=self.choices[:total], rows=rows)
        known = {name: vars(self)[name] for name in ("tokens", "ends") if name in vars(self)}
        vars(order).update({name: value[:total] if name == "tokens" else value for name, value in known.items()})
        return order

    @cached_property
    def tokens(self) -> Tensor:
        """The token of each row, int64 [R]; -1 for none."""
        return self.choices.div(self.rows.shape[1], rounding_mode="floor")

    @cached_property
    def ends(self) -> Tensor:
        """int32 [E]: one past each expert's last row."""
        return self.counts.cumsum(0).to(torch.int32)


def _placed(experts: Tensor, num_experts: int, alignment: int, total: int) -> Placed | None:
    """The rows of all choices by the kernels; None where there are none for it."""
    kernels = backend.kernels("place_rows") if experts.is_cuda and experts.numel() else None
    if kernels is None or num_experts > kernels.MOST_EXPERTS:
        return None
    return kernels.place(experts, num_experts, alignment, total)


def arrivals(arriving: Tensor, numbers: list[list[int]], alignment: int) -> Permutation:
    """Of rows that arrive by sender and expert, each row one choice.

    arriving: int64 [senders, E], how many. numbers: the same, known to the host. alignment: as in `Permutation.of`.
    """
    of_experts = [sum(column) for column in zip(*numbers, strict=True)]
    count, total = sum(of_experts), sum(-(-number // alignment) * alignment for number in of_experts)
    filled, kernels = alignment > 1, backend.kernels("place_rows") if arriving.is_cuda and count else None
    if kernels is not None and kernels.arranges(arriving):
        placed = kernels.arrange(arriving, alignment, count, total)
        return _known(Permutation(placed.choices, placed.rows[:, None], placed.room, None, filled), placed)
    senders, experts = arriving.shape
    each = torch.arange(experts, device=arriving.device).repeat(senders)
    rows = each.repeat_interleave(arriving.reshape(-1), output_size=count)
    return Permutation.of(rows[:, None], experts, alignment=alignment).cut(total)


def _known(order: Permutation, placed: Placed) -> Permutation:
    """With what is otherwise worked out when it is asked for."""
    vars(order).update(tokens=placed.tokens, ends=placed.ends)
    return order


def _filled_up(
    experts: Tensor, rows: Tensor, counts: Tensor, kept: Tensor | None, room: Tensor, total: int
) -> Permutation:
    """Every expert with `room` rows, int64 [E], its own first; none may have more. total: rows of the buffer."""
    none = counts.new_zeros(1)
    moved = torch.cat([(room.cumsum(0) - room) - (counts.cumsum(0) - counts), none])  # the last: of what is dropped
    rows = rows + moved[experts]
    if kept is not None:
        rows = rows.where(kept, 0)
    choices = rows.new_full((total + 1,), -1)  # one row more, for what is dropped
    numbers = torch.arange(rows.numel(), device=rows.device)
    choices[(rows if kept is None else rows.where(kept, total)).reshape(-1)] = numbers
    return Permutation(choices[:-1], rows, room, kept, filled=True)


def permute(x: Tensor, order: Permutation) -> Tensor:
    """x: [T, h]; returns [R, h], rows by expert."""
    return _Spread.apply(x, order.tokens, order.rows, order.kept, order.filled)


def combine(y: Tensor, order: Permutation, gradient: RowSpec | None = None) -> Tensor:
    """y: [R, h]; returns [T, h], the sum of each token's rows in y's dtype, rounded once.

    gradient: how y's gradient is wanted; None: in y's dtype.
    """
    return _Gather.apply(y, order.tokens, order.rows, order.kept, order.filled, gradient, order.ends)


def permute_weights(weights: Tensor, order: Permutation) -> Tensor:
    """weights: [T, k]; returns [R]."""
    flat = weights.reshape(-1, 1)
    kept = None if order.kept is None else order.kept.reshape(-1, 1)
    return _Spread.apply(flat, order.choices, order.rows.reshape(-1, 1), kept, order.filled).squeeze(1)


def spread(x: Tensor, index: Tensor, filled: bool, out: Tensor | None = None) -> Tensor:
    """Rows `index` of x; filled: some are negative, and get zeros. out: receives the rows, which may lie apart."""
    kernels = backend.kernels("permute") if x.is_cuda else None
    if kernels is not None and kernels.supports(x):
        return kernels.spread(x, index, out)
    rows = x[index]
    rows = rows.masked_fill_((index < 0)[:, None], 0) if filled else rows
    return rows if out is None else out.copy_(rows)


def spread_gradient(
    x: Tensor, index: Tensor, filled: bool, wanted: RowSpec | None, ends: Tensor
) -> Tensor | QuantizedTensor:
    """`spread`, as `wanted`: then rows are quantized on the way, and never written in high precision."""
    if wanted is None:
        return spread(x, index, filled)
    return take_rows(x, index, wanted, x.dtype, ends, derives=False)


def sums(y: Tensor, rows: Tensor, kept: Tensor | None, out: Tensor | None = None) -> Tensor:
    """[T, h]: the sum over each line of `rows` [T, k] of these rows of y, in FP32; only of those that are `kept`. out:
    receives them, in rows that may lie apart."""
    if not len(y):
        return y.new_zeros(len(rows), y.shape[1]) if out is None else out.zero_()
    kernels = backend.kernels("permute") if y.is_cuda else None
    if kernels is not None and kernels.supports(y):
        return kernels.sums(y, rows.contiguous(), kept, out)
    total = _sums(y, rows, kept)
    return total if out is None else out.copy_(total)


def _sums(y: Tensor, rows: Tensor, kept: Tensor | None) -> Tensor:
    picked = y[rows.reshape(-1)].view(*rows.shape, y.shape[1])
    if rows.shape[1] == 1 and kept is None:
        return picked.squeeze(1)
    if kept is not None:
        picked = picked.masked_fill_(~kept[..., None], 0)
    return picked.sum(1, dtype=torch.promote_types(torch.float32, y.dtype)).to(y.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, tokens: Tensor, rows: Tensor, kept: Tensor | None, filled: bool) -> Tensor:
        ctx.save_for_backward(rows, kept)
        return spread(x, tokens, filled)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        return sums(grad_output, *ctx.saved_tensors), None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        y: Tensor,
        tokens: Tensor,
        rows: Tensor,
        kept: Tensor | None,
        filled: bool,
        gradient: RowSpec | None,
        ends: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(tokens, ends)
        ctx.filled, ctx.gradient = filled, gradient
        return sums(y, rows, kept)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        tokens, ends = ctx.saved_tensors
        rows = spread_gradient(grad_output, tokens, ctx.filled, ctx.gradient, ends)
        return rows, None, None, None, None, None, None
