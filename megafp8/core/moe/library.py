"""Tokens to experts by DeepEP, where it is installed: each token travels once to a rank, whatever experts it has there.

    dispatch   tokens, choices and weights to the ranks of their experts   backward: sums of gradients come back
    combine    sums of what the ranks made of a token                      backward: gradients go where the tokens went

The library is imported when a layer is built; its interface is that of `deep_ep.Buffer` (1.x).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megafp8.core.moe.permutation import Permutation, spread, sums
from megafp8.fp8.grouped_rows import RowSpec, take_rows
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.storage import QuantizedStorage
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.parallel import Axis


@cache
def library_of(axis: Axis, hidden: int) -> Library:
    """The library over the ranks of an axis, for tokens of `hidden` values: one buffer for all layers.

    Raises ValueError where it is not installed.
    """
    try:
        import deep_ep
    except ImportError:
        raise ValueError(
            "--moe-token-dispatcher-type flex: the package deep_ep is not installed; install DeepEP, or use alltoall"
        ) from None
    kind, hidden_bytes, sizes = deep_ep.Buffer, 2 * hidden, {"nvl": 0, "rdma": 0}
    for config in (kind.get_dispatch_config(axis.size), kind.get_combine_config(axis.size)):
        sizes["nvl"] = max(sizes["nvl"], config.get_nvl_buffer_size_hint(hidden_bytes, axis.size))
        sizes["rdma"] = max(sizes["rdma"], config.get_rdma_buffer_size_hint(hidden_bytes, axis.size))
    return Library(kind(axis.group, sizes["nvl"], sizes["rdma"]))


@dataclass(frozen=True)
class Library:
    """buffer: the library's."""

    buffer: Any

    def dispatch(
        self, x: Tensor | tuple[Tensor, Tensor], experts: Tensor, weights: Tensor, num_experts: int
    ) -> tuple[Tensor | tuple[Tensor, Tensor], Tensor, Tensor, Any]:
        """x: BF16 [T, hidden], or FP8 bytes and FP32 scales; experts: int64 [T, k], -1 for none.

        Returns the tokens that came, their choices (of the experts here, from 0; -1 for others), the weights of those,
        and a handle.
        """
        per_rank, per_rdma_rank, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(experts, num_experts)
        tokens, chosen, of_tokens, _, handle, _ = self.buffer.dispatch(
            x,
            topk_idx=experts,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        )
        return tokens, chosen, of_tokens, handle

    def again(self, x: Tensor, handle: Any) -> Tensor:
        """Other values of the tokens, to where they went."""
        return self.buffer.dispatch(x, handle=handle)[0]

    def combine(self, x: Tensor, handle: Any, weights: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Sums over the ranks that a token went to, and of its weights."""
        total, of_weights, _ = self.buffer.combine(x.contiguous(), handle, topk_weights=weights)
        return total, of_weights


@dataclass
class Trip:
    """One layer's tokens there and back. order, handle: known once they are dispatched."""

    library: Library
    quantizer: Quantizer | None
    experts: Tensor
    num_experts: int
    here: int
    spec: RowSpec
    order: Permutation | None = None
    handle: Any = None


class _There(torch.autograd.Function):
    """x [T, hidden], weights FP32 [T, k] -> rows for this rank's experts, and theirs."""

    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor, trip: Trip) -> tuple[Tensor | QuantizedTensor, Tensor]:
        sent = x.detach()
        if trip.quantizer is not None:
            stored = trip.quantizer.quantize(sent, rowwise=True).rowwise
            sent = stored.data, stored.scale_inv.contiguous()
        tokens, chosen, of_tokens, trip.handle = trip.library.dispatch(
            sent, trip.experts, weights.detach().contiguous(), trip.num_experts
        )
        if trip.quantizer is not None:
            spec = trip.quantizer.spec
            tokens = QuantizedStorage(*tokens, spec.tile, spec.scale, "rowwise")
        chosen = chosen.where(chosen >= 0, trip.here)
        order = Permutation.of(chosen, trip.here, drops=True, alignment=trip.spec.alignment or 1)
        ctx.trip, trip.order = trip, order.cut(int(order.counts.sum()))
        rows = take_rows(tokens, trip.order.tokens, trip.spec, x.dtype, trip.order.ends)
        return rows, spread(of_tokens.reshape(-1, 1), trip.order.choices, trip.order.filled).squeeze(1)

    @staticmethod
    def backward(ctx, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor, Tensor, None]:
        trip, order = ctx.trip, ctx.trip.order
        dx = sums(grad_rows, order.rows, order.kept)
        dw = sums(grad_weights[:, None], order.rows.reshape(-1, 1), order.kept.reshape(-1, 1)).view(order.rows.shape)
        return *trip.library.combine(dx, trip.handle, dw), None


class _Back(torch.autograd.Function):
    """What became of the tokens that came, [N, hidden] -> the sums of each rank's own tokens, [T, hidden]."""

    @staticmethod
    def forward(ctx, y: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        return trip.library.combine(y, trip.handle)[0]

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.library.again(grad_output.contiguous(), ctx.trip.handle), None


def there(x: Tensor, weights: Tensor, trip: Trip) -> tuple[Tensor | QuantizedTensor, Tensor]:
    """Rows [R, hidden] for this rank's experts as `trip.spec` says, and their weights FP32 [R]."""
    return _There.apply(x, weights, trip)


def back(y: Tensor, trip: Trip) -> Tensor:
    """y: [N, hidden], summed over the experts here; returns [T, hidden]."""
    return _Back.apply(y, trip)
