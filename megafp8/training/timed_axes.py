"""Parallel axes whose waits are timed: at `--timing-log-level 2` they stand in the place of the others.

Timed is what a rank waits, from where it needs a result on; not what travels behind its work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megafp8.parallel import DONE, Axis, ParallelContext, Pending
from megafp8.step import Spans, no_spans
from megafp8.training.timers import COMMUNICATION


class _Timed:
    """A collective on its way, whose `wait` is a span."""

    def __init__(self, pending: Pending, spans: Spans, what: str) -> None:
        self._pending, self._spans, self._what = pending, spans, what

    def wait(self) -> Any:
        with self._spans(COMMUNICATION, self._what):
            return self._pending.wait()


@dataclass(frozen=True)
class TimedAxis(Axis):
    """An axis that tells `spans` of its waits."""

    spans: Spans = field(default=no_spans, compare=False, repr=False, kw_only=True)

    def _timed(self, pending: Pending, what: str) -> Pending:
        return pending if pending is DONE else _Timed(pending, self.spans, f"{what} over {self.name}")

    def max_(self, x: Tensor) -> Tensor:
        with self.spans(COMMUNICATION, f"max over {self.name}"):
            return super().max_(x)

    def swap(self, peer: int, x: Tensor) -> Tensor:
        with self.spans(COMMUNICATION, f"swap over {self.name}"):
            return super().swap(peer, x)

    def post_sum_(self, x: Tensor) -> Pending:
        return self._timed(super().post_sum_(x), "sum")

    def post_gather_into(self, out: Tensor, x: Tensor) -> Pending:
        return self._timed(super().post_gather_into(out, x), "gather")

    def post_gathers(self, parts: Sequence[Tensor]) -> tuple[list[Tensor], Pending]:
        outs, pending = super().post_gathers(parts)
        return outs, self._timed(pending, "gather")

    def post_scatter_sum_into(self, out: Tensor, x: Tensor) -> Pending:
        return self._timed(super().post_scatter_sum_into(out, x), "scatter-sum")

    def post_deal(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> tuple[Tensor, Pending]:
        out, pending = super().post_deal(x, sent, received)
        return out, self._timed(pending, "all-to-all")

    def post_shift(self, x: Tensor) -> tuple[Tensor, list[dist.Work]]:
        out, works = super().post_shift(x)
        return out, [self._timed(work, "shift") for work in works]


def timed(parallel: ParallelContext, spans: Spans) -> ParallelContext:
    """The same context, with timed axes where there is more than one rank to wait for."""
    axes = {each.name: getattr(parallel, each.name) for each in fields(parallel)}
    return replace(parallel, **{name: _timed(axis, spans) for name, axis in axes.items() if type(axis) is Axis})


def _timed(axis: Axis, spans: Spans) -> Axis:
    if axis.size == 1:
        return axis
    return TimedAxis(axis.size, axis.rank, axis.group, name=axis.name, meter=axis.meter, spans=spans)
