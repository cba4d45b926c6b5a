"""How tokens get to their experts and back. Four ways with one interface:

here        all experts are on this rank: a permutation; no number waits for the device
all-to-all  each token goes to the ranks of its experts (exchange.py); the host learns how many, once a layer
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from megafp8.core.build import BuildContext
from megafp8.core.moe import exchange
from megafp8.core.moe.everywhere import Everywhere
from megafp8.core.moe.exchange import Exchange
from megafp8.core.moe.experts import ExpertRows
from megafp8.core.moe.library import Library, Trip, back, library_of, there
from megafp8.core.moe.permutation import Permutation, combine, permute_weights, sums
from megafp8.core.moe.router import Routing
from megafp8.core.moe.wire import Wire
from megafp8.core.tensor_parallel.mappings import sum_over
from megafp8.fp8.grouped_linear import runs_grouped
from megafp8.fp8.grouped_rows import RowSpec, take_rows, travels
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.parallel import Axis


class Dispatcher(Protocol):
    """Between `send` and `receive` tokens may be on their way, while something else is computed."""

    def send(self, x: Tensor, routing: Routing, weights: Tensor, spec: RowSpec) -> Any:
        """x: [T, hidden]; weights: FP32 [T, k], routing's; spec: how the experts here want their rows."""
        ...

    def receive(self, sent: Any) -> ExpertRows:
        """What this rank's experts work on."""
        ...

    def bring_back(self, y: Tensor, sent: Any, gradient: RowSpec | None = None) -> Tensor:
        """y: outputs of those rows; returns [T, hidden], the sums of each token's. gradient: how y's is wanted."""
        ...


class _Sent(NamedTuple):
    """Tokens that stay, and where their rows will be."""

    x: Tensor
    weights: Tensor
    order: Permutation
    spec: RowSpec


@dataclass(frozen=True)
class Here:
    """num_experts: all of them are on this rank."""

    num_experts: int

    def send(self, x: Tensor, routing: Routing, weights: Tensor, spec: RowSpec) -> _Sent:
        options = {"drops": routing.drops, "capacity": routing.capacity, "alignment": spec.alignment or 1}
        return _Sent(x, weights, Permutation.of(routing.experts, self.num_experts, **options), spec)

    def receive(self, sent: _Sent) -> ExpertRows:
        rows = _Rows.apply(sent.x, sent.order, sent.spec)
        return ExpertRows(rows, permute_weights(sent.weights, sent.order), sent.order.ends, sent.spec.alignment)

    def bring_back(self, y: Tensor, sent: _Sent, gradient: RowSpec | None = None) -> Tensor:
        return combine(y, sent.order, gradient)


class _Rows(torch.autograd.Function):
    """x [T, hidden] as rows by expert, in high precision or quantized."""

    @staticmethod
    def forward(ctx, x: Tensor, order: Permutation, spec: RowSpec) -> Tensor | QuantizedTensor:
        ctx.save_for_backward(order.rows, order.kept)
        return take_rows(x, order.tokens, spec, x.dtype, order.ends)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return sums(grad_output, *ctx.saved_tensors), None, None


class _Moving(NamedTuple):
    move: Exchange
    on_the_way: tuple[Tensor, Tensor]
    spec: RowSpec


