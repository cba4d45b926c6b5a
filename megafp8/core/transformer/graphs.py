"""CUDA graphs of transformer layers: what a microbatch launches is recorded once, and replayed for each one after it.

A layer has a graph of its forward and two of its backward: a step's first microbatch writes weight gradients into the
optimizer's buffers, later ones add to them. Nothing else of a microbatch differs but what lies in tensors, and those
stay where they are: the residual stream, its gradient, rotary angles, weights with their FP8 copies (`Weight.stay`),
gradient buffers, delayed scaling's scales and history. So bits are those of the layers' own calls.

    forward    layer 0 ... L-1       recorded and replayed in this order, in one pool of memory,
    backward   layer L-1 ... 0       so what one graph has done with, the next may use

What a layer keeps for backward lies in the pool, once: a microbatch's backward comes before the next one's forward.
Outside of the graphs, between replays, weights' copies are derived (once a step) and buckets are told that gradients
are `ready`.

Messages between tensor-parallel ranks are recorded where they are sent. What decides on recording is alike on all of
them, so they record at the same step; then a communicator sees the same messages in the same order everywhere, whether
they come from a graph or from a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from megafp8.core.transformer.core_attention import Sequences
from megafp8.core.transformer.layer import TransformerLayer
from megafp8.core.transformer.recorders import Recorder, Run, recorder_on
from megafp8.fp8 import Linear
from megafp8.fp8.wgrad import put
from megafp8.meter import Meter
from megafp8.params import GradSink, attach_spec, spec_of
from megafp8.step import StepContext


class _Recorded(GradSink):
    """The gradient sink of what is recorded: says where gradients lie; whether to add is the graph's matter."""

    def __init__(self, grads: GradSink) -> None:
        self._grads = grads
        self.adds, self.arrived = True, []

    def buffer(self, param: Tensor) -> Tensor:
        return self._grads.place(param)

    def target(self, param: Tensor) -> tuple[Tensor, bool]:
        return self._grads.place(param), self.adds

    def ready(self, param: Tensor) -> None:
        self.arrived.append(param)


class LayerGraph:
    """One layer's graphs. x: where its input lies; dy: where every layer's gradients lie, dX written over dY.

    Linears deliver their own gradients. Those of other parameters, norms' gains, come from autograd, and are asked of
    tensors that stand in for the parameters: autograd's own node of a parameter belongs to the stream on which it was
    first used.
    """

    def __init__(self, layer: TransformerLayer, sequences: Sequences, step: StepContext, dy: Tensor) -> None:
        self._layer, self._sequences, self._dy = layer, sequences, dy
        self._sink = _Recorded(step.grads)
        self._step = replace(step, grads=self._sink)
        self._linears = [module for module in layer.modules() if isinstance(module, Linear)]
        own = {id(param) for linear in self._linears for param in linear.parameters()}
        others = {name: param for name, param in layer.named_parameters() if id(param) not in own}
        self._stand_ins = {name: _stand_in(param) for name, param in others.items()}
        self.names = [spec_of(param).name for param in layer.parameters()]
        self._x: Tensor | None = None
        self._y: Tensor | None = None
        self._graph: Tensor | None = None  # the output with autograd's graph behind it
        self._arrived: list[Tensor] = []
        self._waiting = False  # between a microbatch's forward and backward
        self.forward: Run | None = None
        self.backward: dict[bool, Run] = {}

    def derive(self, step: StepContext) -> None:
        """Brings the weights' FP8 copies up to date. `stay` makes the places of the first ones theirs."""
        for linear in self._linears:
            linear.derive_weight(step)

    def stay(self) -> None:
        for linear in self._linears:
            linear.weight.owner.stay()

    def warm_up(self, x: Tensor) -> Tensor:
        """Forward and both backwards once; `dy` must be zeros. Returns the output."""
        y = self._run_forward(x.detach().requires_grad_())
        for adds in (False, True):
            self._run_backward(adds)
        self._graph = None
        return y

    def record_forward(self, x: Tensor, recorder: Recorder) -> Tensor:
        """Returns where the output will lie."""
        self._x = x.detach().requires_grad_()

        def run() -> None:
            y = self._run_forward(self._x)
            if self._y is None:
                self._y = y
            else:  # not in a graph, whose second run is a replay
                self._y.copy_(y)

        self.forward = recorder.record(run)
        return self._y

    def record_backward(self, recorder: Recorder) -> None:
        self.backward = {adds: recorder.record(lambda adds=adds: self._run_backward(adds)) for adds in (False, True)}
        self._graph = None  # what was kept for it is free for the next graphs

    def _run_forward(self, x: Tensor) -> Tensor:
        self._live = x
        with torch.enable_grad():
            self._graph = functional_call(self._layer, self._stand_ins, (x, self._sequences, self._step))
        return self._graph.detach()

    def _run_backward(self, adds: bool) -> None:
        sink = self._sink
        sink.adds, sink.arrived = adds, []
        wanted = (self._live, *self._stand_ins.values())
        dx, *grads = torch.autograd.grad(self._graph, wanted, self._dy, retain_graph=True, allow_unused=True)
        with torch.no_grad():
            for param, grad in zip(self._stand_ins.values(), grads, strict=True):
                if grad is not None:  # else a linear has delivered it
                    put(grad, *sink.target(param))
                    sink.ready(param)
            self._dy.copy_(dx)
        self._arrived = sink.arrived

    def replay_forward(self, x: Tensor) -> Tensor:
        assert not self._waiting, (
            "a graph has room for one microbatch: its backward comes before the next one's forward"
        )
        self._waiting = True
        if x.data_ptr() != self._x.data_ptr():
            self._x.detach().copy_(x)
        self.forward()
        return self._y.detach()

    def replay_backward(self, dy: Tensor, grads: GradSink) -> Tensor:
        self._waiting = False
        if dy.data_ptr() != self._dy.data_ptr():
            self._dy.copy_(dy)
        first = [not grads.target(param)[1] for param in self._arrived]
        assert all(first) or not any(first), "some of a layer's gradients are a step's first, others are not"
        self.backward[not first[0]]()
        for param in self._arrived:
            grads.ready(param)
        return self._dy.detach()


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, layer: LayerGraph, grads: GradSink) -> Tensor:
        ctx.layer, ctx.grads = layer, grads
        return layer.replay_forward(x)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None, None]:
        return ctx.layer.replay_backward(dy, ctx.grads), None, None


