"""Flat FP32 gradient buffers: where every weight gradient is accumulated.

Parameters are laid out in one flat buffer for each (dtype, expert or not): one reduction, one gather and one fused
update serve the whole buffer. Masters and moments are laid out alike, so an element has the same offset in all of
them. `plan_layouts` is a pure function of what it is told about the parameters; `GradBuffers` is the `GradSink` that
the code below the optimizer sees.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from megafp8.parallel import Axis
from megafp8.params import ParamSpec, spec_of

ALIGNMENT = 64
"""Elements that every parameter's offset is a multiple of: 256 bytes in FP32, 64 in FP8."""


class Group(NamedTuple):
    """What an update treats alike. decay: weight decay applies; decoupled: follows --decoupled-lr."""

    decay: bool
    decoupled: bool = False


@dataclass(frozen=True)
class Entry:
    """What the layout needs to know of one parameter; `numel` counts the local tensor, padding included."""

    name: str
    numel: int
    dtype: torch.dtype
    expert: bool
    group: Group


class Slot(NamedTuple):
    """One parameter's elements `start:stop` of a buffer."""

    name: str
    start: int
    stop: int


class Segment(NamedTuple):
    """A run of a buffer whose parameters share a group; the gaps left by alignment belong to it and stay zero."""

    group: Group
    start: int
    stop: int


@dataclass(frozen=True)
class BufferLayout:
    """One flat buffer. slots: in the order of offsets; segments: cover `0:numel` without a gap."""

    dtype: torch.dtype
    expert: bool
    numel: int
    slots: tuple[Slot, ...]
    segments: tuple[Segment, ...]


def plan_layouts(entries: Iterable[Entry]) -> tuple[BufferLayout, ...]:
    """The buffers of these parameters: one a (dtype, expert), inside it by group, then by global name.

    Pure and independent of the order of `entries`. The order within a buffer is chosen here and nowhere else: once
    buckets overlap with backward it becomes the order in which gradients get ready.
    """
    buffers: dict[tuple[str, bool], list[Entry]] = {}
    for entry in entries:
        buffers.setdefault((str(entry.dtype), entry.expert), []).append(entry)
    return tuple(_plan_buffer(buffers[key]) for key in sorted(buffers))


def _plan_buffer(entries: list[Entry]) -> BufferLayout:
    slots: list[Slot] = []
    segments: list[Segment] = []
    offset = 0
    for entry in sorted(entries, key=lambda e: (not e.group.decay, e.group.decoupled, e.name)):
        slots.append(Slot(entry.name, offset, offset + entry.numel))
        end = offset + math.ceil(entry.numel / ALIGNMENT) * ALIGNMENT
        if segments and segments[-1].group == entry.group:
            segments[-1] = segments[-1]._replace(stop=end)
        else:
            segments.append(Segment(entry.group, offset, end))
        offset = end
    return BufferLayout(entries[0].dtype, entries[0].expert, offset, tuple(slots), tuple(segments))


class FlatState:
    """One FP32 tensor an element of every buffer: gradients, masters, or a moment; zero at first.

    flats: one flat tensor a layout. views: global name -> view in the parameter's local shape.
    """

    def __init__(self, layouts: Iterable[BufferLayout], shapes: Mapping[str, tuple[int, ...]], device: torch.device):
        self.flats: list[Tensor] = []
        self.views: dict[str, Tensor] = {}
        for layout in layouts:
            flat = torch.zeros(layout.numel, dtype=torch.float32, device=device)
            self.flats.append(flat)
            for slot in layout.slots:
                self.views[slot.name] = flat[slot.start : slot.stop].view(shapes[slot.name])

    def zero(self) -> None:
        for flat in self.flats:
            flat.zero_()


class GradBuffers:
    """The optimizer's `GradSink`: FP32 views that wgrads are added into, and the count of gradients that arrived.

    A linear adds its weight gradient into `buffer(param)` itself and says `ready(param)`. Every other gradient comes
    from autograd: a hook adds `.grad` in FP32, drops it, and says `ready`.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], layouts: tuple[BufferLayout, ...], device: torch.device):
        self.layouts = layouts
        self.state = FlatState(layouts, {name: tuple(p.shape) for name, p in params.items()}, device)
        self._params = dict(params)
        self._ready: Counter[str] = Counter()
        for param in self._params.values():
            param.register_post_accumulate_grad_hook(self._take_autograd_grad)

    def buffer(self, param: Tensor) -> Tensor:
        """FP32 view of the local shape; KeyError for a parameter that is not trained."""
        return self.state.views[spec_of(param).name]

    def ready(self, param: Tensor) -> None:
        """Counts one microbatch's gradient of `param`; buckets are launched from here once they overlap."""
        self._ready[spec_of(param).name] += 1

    def zero(self) -> None:
        """Zeroes all gradients and counts, before the first microbatch of a step."""
        self.state.zero()
        self._ready.clear()

    def sum_partial(self, specs: Mapping[str, ParamSpec], axis_name: str, axis: Axis) -> None:
        """Sums, over one axis and in one message, the gradients of which each of its ranks has only a part.

        specs: of all parameters by name; `grad_sum_over` says which gradients those are.
        """
        partial = [self.state.views[name] for name in sorted(specs) if axis_name in specs[name].grad_sum_over]
        if axis.size == 1 or not partial:
            return
        packed = axis.sum_(torch.cat([view.flatten() for view in partial]))
        for view, total in zip(partial, packed.split([view.numel() for view in partial]), strict=True):
            view.copy_(total.view_as(view))

    def sum_replicas(self, replicas: Axis, expert_replicas: Axis) -> None:
        """Sums every gradient over the ranks that hold the same parameter: one FP32 all-reduce a buffer.

        A parameter without a gradient takes part with zeros, so no rank waits for another.
        """
        for layout, flat in zip(self.layouts, self.state.flats, strict=True):
            (expert_replicas if layout.expert else replicas).sum_(flat)

    def ready_count(self, name: str) -> int:
        """How many gradients of the parameter have arrived since `zero()`."""
        return self._ready[name]

    def unready(self) -> list[str]:
        """Global names of the parameters for which no gradient has arrived since `zero()`."""
        return sorted(name for name in self._params if not self._ready[name])

    @torch.no_grad()
    def _take_autograd_grad(self, param: Tensor) -> None:
        if param.grad is None:  # autograd also calls the hook when a function has kept the gradient to itself
            return
        self.buffer(param).add_(param.grad)
        param.grad = None
        self.ready(param)


def entry_of(spec: ParamSpec, param: Tensor, group: Group) -> Entry:
    return Entry(spec.name, param.numel(), param.dtype, spec.expert, group)
