"""Tokens to the experts of other ranks and back: all-to-all, in two steps that other work can lie between.

    send      rows by rank and expert leave           backward: gradients of rows arrive, summed by token
    receive   rows arrive, sorted by expert           backward: gradients of rows leave
    send_back, receive_back: the same the other way

Ranks of the axis hold the experts in turn; with expert tensor parallelism each expert's tokens go to all ranks that
hold a part of it, whose outputs are parts of a sum. So a token's k choices are k * ETP rows to the sender, and the sum
over them, in FP32, is the whole output.

A token's weight for an expert, FP32, travels at the end of its row, and so do their gradients: one message for both.

What autograd carries from send to receive is a placeholder of the arriving rows' shape, without memory: their bytes
travel beside it, in `Exchange`, which one forward and its backward share.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from megafp8.core.moe.permutation import Permutation, arrivals, spread, spread_gradient, sums
from megafp8.core.moe.wire import Wire
from megafp8.fp8.grouped_rows import RowSpec, pack, row_bytes, take_rows, unpack, unpack_values
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.parallel import Axis, Pending

WEIGHT = 4
"""Bytes of a token's weight for an expert, or of that weight's gradient, which travel at the end of the row's."""


@dataclass
class Exchange:
    """One layer's exchange in one forward, and its backward.

    outgoing: this rank's choices by rank and expert. incoming: the rows that arrived, by expert. sent, received: rows
    to and from each rank. hidden: width of a row. moving: what is on its way.
    """

    axis: Axis
    wire: Wire
    outgoing: Permutation
    incoming: Permutation
    sent: list[int]
    received: list[int]
    hidden: int
    dtype: torch.dtype
    moving: list[tuple[Tensor, Pending]] = field(default_factory=list)

    @property
    def row_bytes(self) -> int:
        """Of a token's row on its way to an expert."""
        quantizer = self.wire.tokens
        return self.gradient_bytes if quantizer is None else row_bytes(quantizer, self.hidden)

    @property
    def gradient_bytes(self) -> int:
        """Of that row's gradient."""
        return self.hidden * self.dtype.itemsize

    @staticmethod
    def of(axis: Axis, wire: Wire, outgoing: Permutation, x: Tensor, alignment: int) -> Exchange:
        """Tells all ranks how many rows come, by expert; waits for the numbers, the only wait for the device."""
        counts = outgoing.counts.view(axis.size, -1)
        arriving, pending = axis.post_deal(counts, [1] * axis.size, [1] * axis.size)
        pending.wait()
        leave, come = torch.stack([counts, arriving]).tolist()
        sent, received = ([sum(of_rank) for of_rank in numbers] for numbers in (leave, come))
        incoming = arrivals(arriving, come, alignment)
        return Exchange(axis, wire, outgoing.cut(sum(sent)), incoming, sent, received, x.shape[1], x.dtype)

    def post(self, rows: Tensor, *, back: bool = False) -> None:
        """Starts to send rows to the experts, or what came of them back."""
        sides = (self.received, self.sent) if back else (self.sent, self.received)
        self.moving.append(self.axis.post_deal(rows.contiguous(), *sides))

    def arrived(self) -> Tensor:
        """What was posted first, once it is there."""
        rows, pending = self.moving.pop(0)
        pending.wait()
        return rows

    def placeholder(self, like: Tensor, *shape: int) -> Tensor:
        return _nothing(like.dtype, like.device).expand(shape)


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """One zero that stands for rows whose bytes travel beside autograd: nobody reads or writes it, so all streams and
    steps may share it, and none is filled each time."""
    with torch.inference_mode(False):  # made in an evaluation, it is there for training as well
        return torch.zeros((), dtype=dtype, device=device)


