"""Notes what a rank of a real run posts and waits for, as a trace for tests/core/pipeline/nccl_rules.py.

The run is on gloo, with the groups and the plan of receives that pipelines have on NCCL. A communicator is a process
group, as it is where groups are bound to a device; a pair of its ranks has none of its own.
"""

from __future__ import annotations

from contextlib import ExitStack
from unittest import mock

import torch
import torch.distributed as dist

from megafp8 import parallel
from megafp8.core.pipeline.executor import Executor
from megafp8.core.pipeline.p2p import connect, groups_by_direction
from megafp8.parallel import Axis
from tests.core.pipeline.nccl_rules import WORK, Post, Side, Trace, Wait


class _Noted:
    """A pending collective or message whose `wait` is noted."""

    def __init__(self, pending, trace: Trace, number: int) -> None:
        self._pending, self._trace, self._number = pending, trace, number

    def wait(self):
        self._trace.append(Wait(self._number))
        return self._pending.wait()

    def is_completed(self) -> bool:
        return self._pending.is_completed()


class Notes:
    """trace: of this rank, since `on`."""

    def __init__(self) -> None:
        self.trace: Trace = []
        self._posted = 0

    def on(self, stack: ExitStack) -> None:
        """Notes everything from now on, until the stack is closed."""
        for name, what in (("max_", "max"), ("post_sum_", "sum"), ("post_gather_into", "gather"),
                           ("post_scatter_sum_into", "scatter_sum")):  # fmt: skip
            self._patch(stack, Axis, name, lambda original, what=what: self._collective(original, what))
        self._patch(stack, Axis, "post_gathers", self._gathers)
        self._patch(stack, Axis, "post_deal", self._deal)
        self._patch(stack, Axis, "swap", self._swap)
        self._patch(stack, Axis, "post_shift", self._shift)
        self._patch(stack, Axis, "post_send", lambda original: self._message(original, "send"))
        self._patch(stack, Axis, "post_receive", lambda original: self._message(original, "receive"))
        self._patch(stack, Executor, "_run", self._action)
        stack.enter_context(mock.patch("megafp8.training.step.message_groups", as_on_nccl))

    def _patch(self, stack: ExitStack, owner: type, name: str, make) -> None:
        stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))

    def _post(self, group, *sides: Side, work: bool = True) -> int:
        """Notes a post; returns its number. work: whether the device may have waited before, e.g. to connect."""
        if work:
            self.trace.append(WORK)
        members = tuple(dist.get_process_group_ranks(group))
        self.trace.append(Post(f"{group.group_name} of {members}", members, sides))
        self._posted += 1
        return self._posted - 1

    def _collective(self, original, what: str):
        def call(axis, *tensors):
            if axis.size == 1:
                return original(axis, *tensors)
            number = self._post(axis.group, Side(what, None, _like(tensors[-1])))
            result = original(axis, *tensors)
            if what == "max":
                self.trace.append(Wait(number))
                return result
            return _Noted(result, self.trace, number)

        return call

    def _gathers(self, original):
        def call(axis, parts):
            number = self._post(axis.group, Side("gather", None, tuple(_like(x) for x in parts)))
            outs, pending = original(axis, parts)
            return outs, _Noted(pending, self.trace, number)

        return call

    def _deal(self, original):
        def call(axis, x, sent, received):
            if axis.size == 1:
                return original(axis, x, sent, received)
            number = self._post(axis.group, Side("deal", None, str(x.dtype)))
            out, pending = original(axis, x, sent, received)
            return out, _Noted(pending, self.trace, number)

        return call

    def _swap(self, original):
        def call(axis, peer, x):
            there = dist.get_global_rank(axis.group, peer)
            number = self._post(axis.group, Side("send", there, _like(x)), Side("receive", there, _like(x)))
            self.trace.append(Wait(number))
            return original(axis, peer, x)

        return call

    def _shift(self, original):
        def call(axis, x):
            there, before = (dist.get_global_rank(axis.group, (axis.rank + i) % axis.size) for i in (1, -1))
            number = self._post(axis.group, Side("send", there, _like(x)), Side("receive", before, _like(x)))
            out, works = original(axis, x)
            return out, [_Noted(work, self.trace, number) for work in works]

        return call

    def _message(self, original, what: str):
        def call(axis, x, peer, group, tag):
            number = self._post(group, Side(what, peer, (tag, *_like(x))), work=False)
            return _Noted(original(axis, x, peer, group, tag), self.trace, number)

        return call

    def _action(self, original):
        def run(executor, *args):
            self.trace.append(WORK)
            return original(executor, *args)

        return run


def as_on_nccl(axis: Axis, chunks: int, timeout):
    """Stands for `message_groups` on gloo."""
    if axis.size == 1:
        return {}
    groups = groups_by_direction(axis, chunks, timeout)
    connect(axis, groups, torch.device("cpu"))
    return groups


def _like(x: torch.Tensor) -> tuple[int, str]:
    dtype = torch.uint8 if x.dtype in parallel._UNREDUCIBLE else x.dtype
    return x.numel(), str(dtype)
