"""How tokens get to their experts and back. Three ways with one interface:

here        all experts are on this rank: a permutation; no number waits for the device
all-to-all  each token goes to the ranks of its experts (exchange.py); the host learns how many, once a layer
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from megafp8.core.build import BuildContext
from megafp8.core.moe import exchange
from megafp8.core.moe.everywhere import Everywhere
from megafp8.core.moe.exchange import Exchange
from megafp8.core.moe.experts import ExpertRows, Experts
from megafp8.core.moe.permutation import Permutation, combine, permute_weights, sums
from megafp8.core.moe.router import Routing
from megafp8.core.moe.wire import Wire
from megafp8.core.tensor_parallel.mappings import sum_over
from megafp8.fp8.grouped_rows import RowSpec, take_rows
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.parallel import Axis


class Dispatcher(Protocol):
    """Between `send` and `receive` tokens may be on their way, while something else is computed."""

    def send(self, x: Tensor, routing: Routing, weights: Tensor) -> Any:
        """x: [T, hidden]; weights: FP32 [T, k], routing's."""
        ...

    def receive(self, sent: Any, *, training: bool) -> ExpertRows:
        """What this rank's experts work on; training: a backward may follow."""
        ...

    def bring_back(self, y: Tensor, sent: Any) -> Tensor:
        """y: outputs of those rows; returns [T, hidden], the sums of each token's."""
        ...


@dataclass(frozen=True)
class Here:
    """num_experts: all of them are on this rank. spec: of the rows that they want, in backward's presence."""

    num_experts: int
    spec: RowSpec

    def send(self, x: Tensor, routing: Routing, weights: Tensor) -> tuple[Tensor, Tensor, Permutation]:
        options = {"drops": routing.drops, "capacity": routing.capacity, "alignment": self.spec.alignment}
        return x, weights, Permutation.of(routing.experts, self.num_experts, **options)

    def receive(self, sent: tuple[Tensor, Tensor, Permutation], *, training: bool) -> ExpertRows:
        x, weights, order = sent
        rows = _Rows.apply(x, order, _for(self.spec, training), x.dtype)
        return ExpertRows(rows, permute_weights(weights, order), order.counts)

    def bring_back(self, y: Tensor, sent: tuple[Tensor, Tensor, Permutation]) -> Tensor:
        return combine(y, sent[2])


class _Rows(torch.autograd.Function):
    """x [T, hidden] as rows by expert, in high precision or quantized."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Permutation, spec: RowSpec, dtype: torch.dtype) -> Tensor | QuantizedTensor:
        ctx.save_for_backward(order.rows, order.kept)
        return take_rows(x, order.tokens, spec, dtype)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        return sums(grad_output, *ctx.saved_tensors), None, None, None


@dataclass(frozen=True)
class AllToAll:
    """axis: the ranks that hold the experts, rank = etp + ETP * ep. copies: ETP, to how many ranks each token goes."""

    num_experts: int
    axis: Axis
    copies: int
    wire: Wire
    spec: RowSpec

    def send(self, x: Tensor, routing: Routing, weights: Tensor) -> tuple[Exchange, tuple[Tensor, Tensor]]:
        """A choice's `copies` rows follow each other; each rank's experts count from 0."""
        here = self.num_experts * self.copies // self.axis.size
        experts = routing.experts[..., None]
        part = torch.arange(self.copies, device=experts.device)
        places = (experts // here * self.copies + part) * here + experts % here
        if routing.drops:
            places = places.where(experts < self.num_experts, self.axis.size * here)
        options = {"drops": routing.drops, "capacity": routing.capacity}
        outgoing = Permutation.of(places.flatten(1), self.axis.size * here, **options)
        move = Exchange.of(self.axis, self.wire, outgoing, x, self.spec.alignment)
        return move, exchange.send(x, weights.repeat_interleave(self.copies, 1), move)

    def receive(self, sent: tuple[Exchange, tuple[Tensor, Tensor]], *, training: bool) -> ExpertRows:
        move, travelling = sent
        rows, weights = exchange.receive(travelling, move, _for(self.spec, training))
        return ExpertRows(rows, weights, move.incoming.counts)

    def bring_back(self, y: Tensor, sent: tuple[Exchange, tuple[Tensor, Tensor]]) -> Tensor:
        return exchange.receive_back(exchange.send_back(y, sent[0]), sent[0])


@dataclass(frozen=True)
class AllGather:
    """axis: the ranks that hold the experts, this one `count` from number `first` on. All have as many tokens."""

    first: int
    count: int
    axis: Axis
    wire: Wire
    spec: RowSpec

    def send(self, x: Tensor, routing: Routing, weights: Tensor) -> Everywhere:
        capacity = None if routing.capacity is None else routing.capacity * self.axis.size
        return Everywhere(self.axis, self.wire.tokens, x, weights, routing.experts, capacity)

    def receive(self, sent: Everywhere, *, training: bool) -> ExpertRows:
        rows, weights, counts = sent.receive(self.first, self.count, _for(self.spec, training))
        return ExpertRows(rows, weights, counts)

    def bring_back(self, y: Tensor, sent: Everywhere) -> Tensor:
        return sum_over(combine(y, sent.order), self.axis, scatter=True)


def _for(spec: RowSpec, training: bool) -> RowSpec:
    return spec if training and torch.is_grad_enabled() else replace(spec, colwise=False)


def dispatcher_of(build: BuildContext, experts: Experts) -> Dispatcher:
    """The dispatcher of the layer whose experts on this rank are `experts`."""
    parallel = build.parallel
    if not build.exchanges_tokens:
        return Here(build.model.num_experts, experts.row_spec)
    first, _ = parallel.ep.split(build.model.num_experts)
    if build.dispatch.gathers:
        return AllGather(first, len(experts), parallel.ep_etp, Wire(), experts.row_spec)
    return AllToAll(build.model.num_experts, parallel.ep_etp, parallel.etp.size, Wire(), experts.row_spec)