class LayerGraphs:
    """Runs a block's layers from graphs (`step.LayerRunner`), recorded when `warmup_steps` steps have run without.

    wait: for parameters of these names that may still be on their way from other ranks. say: takes a line for the log.
    meter: counts what this rank sends.
    They are recorded again when a parameter has moved or its linear computes with another recipe. A microbatch of
    another shape, or of several documents, runs without.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        warmup_steps: int = 1,
        wait: Callable[[Iterable[str]], None] = lambda names: None,
        say: Callable[[str], None] = lambda line: None,
        recorder: Callable[[torch.device, Meter | None], Recorder] = recorder_on,
        meter: Meter | None = None,
    ) -> None:
        self._device, self._warmup_steps, self._wait, self._say = device, warmup_steps, wait, say
        self._recorder, self._meter = recorder, meter
        self._records: Recorder | None = None
        self._steps = 0
        self._drop()

    def release(self) -> None:
        """Frees the graphs, before the communicators that their messages use are gone."""
        if self._records is not None:
            self._records.release()
        self._drop()

    def _drop(self) -> None:
        self._records = None
        self.layers: list[LayerGraph] = []
        self._key: list[Any] = []
        self._x: Tensor | None = None
        self._turn: tuple[Tensor, ...] = ()

    def run(self, layers: nn.Module, x: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        """x: [T, hidden], with its graph; returns the same shape."""
        first = step.microbatch == 0
        if first:
            self._begin_step(layers, x, sequences, step)
        if not self.layers or not self._fits(x, sequences, step):
            return layers(x, sequences, step)
        for place, value in zip(self._turn, sequences.rotation or (), strict=True):
            place.copy_(value)
        for layer in self.layers:
            if first:
                self._wait(layer.names)
                layer.derive(step)
            x = _Replay.apply(x, layer, step.grads)
        return x

    def _begin_step(self, layers: nn.Module, x: Tensor, sequences: Sequences, step: StepContext) -> None:
        key = _places(layers) if self.layers else []
        if key != self._key:
            self.release()
        if not self.layers and self._steps >= self._warmup_steps and sequences.cu_seqlens is None:
            self._record(layers, x, sequences, step)
        self._steps += 1

    def _fits(self, x: Tensor, sequences: Sequences, step: StepContext) -> bool:
        alike = x.shape == self._x.shape and sequences.batch == self._sequences.batch and sequences.cu_seqlens is None
        return alike and step.scaling is self._step.scaling and step.grads is self._step.grads

    def _record(self, layers: Sequence[TransformerLayer], x: Tensor, sequences: Sequences, step: StepContext) -> None:
        """With a step's first microbatch: gradient buffers hold nothing yet, and what a history sees it sees again."""
        start, recorder = time.perf_counter(), self._recorder(self._device, self._meter)
        self._x, dy = x.detach().clone(), torch.zeros_like(x)
        self._turn = tuple(t.clone(memory_format=torch.contiguous_format) for t in sequences.rotation or ())
        self._sequences = replace(sequences, rotation=self._turn or None)
        self._step = step
        graphs = [LayerGraph(layer, self._sequences, step, dy) for layer in layers]
        for layer in graphs:
            self._wait(layer.names)
            layer.stay()
            layer.derive(step)

        def warm_up() -> None:
            y = self._x
            for layer in graphs:
                y = layer.warm_up(y)

        recorder.warm_up(warm_up)
        place = self._x
        for layer in graphs:
            place = layer.record_forward(place, recorder)
        for layer in reversed(graphs):
            layer.record_backward(recorder)
        self.layers, self._key, self._records = graphs, _places(layers), recorder
        held, took, count = recorder.held_bytes, time.perf_counter() - start, len(graphs)
        if held is None:
            self._say(f"no CUDA graphs on this device ({self._device.type}): layers are called")
        else:
            self._say(f"CUDA graphs: {3 * count} of {count} layers, {held / 2**30:.2f} GiB, recorded in {took:.1f} s")


def _stand_in(param: nn.Parameter) -> Tensor:
    """The same values, and the same parameter to whoever asks for its spec, with gradients of its own."""
    return attach_spec(param.detach().requires_grad_(), spec_of(param))


def _places(layers: nn.Module) -> list[tuple[Any, int]]:
    """Where the layers' parameters lie, and who owns their bytes: another owner has other copies."""
    return [(getattr(param, "owner", None), param.data_ptr()) for param in layers.parameters()]
