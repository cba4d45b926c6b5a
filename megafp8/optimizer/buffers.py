"""Flat FP32 gradient buffers: where every weight gradient is accumulated, and how buckets of them are reduced.

`GradBuffers` is the `GradSink` that the code below the optimizer sees. A step's first gradient of a parameter is
written over what the step before left, so nobody zeroes buffers to add to them; where none came, zeros are filled in at
last. A bucket is reduced when backward is over, or, overlapped, as soon as all its gradients of the step's last
microbatch are there. Buckets leave in one order, the same on all ranks, whatever the order in which gradients get ready
on each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakMethod

import torch
from torch import Tensor, nn

from megafp8.fp8.wgrad import put
from megafp8.optimizer.layout import Bucket, BufferLayout, Entry, Group, Shard
from megafp8.parallel import Axis, Pending
from megafp8.params import ParamSpec, spec_of


class FlatState:
    """One FP32 tensor an element of every buffer; zero at first.

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


@dataclass(frozen=True)
class Reduction:
    """How gradients are summed over the ranks that hold the same parameters.

    replicas, experts: those ranks, for parameters outside the experts and for theirs. overlap: while backward goes on.
    in_bf16: buckets travel rounded to BF16.
    """

    replicas: Axis = Axis()
    experts: Axis = Axis()
    overlap: bool = False
    in_bf16: bool = False

    def axis(self, layout: BufferLayout) -> Axis:
        return self.experts if layout.expert else self.replicas


