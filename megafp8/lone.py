"""One rank of a large job, alone: its collectives return at once, as if every other rank had what this one has.

    gather        this rank's shard, once for each rank
    sum           this rank's values: the others add nothing
    max           this rank's values; where FP32 ones are 0 its largest: the amax of what others hold
    scatter_sum   this rank's part of its own values
    deal          what each rank gives is what this one gives itself; zeros where that is nothing
    send          vanishes; what arrives from another pipeline stage is made up: normal values, the same in every step

So tensors have their real sizes and finite values, and FP8 bytes and scales stay bytes and scales of something. No
number that such a run computes means anything. Groups are those of torch's fake backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megafp8.config import Config
from megafp8.config.parallel import layout_sizes
from megafp8.meter import Meter
from megafp8.parallel import DONE, Axis, ParallelContext, Pending, context_of

AXES = ("tp", "cp", "dp", "pp", "ep", "etp", "edp", "dp_cp", "ep_etp")
MADE_UP_STD = 1.0
"""Of hidden states and gradients that would come from other stages."""


def nothing(rank: int, value: Any) -> Any:
    """What another rank says where this one says `value`: nothing of its kind."""
    return type(value)()


@dataclass
class Copying:
    """Time that goes into what stands for communication, on a GPU: pairs of events, of the work between them."""

    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @contextmanager
    def timed(self, x: Tensor) -> Iterator[None]:
        if not x.is_cuda:
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self.events.append((begin, end))

    def take(self) -> float:
        """Seconds so far; starts anew. Waits for the device."""
        events, self.events = self.events, []
        if events:
            events[-1][1].synchronize()
        return sum(begin.elapsed_time(end) for begin, end in events) / 1e3


class Sent:
    """A message that nobody waits for."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


@dataclass(frozen=True)
class LoneAxis(Axis):
    """others: (rank, value) -> what that rank would say in an exchange where this one says `value`."""

    copying: Copying = field(default_factory=Copying, compare=False, repr=False)
    others: Callable[[int, Any], Any] = field(default=nothing, compare=False, repr=False)

    def exchange(self, value: Any) -> list[Any]:
        return [value if rank == self.rank else self.others(rank, value) for rank in range(self.size)]

    def max_(self, x: Tensor) -> Tensor:
        if self.size > 1:
            self.count("max", x)
            if x.dtype == torch.float32 and x.numel():  # with an amax of 0 others' weights would be up to 448
                with self.copying.timed(x):
                    x.copy_(torch.where(x == 0, x.max(), x))
        return x

    def post_sum_(self, x: Tensor) -> Pending:
        if self.size > 1:
            self.count("sum", x)
        return DONE

    def post_gathers(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], Pending]:
        self.count("gather", *parts)
        outs = [x.new_empty(self.size * x.shape[0], *x.shape[1:]) for x in parts]
        for out, x in zip(outs, parts, strict=True):
            self._repeat_in(out, x)
        return outs, DONE

    def post_gather_into(self, out: Tensor, x: Tensor) -> Pending:
        if self.size > 1:
            self.count("gather", x)
            self._repeat_in(out, x)
        return DONE

    def _repeat_in(self, out: Tensor, x: Tensor) -> None:
        with self.copying.timed(x):
            mine, whole = _bytes(x).reshape(-1), _bytes(out).view(self.size, -1)
            if mine.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr():
                whole.copy_(mine.expand(self.size, -1))
                return
            for part in whole:  # in place
                if part.data_ptr() != mine.data_ptr():
                    part.copy_(mine)

    def post_scatter_sum_into(self, out: Tensor, x: Tensor) -> Pending:
        if self.size > 1:
            self.count("scatter_sum", x)
            part = x.view(self.size, -1)[self.rank]
            if part.data_ptr() != out.data_ptr():
                with self.copying.timed(x):
                    out.view(-1).copy_(part)
        return DONE

    def post_deal(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, Pending]:
        if self.size == 1:
            return x, DONE
        self.count("deal", x)
        out = x.new_empty(sum(received), *x.shape[1:])
        with self.copying.timed(x):
            mine = _bytes(x).split(list(sent))[self.rank]
            if set(received) == {len(mine)}:
                _bytes(out).view(self.size, *mine.shape).copy_(mine.expand(self.size, *mine.shape))
                return out, DONE
            for part in _bytes(out).split(list(received)):
                _repeat(part, mine)
        return out, DONE

    def swap(self, peer: int, x: Tensor) -> Tensor:
        self.count("send", x)
        return torch.zeros_like(x)

    def post_shift(self, x: Tensor) -> tuple[Tensor, list]:
        self.count("send", x)
        with self.copying.timed(x):
            return x.clone(), []

    def post_send(self, x: Tensor, target: int, group: Any, tag: int) -> Sent:
        self.count("send", x)
        return Sent()

    def post_receive(self, x: Tensor, source: int, group: Any, tag: int) -> Pending:
        with self.copying.timed(x):
            generator = torch.Generator(x.device).manual_seed(tag)
            x.normal_(std=MADE_UP_STD, generator=generator)
        return DONE


def _bytes(x: Tensor) -> Tensor:
    """FP8 as bytes, which every operator knows."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def _repeat(out: Tensor, rows: Tensor) -> None:
    """Fills `out` with `rows`, over and over."""
    if not len(rows):
        out.zero_()
        return
    for start in range(0, len(out), len(rows)):
        part = out[start : start + len(rows)]
        part.copy_(rows[: len(part)])


@dataclass(frozen=True)
class LoneContext(ParallelContext):
    """The context of a rank that is alone."""

    copying: Copying = field(default_factory=Copying)

    @property
    def everyone(self) -> Axis:
        group = dist.group.WORLD if self.world_size > 1 else None
        return LoneAxis(self.world_size, self.rank, group, self.copying, name="world", meter=self.meter)

    def barrier(self) -> None:
        pass


@contextmanager
def fake_parallel(
    config: Config, rank: int = 0, device_type: str = "cpu", *, meter: Meter | None = None
) -> Iterator[ParallelContext]:
    """The context of one rank of a job that isn't there: collectives return at once, with any values.

    For studies of one rank's shapes, memory and schedule on one process.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    sizes = layout_sizes(config.parallel)
    if config.parallel.world_size == 1:
        yield ParallelContext()
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.parallel.world_size)
    try:
        yield context_of(config.parallel, sizes, device_type, "fake", None, meter)
    finally:
        dist.destroy_process_group()


@contextmanager
def lone_parallel(
    config: Config,
    rank: int = 0,
    device_type: str = "cpu",
    *,
    meter: Meter | None = None,
    stages: Callable[[int, Any], Any] = nothing,
) -> Iterator[LoneContext]:
    """The context of rank `rank` of the configuration's job, on this process alone.

    stages: (pipeline rank, value) -> what that stage would say in an exchange where this one says `value`.
    """
    copying = Copying()

    def lone(axis: Axis) -> LoneAxis:
        others = stages if axis.name == "pp" else nothing
        return LoneAxis(axis.size, axis.rank, axis.group, copying, others, name=axis.name, meter=meter)

    with fake_parallel(config, rank, device_type) as parallel:
        plain = {f.name: getattr(parallel, f.name) for f in fields(parallel)}
        axes = {name: lone(plain[name]) for name in AXES}
        yield LoneContext(**{**plain, **axes, "meter": meter, "copying": copying})
