"""Records what this rank sends: wraps the collectives of `torch.distributed` while it is on.

with record() as log:
    ...
log.bytes("gather")        what this rank contributed to all-gathers
log.events                 posts and waits in order, with whatever the test marks in between
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist

from megafp8.parallel import Axis

# name of the function -> kind, place of the tensor that this rank contributes
COLLECTIVES = {
    "all_reduce": ("sum", 0),
    "all_gather_into_tensor": ("gather", 1),
    "all_gather_single": ("gather", 1),
    "reduce_scatter_tensor": ("scatter_sum", 1),
    "reduce_scatter_single": ("scatter_sum", 1),
    "broadcast": ("broadcast", 0),
    "barrier": ("barrier", None),
}


@dataclass(frozen=True)
class Message:
    """kind: sum, max, gather, scatter_sum, broadcast or barrier; size: bytes of this rank's tensor."""

    kind: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    size: int
    group: int


@dataclass
class Log:
    messages: list[Message] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    def bytes(self, kind: str, dtype: torch.dtype | None = None) -> int:
        return sum(m.size for m in self.messages if m.kind == kind and dtype in (None, m.dtype))

    def count(self, kind: str) -> int:
        return sum(m.kind == kind for m in self.messages)


class _Work:
    def __init__(self, work, log: Log, name: str):
        self._work, self._log, self._name = work, log, name

    def wait(self, *args):
        self._log.events.append(f"wait {self._name}")
        return self._work.wait(*args)


def _wrapped(function, kind: str, place: int | None, log: Log):
    def call(*args, **options):
        tensor = None if place is None else args[place]
        name = kind
        if kind == "sum" and dist.ReduceOp.MAX in (*args[1:2], options.get("op")):
            name = "max"
        size = 0 if tensor is None else tensor.numel() * tensor.element_size()
        dtype, shape = (None, ()) if tensor is None else (tensor.dtype, tuple(tensor.shape))
        log.messages.append(Message(name, dtype, shape, size, dist.get_world_size(options.get("group"))))
        label = f"{name} {sum(m.kind == name for m in log.messages) - 1}"
        log.events.append(f"post {label}")
        work = function(*args, **options)
        return _Work(work, log, label) if work is not None else None

    return call


def _together(function, log: Log):
    def call(axis, parts):
        size = sum(part.nbytes for part in parts)
        log.messages.append(Message("gather", torch.uint8, (), size, axis.size))
        label = f"gather {log.count('gather') - 1}"
        log.events.append(f"post {label}")
        outs, work = function(axis, parts)
        return outs, _Work(work, log, label)

    return call


@contextmanager
def record() -> Iterator[Log]:
    log = Log()
    with ExitStack() as stack:
        for name, (kind, place) in COLLECTIVES.items():
            if hasattr(dist, name):
                function = getattr(dist, name)
                stack.enter_context(mock.patch.object(dist, name, _wrapped(function, kind, place, log)))
        stack.enter_context(mock.patch.object(Axis, "post_gathers", _together(Axis.post_gathers, log)))
        yield log
