"""Tokens by expert: rows in the order of experts, and back to tokens as sums.

Rows of an expert lie in the order of tokens. The two operations are each other's transposes, so each one's backward
is the other; sums over a token's k rows are FP32, in the order of its choices (no floating-point atomics).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.core.moe.routing import count_tokens


@dataclass(frozen=True)
class Permutation:
    """R = T * k rows, one a (token, choice).

    choices: int64 [R], number token * k + choice of each row. rows: int64 [T, k], the row of each choice.
    counts: int64 [E], rows of each expert.
    """

    choices: Tensor
    rows: Tensor
    counts: Tensor

    @staticmethod
    def of(experts: Tensor, num_experts: int) -> Permutation:
        """experts: int64 [T, k]."""
        choices = experts.reshape(-1).argsort(stable=True)
        rows = torch.empty_like(choices)
        rows[choices] = torch.arange(choices.numel(), device=choices.device)
        return Permutation(choices, rows.view(experts.shape), count_tokens(experts, num_experts))

    @property
    def tokens(self) -> Tensor:
        """The token of each row, int64 [R]."""
        return self.choices // self.rows.shape[1]


def permute(x: Tensor, order: Permutation) -> Tensor:
    """x: [T, h]; returns [R, h], rows by expert."""
    return _Spread.apply(x, order.tokens, order.rows)


def combine(y: Tensor, order: Permutation) -> Tensor:
    """y: [R, h]; returns [T, h], the sum of each token's rows in y's dtype, rounded once."""
    return _Gather.apply(y, order.tokens, order.rows)


def permute_weights(weights: Tensor, order: Permutation) -> Tensor:
    """weights: [T, k]; returns [R]."""
    return _Spread.apply(weights.reshape(-1, 1), order.choices, order.rows.reshape(-1, 1)).squeeze(1)


def _sums(y: Tensor, rows: Tensor) -> Tensor:
    picked = y[rows.reshape(-1)].view(*rows.shape, y.shape[1])
    return picked.sum(1, dtype=torch.promote_types(torch.float32, y.dtype)).to(y.dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return x[tokens]

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return _sums(grad_output, *ctx.saved_tensors), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return _sums(y, rows)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        return grad_output[tokens], None, None