class GradBuffers:
    """The optimizer's `GradSink`: FP32 views that wgrads are added into, and the count of gradients that arrived.

    A linear writes its weight gradient into `target(param)`, or adds it, itself and says `ready(param)`. Every other
    gradient comes from autograd: a hook does so with `.grad`, drops it, and says `ready`.

    After `finish()` each rank's shards hold the sums, and `state.views` does where buffers are not sharded.
    """

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        shards: Sequence[Shard],
        device: torch.device,
        reduction: Reduction = Reduction(),
    ):
        self.shards = tuple(shards)
        self.layouts = tuple(shard.layout for shard in self.shards)
        self.reduction = reduction
        self.state = FlatState(self.layouts, {name: tuple(p.shape) for name, p in params.items()}, device)
        self._params = dict(params)
        self._ready: Counter[str] = Counter()
        self._stale: dict[str, Tensor] = {}  # views in which nothing of this step is yet: what they hold is over
        self._expected: int | None = None
        self._queue = launch_order(self.layouts)
        self._bucket_of = {
            slot.name: (number, bucket)
            for number, bucket in self._queue
            for slot in self.layouts[number].slots
            if bucket.start <= slot.start < bucket.stop or slot.start == slot.stop == bucket.start
        }
        self._missing: Counter[tuple[int, Bucket]] = Counter()
        self._launched = 0
        self._travelling: list[tuple[Tensor, Tensor, Pending]] = []
        # Weak, since a hook lives in C++: the garbage collector can't see that buffers and parameters hold each other.
        method = WeakMethod(self._take_autograd_grad)

        def take(param: Tensor) -> None:
            if alive := method():
                alive(param)

        for param in self._params.values():
            param.register_post_accumulate_grad_hook(take)

    def buffer(self, param: Tensor) -> Tensor:
        """FP32 view of the local shape, to be added to; KeyError for a parameter that is not trained."""
        view, adds = self.target(param)
        return view if adds else view.zero_()

    def place(self, param: Tensor) -> Tensor:
        """The same view, whatever it holds: for who records what is later written there."""
        return self.state.views[spec_of(param).name]

    def target(self, param: Tensor) -> tuple[Tensor, bool]:
        """The same view, and whether to add; if not, the caller writes all of it. So it is the first time in a step."""
        name = spec_of(param).name
        return self.state.views[name], self._stale.pop(name, None) is None

    def ready(self, param: Tensor) -> None:
        """Counts one microbatch's gradient of `param`; the last one of a bucket may send it off."""
        name = spec_of(param).name
        self._ready[name] += 1
        assert self._expected is None or self._ready[name] <= self._expected, f"{name}: a gradient after its last"
        if self._ready[name] == self._expected:
            self._missing[self._bucket_of[name]] -= 1
            self._launch_complete()

    def zero(self, microbatches: int | None = None) -> None:
        """Drops all gradients and counts, before the first microbatch of a step.

        microbatches: how many gradients of each parameter will come; None: unknown, buckets wait for `finish()`, and
        are zeroed at once, for whoever writes to `state`.
        """
        self._stale = dict(self.state.views)
        if microbatches is None:
            self.settle()
        self._ready.clear()
        self._launched = 0
        self._expected = microbatches if self.reduction.overlap else None
        self._missing = Counter(self._bucket_of.values())

    def sum_partial(self, specs: Mapping[str, ParamSpec], axis_name: str, axis: Axis) -> None:
        """Sums, over one axis and in one message, the gradients of which each of its ranks has only a part.

        specs: of all parameters by name; `grad_sum_over` says which gradients those are. Before `finish()`,
        after `settle()`.
        """
        partial = [self.state.views[name] for name in sorted(specs) if axis_name in specs[name].grad_sum_over]
        if axis.size == 1 or not partial:
            return
        packed = axis.sum_(torch.cat([view.flatten() for view in partial]))
        for view, total in zip(partial, packed.split([view.numel() for view in partial]), strict=True):
            view.copy_(total.view_as(view))

    def finish(self) -> None:
        """Reduces the buckets that have not left yet, and waits for all. A step calls it once, after backward.

        A parameter without a gradient takes part with zeros, so no rank waits for another.
        """
        self.settle()
        for number, bucket in self._queue[self._launched :]:
            self._launch(number, bucket)
        self._launched = len(self._queue)
        self._expected = None
        for own, sent, pending in self._travelling:
            pending.wait()
            if own.dtype != sent.dtype:
                own.copy_(sent)
        self._travelling.clear()

    def parts(self) -> list[list[Tensor]]:
        """For each buffer the views that hold this rank's shards of the sums, in the order of its state."""
        self.settle()
        return [shard.parts(flat) for shard, flat in zip(self.shards, self.state.flats, strict=True)]

    def ready_count(self, name: str) -> int:
        """How many gradients of the parameter have arrived since `zero()`."""
        return self._ready[name]

    def unready(self) -> list[str]:
        """Global names of the parameters for which no gradient has arrived since `zero()`."""
        return sorted(name for name in self._params if not self._ready[name])

    def _launch_complete(self) -> None:
        while self._launched < len(self._queue):
            number, bucket = self._queue[self._launched]
            if self.layouts[number].partial or self._missing[number, bucket] > 0:
                return
            self._launch(number, bucket)
            self._launched += 1

    @torch.no_grad()
    def settle(self, names: Iterable[str] | None = None) -> None:
        """Zeroes what no gradient of this step has come to, of some parameters or all: before they are read."""
        if names is None and len(self._stale) == len(self.state.views):
            self.state.zero()
            self._stale.clear()
        views = [self._stale.pop(name) for name in (list(self._stale) if names is None else names)]
        if views:
            torch._foreach_zero_(views)

    @torch.no_grad()
    def _launch(self, number: int, bucket: Bucket) -> None:
        self.settle([name for name in self._stale if self._bucket_of[name] == (number, bucket)])
        layout, axis = self.layouts[number], self.reduction.axis(self.layouts[number])
        if axis.size == 1 or bucket.start == bucket.stop:
            return
        whole = self.state.flats[number][bucket.start : bucket.stop]
        own = self.state.flats[number][layout.share(bucket, self.shards[number].rank)]
        sent = whole.bfloat16() if self.reduction.in_bf16 else whole
        if layout.shards == 1:
            self._travelling.append((own, sent, axis.post_sum_(sent)))
        else:
            out = torch.empty_like(own, dtype=sent.dtype) if self.reduction.in_bf16 else own
            self._travelling.append((own, out, axis.post_scatter_sum_into(out, sent)))

    @torch.no_grad()
    def _take_autograd_grad(self, param: Tensor) -> None:
        if param.grad is None:  # autograd also calls the hook when a function has kept the gradient to itself
            return
        put(param.grad, *self.target(param))
        param.grad = None
        self.ready(param)


def launch_order(layouts: Sequence[BufferLayout]) -> list[tuple[int, Bucket]]:
    """(number of the buffer, bucket) in the one order in which all ranks reduce them.

    By when the last gradient of a bucket gets ready; partial ones, which are complete only after backward, come last.
    """
    every = [(number, bucket) for number, layout in enumerate(layouts) for bucket in layout.buckets]
    return sorted(every, key=lambda item: (layouts[item[0]].partial, item[1].order, item[0], item[1].start))


def entry_of(
    spec: ParamSpec,
    param: Tensor,
    group: Group,
    *,
    dtype: torch.dtype | None = None,
    partial: bool = False,
    order: int = 0,
) -> Entry:
    """dtype: that the parameter is stored in, if not its own."""
    stack, number = spec.stack or ("", 0)
    kind = dtype or param.dtype
    return Entry(spec.name, param.numel(), kind, spec.expert, group, partial, order, stack=stack, number=number)
