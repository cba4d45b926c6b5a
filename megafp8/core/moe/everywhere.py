"""Every token to all ranks of the experts, each of which takes the rows of its own: all-gather.

forward   tokens, choices and weights are gathered    backward: gradients are summed and scattered
back      the ranks' outputs are summed and scattered  backward: gradients are gathered
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.core.moe.permutation import Permutation, spread, sums
from megafp8.fp8.grouped_rows import RowSpec, pack, take_rows, unpack
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.parallel import Axis


class Everywhere:
    """The tokens of all ranks, on their way from the start; all ranks have as many.

    x: [T, hidden]; weights: FP32 [T, k]; experts: int64 [T, k]. quantizer: tokens travel in its FP8. capacity: rows
    that each expert is filled up to, of all ranks together. spec: how rows are wanted. order: of the rows taken, once
    they are received.
    """

    order: Permutation

    def __init__(
        self,
        axis: Axis,
        quantizer: Quantizer | None,
        x: Tensor,
        weights: Tensor,
        experts: Tensor,
        capacity: int | None,
        spec: RowSpec,
    ) -> None:
        self.axis, self.quantizer, self.capacity, self.spec = axis, quantizer, capacity, spec
        self.x, self.weights = x, weights
        tokens = x.detach() if quantizer is None else pack(quantizer.quantize(x, rowwise=True).rowwise)
        moving = (experts, tokens, weights.detach())
        self._moving = [axis.post_gather(part.contiguous()) for part in moving]

    def receive(self, first: int, count: int) -> tuple[Tensor | QuantizedTensor, Tensor, Tensor]:
        """The rows of experts `first` to `first + count` as `spec` says, [R, hidden]; weights FP32 [R]; their ends.

        Waits for the number of rows, the only wait for the device.
        """
        experts, tokens, weights = self._arrived()
        own = (experts >= first) & (experts < first + count)
        own = (experts - first).where(own, count)
        order = Permutation.of(own, count, drops=True, capacity=self.capacity, alignment=self.spec.alignment or 1)
        self.order = order.cut(int(order.counts.sum()))
        rows, of_rows = _Take.apply(self.x, self.weights, self, tokens, weights, self.spec)
        self.x = self.weights = None
        return rows, of_rows, self.order.ends

    def _arrived(self) -> list[Tensor]:
        moving, self._moving = self._moving, []
        for _, pending in moving:
            pending.wait()
        return [part for part, _ in moving]


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x: Tensor, weights: Tensor, sent: Everywhere, tokens: Tensor, all_weights: Tensor, spec: RowSpec
    ) -> tuple[Tensor | QuantizedTensor, Tensor]:
        ctx.axis, ctx.order, order = sent.axis, sent.order, sent.order
        source = tokens if sent.quantizer is None else unpack(sent.quantizer, tokens, x.shape[1])
        rows = take_rows(source, order.tokens, spec, x.dtype, order.ends)
        return rows, spread(all_weights.reshape(-1, 1), order.choices, order.filled).squeeze(1)

    @staticmethod
    def backward(ctx, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor | None, ...]:
        order = ctx.order
        dx = sums(grad_rows, order.rows, order.kept)
        dw = sums(grad_weights[:, None], order.rows.reshape(-1, 1), order.kept.reshape(-1, 1)).view(order.rows.shape)
        return ctx.axis.scatter_sum(dx), ctx.axis.scatter_sum(dw), None, None, None, None