@dataclass(frozen=True)
class AllToAll:
    """axis: the ranks that hold the experts, rank = etp + ETP * ep. copies: ETP, to how many ranks each token goes."""

    num_experts: int
    axis: Axis
    copies: int
    wire: Wire

    def send(self, x: Tensor, routing: Routing, weights: Tensor, spec: RowSpec) -> _Moving:
        here = self.num_experts * self.copies // self.axis.size
        options = {"drops": routing.drops, "capacity": routing.capacity}
        outgoing = Permutation.of(self._places(routing, here), self.axis.size * here, **options)
        move = Exchange.of(self.axis, self.wire, outgoing, x, spec.alignment or 1)
        weights = weights.repeat_interleave(self.copies, 1) if self.copies > 1 else weights
        return _Moving(move, exchange.send(x, weights, move), spec)

    def _places(self, routing: Routing, here: int) -> Tensor:
        """Each choice's expert on each rank that holds a part of it, of `here` on a rank: they count by rank, and a
        choice's `copies` rows follow each other."""
        if self.copies == 1:
            return routing.experts  # numbered so already, and what is dropped is one past the last
        experts = routing.experts[..., None]
        part = torch.arange(self.copies, device=experts.device)
        places = (experts // here * self.copies + part) * here + experts % here
        if routing.drops:
            places = places.where(experts < self.num_experts, self.axis.size * here)
        return places.flatten(1)

    def receive(self, sent: _Moving) -> ExpertRows:
        rows, weights = exchange.receive(sent.on_the_way, sent.move, sent.spec)
        return ExpertRows(rows, weights, sent.move.incoming.ends, sent.spec.alignment)

    def bring_back(self, y: Tensor, sent: _Moving, gradient: RowSpec | None = None) -> Tensor:
        return exchange.receive_back(exchange.send_back(y, sent.move, gradient), sent.move)


@dataclass(frozen=True)
class AllGather:
    """axis: the ranks that hold the experts, this one `count` from number `first` on. All have as many tokens."""

    first: int
    count: int
    axis: Axis
    wire: Wire

    def send(self, x: Tensor, routing: Routing, weights: Tensor, spec: RowSpec) -> Everywhere:
        capacity = None if routing.capacity is None else routing.capacity * self.axis.size
        return Everywhere(self.axis, self.wire.tokens, x, weights, routing.experts, capacity, spec)

    def receive(self, sent: Everywhere) -> ExpertRows:
        rows, weights, ends = sent.receive(self.first, self.count)
        return ExpertRows(rows, weights, ends, sent.spec.alignment)

    def bring_back(self, y: Tensor, sent: Everywhere, gradient: RowSpec | None = None) -> Tensor:
        return sum_over(combine(y, sent.order, gradient), self.axis, scatter=True)


@dataclass(frozen=True)
class ByLibrary:
    """count: experts on each of the library's ranks."""

    num_experts: int
    count: int
    library: Library
    wire: Wire

    def send(self, x: Tensor, routing: Routing, weights: Tensor, spec: RowSpec) -> tuple[Trip, Tensor, Tensor]:
        experts = routing.experts
        if routing.drops:
            experts = experts.where(experts < self.num_experts, -1)
        trip = Trip(self.library, self.wire.tokens, experts, self.num_experts, self.count, spec)
        return trip, *there(x, weights, trip)

    def receive(self, sent: tuple[Trip, Tensor, Tensor]) -> ExpertRows:
        trip, rows, weights = sent
        return ExpertRows(rows, weights, trip.order.ends, trip.spec.alignment)

    def bring_back(self, y: Tensor, sent: tuple[Trip, Tensor, Tensor], gradient: RowSpec | None = None) -> Tensor:
        return back(combine(y, sent[0].order, gradient), sent[0])


def _wire(name: str, build: BuildContext) -> Wire:
    """In FP8 what is wanted so, where all experts of the layer run in one recipe, on whatever ranks.

    The form must be the same on all ranks, so it doesn't change where an expert falls back to BF16 later: that one gets
    the values of the bytes.
    """

    def quantizer(linear: str, role: str) -> Quantizer | None:
        recipes = {build.recipe_of(f"{name}.{number}.{linear}") for number in range(build.model.num_experts)}
        recipe = recipes.pop()
        if recipes or recipe is None or not runs_grouped(recipe):
            return None
        return recipe.quantizer(role) if travels(recipe.quantizer(role)) else None

    tokens, gradients = quantizer("fc1", "input"), quantizer("fc2", "grad_output")
    plan = build.dispatch
    return Wire(tokens if plan.fp8_tokens else None, gradients if plan.fp8_gradients else None)


def dispatcher_of(name: str, build: BuildContext) -> Dispatcher:
    """The dispatcher of a layer with experts. name: of the experts, e.g. "layers.3.mlp.experts"."""
    count, parallel, wire = build.model.num_experts, build.parallel, _wire(name, build)
    if not build.exchanges_tokens:
        return Here(count)
    if build.dispatch.library and parallel.ep.size > 1:
        library = library_of(parallel.ep, build.model.hidden_size)
        return ByLibrary(count, count // parallel.ep.size, library, wire)
    if build.dispatch.gathers:
        first, last = parallel.ep.split(count)
        return AllGather(first, last - first, parallel.ep_etp, wire)
    return AllToAll(count, parallel.ep_etp, parallel.etp.size, wire)
