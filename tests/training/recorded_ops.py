"""What a CUDA graph is, without a GPU: the operations that ran while it was recorded, on the tensors they ran on.

A replay runs no Python of the layer: what it read from the host is as it was, what lies elsewhere by now is read where
it lay. So a copy that has moved, or a number that changes, shows in the bits. (Where the reference looks at values, on
CPUs only, it goes on as it did when it was recorded.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megafp8 import parallel
from megafp8.meter import Meter

Run = Callable[[], object]


class _Listening(TorchDispatchMode):
    """Lists the operations that run inside: (operator, its arguments, what it gave)."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, tuple, dict, list[Tensor]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        aliases = [result.alias_info for result in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        if not is_view and "empty" not in str(func):
            fresh = [] if any(aliases) else [x for x in tree_leaves(out) if isinstance(x, Tensor)]
            self.ops.append((func, args, kwargs, fresh))
        return out


class _Quiet:
    """A message that was sent while operations are listed. gloo copies some results when they are waited for: that is
    part of the message, and of what waiting for it does again."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self) -> None:
        with _disable_current_modes():
            self._work.wait()


class RecordedOps:
    """A recorder (`core.transformer.recorders`) for the CPU. replays: how often one was replayed."""

    held_bytes = 0

    def __init__(self, device: torch.device, meter: Meter | None = None) -> None:
        self.replays, self.released, self._meter = 0, False, meter or Meter()

    def warm_up(self, run: Run) -> None:
        run()

    def record(self, run: Run) -> Run:
        quiet = mock.patch.object(parallel, "_posted", _Quiet)
        with self._meter.aside() as sent, _Listening() as listening, quiet:
            run()
        self._meter.include(sent)  # here it was not only recorded

        @torch.no_grad()
        def replay() -> None:
            assert not self.released
            self.replays += 1
            self._meter.include(sent)
            for func, args, kwargs, places in listening.ops:
                out = func(*args, **kwargs)
                if func.namespace == "c10d":  # a message, which all ranks send again
                    _waited(out)
                    continue
                made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
                for place, value in zip(places, made, strict=bool(places)) if places else ():
                    _bytes(place).copy_(_bytes(value))

        return replay

    def release(self) -> None:
        self.released = True


def _waited(out: Any) -> None:
    for leaf in tree_leaves(out):
        if not isinstance(leaf, Tensor):
            leaf.wait()


def _bytes(x: Tensor) -> Tensor:
    x = x.detach()
    return x.view(torch.uint8) if x.element_size() == 1 else x
