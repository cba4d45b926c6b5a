"""Tokens by expert: rows in the order of experts, and back to tokens as sums.

Rows of an expert lie in the order of tokens. The two operations are each other's transposes, so each one's backward
is the other; sums over a token's k rows are FP32, in the order of its choices (no floating-point atomics).

A choice that the capacity drops names the expert E. Its rows are the last ones, past the sum of `counts`: experts leave
them alone, and whatever lies there, NaN too, is seen by no sum, forward or backward. Rows that fill an expert up to its
capacity belong to no choice: they are zeros, and so are their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.core.moe.routing import count_tokens


@dataclass(frozen=True)
class Permutation:
    """R rows, one a (token, choice): R = T * k; filled up to a capacity C, R = E * C.

    choices: int64 [R], number token * k + choice of each row; -1 for a row that fills up.
    rows: int64 [T, k], the row of each choice (any, where it has none). counts: int64 [E], rows of each expert.
    kept: bool [T, k], which choices count; None: all, and no row fills up.
    """

    choices: Tensor
    rows: Tensor
    counts: Tensor
    kept: Tensor | None = None

    @staticmethod
    def of(experts: Tensor, num_experts: int, *, drops: bool = False, capacity: int | None = None) -> Permutation:
        """experts: int64 [T, k]. drops: choices may be E, dropped. capacity: rows that each expert is filled up to."""
        choices = experts.reshape(-1).argsort(stable=True)
        rows = torch.empty_like(choices)
        rows[choices] = torch.arange(choices.numel(), device=choices.device)
        rows, counts = rows.view(experts.shape), count_tokens(experts, num_experts)
        if capacity is not None:
            return _filled_up(experts, rows, counts, capacity)
        return Permutation(choices, rows, counts, experts < num_experts if drops else None)

    @property
    def tokens(self) -> Tensor:
        """The token of each row, int64 [R]; -1 for none."""
        return self.choices.div(self.rows.shape[1], rounding_mode="floor")

    @property
    def empty(self) -> Tensor | None:
        """Which rows fill up, bool [R]; None: none."""
        return None if self.kept is None else self.choices < 0


def _filled_up(experts: Tensor, rows: Tensor, counts: Tensor, capacity: int) -> Permutation:
    """Every expert with `capacity` rows, its own first; none may have more."""
    kept = experts < len(counts)
    starts = torch.cat([counts.cumsum(0) - counts, counts.new_zeros(1)])  # the last: of what is dropped
    rows = torch.where(kept, experts * capacity + rows - starts[experts], 0)
    choices = rows.new_full((len(counts) * capacity + 1,), -1)  # one row more, for what is dropped
    numbers = torch.arange(rows.numel(), device=rows.device)
    choices[torch.where(kept, rows, len(choices) - 1).reshape(-1)] = numbers
    return Permutation(choices[:-1], rows, torch.full_like(counts, capacity), kept)


def permute(x: Tensor, order: Permutation) -> Tensor:
    """x: [T, h]; returns [R, h], rows by expert."""
    return _Spread.apply(x, order.tokens, order.rows, order.kept, order.empty)


def combine(y: Tensor, order: Permutation) -> Tensor:
    """y: [R, h]; returns [T, h], the sum of each token's rows in y's dtype, rounded once."""
    return _Gather.apply(y, order.tokens, order.rows, order.kept, order.empty)


def permute_weights(weights: Tensor, order: Permutation) -> Tensor:
    """weights: [T, k]; returns [R]."""
    flat = weights.reshape(-1, 1)
    kept = None if order.kept is None else order.kept.reshape(-1, 1)
    return _Spread.apply(flat, order.choices, order.rows.reshape(-1, 1), kept, order.empty).squeeze(1)


def _spread(x: Tensor, tokens: Tensor, empty: Tensor | None) -> Tensor:
    rows = x[tokens]
    return rows if empty is None else rows.masked_fill_(empty[:, None], 0)


def _sums(y: Tensor, rows: Tensor, kept: Tensor | None) -> Tensor:
    picked = y[rows.reshape(-1)].view(*rows.shape, y.shape[1])
    if kept is not None:
        picked = picked.masked_fill_(~kept[..., None], 0)
    return picked.sum(1, dtype=torch.promote_types(torch.float32, y.dtype)).to(y.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, tokens: Tensor, rows: Tensor, kept: Tensor | None, empty: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, kept)
        return _spread(x, tokens, empty)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _sums(grad_output, *ctx.saved_tensors), None, None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, tokens: Tensor, rows: Tensor, kept: Tensor | None, empty: Tensor | None) -> Tensor:
        ctx.save_for_backward(tokens, empty)
        return _sums(y, rows, kept)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _spread(grad_output, *ctx.saved_tensors), None, None, None, None
