"""Queries, keys and values by head from the projections' outputs: normalized and rotated, each in one pass on GPUs.

Each function here computes what the modules say in plain PyTorch and gives None where no kernel does it: off a GPU,
without Triton, for channels whose number is no power of two. Values between norm and rotation are rounded in both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.core.transformer.norm import Norm
from megafp8.core.transformer.rope import Rotation
from megafp8.fp8.backend import kernels

Heads = tuple[Tensor, Tensor, Tensor]
"""q [T, heads, d], k [T, groups, d], v [T, groups, d'], each contiguous."""


def _usable(x: Tensor, *channels: int) -> bool:
    powers_of_two = all(n and not n & (n - 1) for n in channels)
    return x.is_cuda and x.stride(-1) == 1 and powers_of_two and kernels("rope") is not None


def _with_contiguous_channels(*tensors: Tensor) -> list[Tensor]:
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv: Tensor, cos: Tensor, sin: Tensor, queries_per_group: int) -> Heads:
        ctx.save_for_backward(cos, sin)
        return kernels("rope").split_heads(qkv, cos, sin, queries_per_group)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return kernels("rope").join_heads(*_with_contiguous_channels(*grads), *ctx.saved_tensors), None, None, None


class _NormHeads(torch.autograd.Function):
    """Keeps qkv, which plain PyTorch keeps as well: queries and keys as the norms' inputs are views of it."""

    @staticmethod
    def forward(
        ctx, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, queries_per_group: int,
        options: dict[str, float],
    ) -> Heads:  # fmt: skip
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        ctx.options = options
        return kernels("head_norm").norm_heads(qkv, (q_weight, k_weight), cos, sin, queries_per_group, **options)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight, *turn = ctx.saved_tensors
        weights = q_weight, k_weight
        found = kernels("head_norm").norm_heads_grad(
            *_with_contiguous_channels(*grads), qkv, weights, *turn, **ctx.options
        )
        return *found, None, None, None, None


def split_heads(
    qkv: Tensor, turn: Rotation, queries_per_group: int, channels: int, norms: tuple[Norm, Norm] | None = None
) -> Heads | None:
    """Rotated queries and keys, normalized before by `norms` if there are any, and values.

    qkv: [T, groups * (queries_per_group + 2) * d], by group: its query heads, its key head, its value head.
    """
    half = turn[0].shape[1]
    if 2 * half != channels or not _usable(qkv, half):
        return None
    turn = tuple(t.contiguous() for t in turn)
    if norms is None:
        return _SplitHeads.apply(qkv, *turn, queries_per_group)
    if any(not norm.produces for norm in norms):
        return None
    options = {"eps": norms[0].eps, "offset": float(norms[0].zero_centered)}
    return _NormHeads.apply(qkv, *(norm.weight for norm in norms), *turn, queries_per_group, options)


class _TurnTails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return kernels("latent_heads").turn_tails(x, cos, sin)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = _with_contiguous_channels(grad)
        return kernels("latent_heads").turn_tails(grad, *ctx.saved_tensors, back=True), None, None


class _KeysAndValues(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, up: Tensor, shared: Tensor, cos: Tensor, sin: Tensor, heads: int, plain: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return kernels("latent_heads").keys_and_values(up, shared, cos, sin, heads, plain)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        found = kernels("latent_heads").keys_and_values_grad(*_with_contiguous_channels(*grads), *ctx.saved_tensors)
        return *found, None, None, None, None


def latent_queries(x: Tensor, turn: Rotation) -> Tensor | None:
    """x [T, heads, unrotated + rotated channels] with the latter turned, neighbours in pairs."""
    rotated = 2 * turn[0].shape[1]
    if not _usable(x, x.shape[-1] - rotated, rotated):
        return None
    return _TurnTails.apply(x, *(t.contiguous() for t in turn))


def latent_keys_and_values(
    up: Tensor, shared: Tensor, turn: Rotation, heads: int, plain: int
) -> tuple[Tensor, Tensor] | None:
    """k [T, heads, unrotated + rotated channels] and v [T, heads, value channels].

    up: [T, heads * (unrotated + value channels)]. shared: the rotated key of all heads, [T, rotated channels], before
    its rotation. plain: the number of unrotated channels.
    """
    rotated, values = shared.shape[1], up.shape[1] // heads - plain
    if not _usable(up, plain, rotated, values) or shared.stride(-1) != 1:
        return None
    return _KeysAndValues.apply(up, shared, *(t.contiguous() for t in turn), heads, plain)
