"""What a CUDA graph is, without a GPU: the operations that ran while it was recorded, on the tensors they ran on.

A replay runs no Python of the layer: what it read from the host is as it was, what lies elsewhere by now is read where
it lay. So a copy that has moved, or a number that changes, shows in the bits. (Where the reference looks at values, on
CPUs only, it goes on as it did when it was recorded.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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


class RecordedOps:
    """A recorder (`core.transformer.recorders`) for the CPU. replays: how often one was replayed."""

    held_bytes = 0

    def __init__(self, device: torch.device) -> None:
        self.replays = 0

    def warm_up(self, run: Run) -> None:
        run()

    def record(self, run: Run) -> Run:
        with _Listening() as listening:
            run()

        @torch.no_grad()
        def replay() -> None:
            self.replays += 1
            for func, args, kwargs, places in listening.ops:
                made = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
                for place, value in zip(places, made, strict=bool(places)) if places else ():
                    _bytes(place).copy_(_bytes(value))

        return replay


def _bytes(x: Tensor) -> Tensor:
    x = x.detach()
    return x.view(torch.uint8) if x.element_size() == 1 else x