def _joined(rows: int, width: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Room for rows of `width` bytes and a number each, which travel as one message: all of it as bytes, the rows'
    part as bytes, and the numbers, FP32 [rows, 1]. Each row begins at a multiple of 16 bytes."""
    whole = torch.empty(rows, joined_bytes(width), dtype=torch.uint8, device=like.device)
    return whole, *_parted(whole, width)


def joined_bytes(width: int) -> int:
    """Bytes of a row of `width` bytes that travels with a number."""
    return -(-(width + WEIGHT) // 16) * 16


def _parted(whole: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Of what `_joined` made, or what has arrived of it: the rows as bytes, and the numbers."""
    return whole[:, :width], whole[:, -WEIGHT:].view(torch.float32)


def _packed_rows(x: Tensor, exchange: Exchange, quantizer: Quantizer | None, out: Tensor | None = None) -> Tensor:
    """The rows of `x` [T, hidden] that leave; in FP8 each token is quantized once. out: receives their bytes."""
    tokens, filled = exchange.outgoing.tokens, exchange.outgoing.filled
    if quantizer is None:
        return spread(x, tokens, filled, None if out is None else out.view(x.dtype))
    if filled:  # rows that fill up are those of a token of zeros
        x, tokens = torch.nn.functional.pad(x, (0, 0, 0, 1)), tokens.where(tokens >= 0, len(x))
    return spread(pack(quantizer.quantize(x, rowwise=True).rowwise), tokens, False, out)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weights: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        ctx.exchange, rows, order = exchange, sum(exchange.received), exchange.outgoing
        whole, packed, numbers = _joined(len(order.choices), exchange.row_bytes, x)
        _packed_rows(x, exchange, exchange.wire.tokens, packed)
        spread(weights.reshape(-1, 1), order.choices, order.filled, numbers)
        exchange.post(whole)
        return exchange.placeholder(x, rows, exchange.hidden), exchange.placeholder(weights, rows)

    @staticmethod
    def backward(ctx, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor, Tensor, None]:
        exchange, order = ctx.exchange, ctx.exchange.outgoing
        rows, numbers = _parted(exchange.arrived(), exchange.gradient_bytes)
        dx = sums(rows.view(exchange.dtype), order.rows, order.kept)
        each = order.rows.reshape(-1, 1), None if order.kept is None else order.kept.reshape(-1, 1)
        return dx, sums(numbers, *each).view(order.rows.shape), None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, exchange: Exchange, spec: RowSpec) -> tuple[Tensor, Tensor]:
        ctx.exchange, order, quantizer = exchange, exchange.incoming, exchange.wire.tokens
        arrived, numbers = _parted(exchange.arrived(), exchange.row_bytes)
        if quantizer is not None:
            arrived = unpack(quantizer, arrived, exchange.hidden)
        else:
            arrived = arrived.view(exchange.dtype)
        x = take_rows(arrived, order.choices, spec, exchange.dtype, order.ends)
        return x, spread(numbers, order.choices, order.filled).squeeze(1)

    @staticmethod
    def backward(ctx, grad_rows: Tensor, grad_weights: Tensor) -> tuple[Tensor, Tensor, None, None]:
        exchange, rows = ctx.exchange, ctx.exchange.incoming.rows
        whole, packed, numbers = _joined(len(rows), exchange.gradient_bytes, grad_rows)
        sums(grad_rows, rows, None, packed.view(exchange.dtype))
        sums(grad_weights[:, None], rows, None, numbers)
        exchange.post(whole, back=True)
        of_rows = exchange.placeholder(grad_rows, len(rows), exchange.hidden)
        return of_rows, exchange.placeholder(grad_weights, len(rows)), None, None


class _SendBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor, exchange: Exchange, gradient: RowSpec | None) -> Tensor:
        ctx.exchange, ctx.gradient = exchange, gradient
        exchange.post(sums(y, exchange.incoming.rows, None), back=True)
        return exchange.placeholder(y, sum(exchange.sent), exchange.hidden)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None]:
        exchange, order, arrived = ctx.exchange, ctx.exchange.incoming, ctx.exchange.arrived()
        quantizer, wanted = exchange.wire.gradients, ctx.gradient
        if quantizer is not None and wanted is not None and wanted.quantizer == quantizer:
            rows = unpack(quantizer, arrived, exchange.hidden)
            return take_rows(rows, order.choices, wanted, exchange.dtype), None, None
        if quantizer is not None:
            arrived = unpack_values(quantizer, arrived, exchange.hidden, exchange.dtype)
        return spread_gradient(arrived, order.choices, order.filled, wanted, order.ends), None, None


class _ReceiveBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, order = exchange, exchange.outgoing
        return sums(exchange.arrived(), order.rows, order.kept)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.post(_packed_rows(grad_output, exchange, exchange.wire.gradients))
        return exchange.placeholder(grad_output, sum(exchange.sent), exchange.hidden), None


def send(x: Tensor, weights: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
    """Starts to send tokens x [T, hidden] and their weights FP32 [T, k]; what it returns is for `receive`."""
    return _Send.apply(x, weights, exchange)


def receive(sent: tuple[Tensor, Tensor], exchange: Exchange, spec: RowSpec) -> tuple[Tensor | QuantizedTensor, Tensor]:
    """The rows for this rank's experts, [R, hidden] as `spec` says, and their weights FP32 [R]."""
    return _Receive.apply(*sent, exchange, spec)


def send_back(y: Tensor, exchange: Exchange, gradient: RowSpec | None = None) -> Tensor:
    """Starts to send the experts' outputs [R, hidden] to where their tokens came from. gradient: as in `combine`."""
    return _SendBack.apply(y, exchange, gradient)


def receive_back(sent: Tensor, exchange: Exchange) -> Tensor:
    """The sum of each token's outputs, [T, hidden]."""
    return _ReceiveBack.apply(sent, exchange)
