"""Where a non-finite value came from: a step is run again, from the same state, and all that flows is looked at.

A step whose loss or gradient is not finite leaves the model as it was, so running its batches again meets the same
values. `Trace` watches that run: weights, what goes into every module and comes out, and on the way back gradients. It
knows no model: modules and parameters have names (`Linear.name`, `param.spec.name`), tensors flow through them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megafp8.fp8.param import Weight
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.parallel import ParallelContext
from megafp8.params import GradSink, spec_of

WEIGHTS, FORWARD, BACKWARD = -1, 0, 1


@dataclass(frozen=True)
class Finding:
    """The first non-finite values of a step. name: of a module or parameter. role: weight, input or output; grad_output
    or grad_input, the gradient that came to the module or that it made; wgrad. rank: that met it first. place: how many
    looks at that pass came before."""

    name: str
    role: str
    phase: int
    microbatch: int
    rank: int
    place: int = 0

    def __str__(self) -> str:
        if self.phase == WEIGHTS:
            return f"{self.name} ({self.role}), before the step, on rank {self.rank}"
        way = "forward" if self.phase == FORWARD else "backward"
        return f"{self.name} ({self.role}) in the {way} of microbatch {self.microbatch} on rank {self.rank}"


class Trace:
    """Looks at one step: enter `watching(model)`, give the step `sink(grads)`, then ask for the `first` finding."""

    def __init__(self) -> None:
        self._flags: list[Tensor] = []
        self._labels: list[tuple[str, str, int, int]] = []
        self._addresses: list[int] = []  # of gradients that several hooks get to see
        self._microbatch = 0

    @torch.no_grad()
    def check(self, name: str, role: str, x: Any, phase: int, live: Tensor | None = None) -> None:
        """Notes whether a tensor is finite, where `live` (bool, None: everywhere); nothing waits for the device."""
        place = x
        if isinstance(x, QuantizedTensor):
            place, x = (x.rowwise or x.colwise).data, x.dequantize()  # the values are new ones at each look
        if isinstance(x, Tensor) and x.is_floating_point() and x.element_size() > 1:
            bad = ~x.isfinite()
            self._flags.append((bad if live is None else bad & live).any())
            self._labels.append((name, role, phase, self._microbatch))
            self._addresses.append(place.data_ptr())

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside, everything that runs in the model is looked at."""
        handles = []
        for param in model.parameters():
            self._check_weight(param)
            if param.requires_grad:
                name = spec_of(param).name
                handles.append(param.register_hook(lambda g, name=name: self.check(name, "wgrad", g, BACKWARD)))
        for name, module in named_modules(model):
            handles.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leaving(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def sink(self, grads: GradSink) -> GradSink:
        """The same sink, which looks at the weight gradients that are delivered there."""
        return _Looking(grads, self)

    def first(self, parallel: ParallelContext) -> Finding | None:
        """The first finding over all ranks, which all call it: by microbatch and stage in forward, backward after; in a
        stage by what its ranks, which all do the same, have done before: what one has sent the others meet later."""
        findings = [Finding(**f) for found in parallel.everyone.exchange(self._own(parallel)) for f in found]

        def order(f: Finding) -> tuple[int, ...]:
            stage = f.rank * parallel.pp.size // parallel.world_size
            return f.phase, f.microbatch, -stage if f.phase == BACKWARD else stage, f.place, f.rank

        return min(findings, key=order, default=None)

    def _own(self, parallel: ParallelContext) -> list[dict[str, Any]]:
        bad = torch.stack(self._flags).nonzero().flatten().tolist() if self._flags else []
        if not bad:
            return []
        at = self._maker(bad[0])
        name, role, *run = self._labels[at]
        place = sum(label[2:] == tuple(run) for label in self._labels[:at])
        return [asdict(Finding(name, role, *run, parallel.rank, place))]

    def _maker(self, at: int) -> int:
        """Which look blames the right module: a gradient is seen by the module that it goes to, then by those whose
        input it is of, which made it, the innermost one last."""
        seen = [at]
        while seen[-1] + 1 < len(self._labels) and self._addresses[seen[-1] + 1] == self._addresses[at]:
            seen.append(seen[-1] + 1)
        makers = [i for i in seen if self._labels[i][1] == "grad_input"]
        return makers[-1] if self._labels[at][2] == BACKWARD and makers else at

    def _check_weight(self, param: Tensor) -> None:
        owner = getattr(param, "owner", None)
        value = param
        if isinstance(owner, Weight) and owner.primary is not None:
            value = owner.primary.data["rowwise"].float()
        self.check(spec_of(param).name, "weight", value, WEIGHTS)

    def _entering(self, name: str):
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            step = kwargs.get("step")
            if step is not None:
                self._microbatch = step.microbatch
            for x in args:
                self._flowing(name, "input", "grad_input", x)

        return hook

    def _leaving(self, name: str):
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            live_rows = getattr(module, "live_rows", None)  # of a module whose output has rows that are nobody's
            live = None if live_rows is None else live_rows(*args)
            for x in output if isinstance(output, tuple) else (output,):
                self._flowing(name, "output", "grad_output", x, live)

        return hook

    def _flowing(self, name: str, role: str, grad_role: str, x: Any, live: Tensor | None = None) -> None:
        self.check(name, role, x, FORWARD, live)
        if isinstance(x, Tensor) and x.requires_grad and x.is_floating_point():
            number = self._microbatch

            def look(grad: Tensor) -> None:
                self._microbatch = number
                self.check(name, grad_role, grad, BACKWARD, live)

            x.register_hook(look)


class _Looking:
    """A gradient sink that is looked into."""

    def __init__(self, sink: GradSink, trace: Trace) -> None:
        self._sink, self._trace = sink, trace

    def buffer(self, param: Tensor) -> Tensor:
        return self._sink.buffer(param)

    def target(self, param: Tensor) -> tuple[Tensor, bool]:
        return self._sink.target(param)

    def ready(self, param: Tensor) -> None:
        self._trace.check(spec_of(param).name, "wgrad", self._sink.buffer(param), BACKWARD)
        self._sink.ready(param)


def named_modules(model: nn.Module, name: str = "model") -> Iterator[tuple[str, nn.Module]]:
    """(global name, module) of a model and all inside: a module's own `name`, or what its parameters' names have in
    common; else its place in the module that it is in."""
    yield name, model
    for child, module in model.named_children():
        own = getattr(module, "name", None)
        names = [spec_of(param).name for param in module.parameters()]
        if not isinstance(own, str):
            own = _common(names) or f"{name}.{child}"
        yield from named_modules(module, own)


def _common(names: Iterable[str]) -> str:
    """The leading words that dotted names have in common, the last word of each left out."""
    parts = [name.split(".")[:-1] for name in names]
    common = []
    for words in zip(*parts, strict=False):
        if len(set(words)) > 1:
            break
        common.append(words[0])
    return ".".join(common)
