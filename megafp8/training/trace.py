"""A trace of training steps that can be compared across runs and layouts: what every layer gave out, and its gradient.

Each tensor leaves a norm and a hash. Both are sums over its elements (of squares, and of a mix of their bits, which is
0 for 0), so they don't depend on how ranks and micro-batches cut it: two layouts that compute the same numbers leave
the same trace, and rounding shows in hashes before it shows in norms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from megafp8.core.tensor_parallel.embedding import VocabParallelEmbedding
from megafp8.core.transformer.norm import Norm
from megafp8.fp8 import Linear
from megafp8.optimizer import Optimizer
from megafp8.parallel import ParallelContext
from megafp8.params import ParamSpec, unpadded

TRACED = (Linear, Norm, VocabParallelEmbedding)
KINDS = ("activation", "gradient of activation", "main_grad", "weight after the step")
_MIX = -7046029254386353131  # an odd 64-bit number whose bits look random (2^64 / golden ratio)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bit_hash(x: Tensor) -> Tensor:
    """int64 scalar: the sum of a mix of each element's bits, in any order; +0 adds 0."""
    bits = x.detach().contiguous().view(_BITS[x.element_size()]).to(torch.int64)
    mixed = bits * _MIX
    return ((mixed ^ (mixed >> 29)) * _MIX).sum()


def square_sum(x: Tensor) -> Tensor:
    return x.detach().double().square().sum()


@dataclass
class Entry:
    """What one tensor of one step left: its kind and name, the root of `squares`, and `hash`."""

    step: int
    kind: str
    name: str
    squares: Tensor
    hash: Tensor

    def to_json(self) -> dict:
        norm = self.squares.sqrt().item()
        return {"step": self.step, "kind": self.kind, "name": self.name, "norm": norm, "hash": self.hash.item()}


@dataclass
class Trace:
    """Collects entries while `tracing` is on; `entries` are in the order in which things first happened."""

    parallel: ParallelContext
    step: int = 1
    entries: list[Entry] = field(default_factory=list)
    _open: dict[tuple[str, str], Entry] = field(default_factory=dict)

    def add(self, kind: str, name: str, x: Tensor, *, counts: bool) -> None:
        """Adds to this step's entry; `counts`: False for a copy of what another rank adds."""
        entry = self._open.get((kind, name))
        if entry is None:
            zero = torch.zeros((), dtype=torch.float64, device=x.device)
            entry = self._open[kind, name] = Entry(self.step, kind, name, zero, zero.to(torch.int64))
        if counts:
            entry.squares += square_sum(x)
            entry.hash += bit_hash(x)

    def end_step(self) -> None:
        """Sums the step's entries over all ranks."""
        entries = sorted(self._open.values(), key=lambda entry: KINDS.index(entry.kind))
        if entries:
            squares, hashes = (torch.stack([getattr(e, name) for e in entries]) for name in ("squares", "hash"))
            everyone = self.parallel.everyone
            for entry, s, h in zip(entries, everyone.sum_(squares), everyone.sum_(hashes), strict=True):
                entry.squares, entry.hash = s, h
        self.entries += entries
        self._open.clear()
        self.step += 1


def _is_cut(module: nn.Module, parallel: ParallelContext) -> bool:
    """Whether each tensor-parallel rank has another part of a module's output, rather than a copy of it."""
    if parallel.sequence_parallel:
        return True
    if isinstance(module, Linear):
        return module.comm.kind == "column"
    return isinstance(module, Norm) and "tp" in module.weight.spec.grad_sum_over  # of heads


def _trace_module(trace: Trace, name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
    counts = _is_cut(module, trace.parallel) or trace.parallel.tp.rank == 0

    def forward(_module: nn.Module, _inputs: tuple, output: Tensor) -> None:
        trace.add("activation", name, output, counts=counts)
        if output.requires_grad:
            output.register_hook(lambda grad: trace.add("gradient of activation", name, grad, counts=counts))

    return module.register_forward_hook(forward)


def _trace_params(trace: Trace, kind: str, values: dict[str, Tensor], specs: dict[str, ParamSpec]) -> None:
    for name in sorted(values):
        first = trace.parallel.dp_cp.rank == 0
        counts = first and ("tp" not in specs[name].replicated_over or trace.parallel.tp.rank == 0)
        trace.add(kind, name, unpadded(values[name], specs[name]), counts=counts)


@contextmanager
def tracing(model: nn.Module, optimizer: Optimizer, parallel: ParallelContext) -> Iterator[Trace]:
    """Inside, every training step of `optimizer` is traced: linears, norms and embeddings, gradients, weights."""
    trace = Trace(parallel)
    handles = [_trace_module(trace, name, m) for name, m in model.named_modules() if isinstance(m, TRACED)]
    original, specs = optimizer.step, optimizer.weights.specs

    def step(**options):
        _trace_params(trace, "main_grad", optimizer.grads.state.views, specs)
        stats = original(**options)
        _trace_params(trace, "weight after the step", optimizer.masters.views, specs)
        trace.end_step()
        return stats

    optimizer.step = step
    try:
        yield trace
    finally:
        del optimizer.step
        for handle in handles:
            handle.remove()
