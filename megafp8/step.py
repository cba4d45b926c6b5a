"""StepContext: what every forward is told about the step it belongs to.

It is an argument, so no module asks a global which phase or microbatch it is in. Random numbers come from it too:
each is a function of (seed, iteration, microbatch, place), so recompute, evaluation, a resume and another pipeline
schedule draw the same ones without any state to save.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megafp8.params import GradSink


class Phase(Enum):
    TRAIN = "train"
    EVAL = "eval"
    RECOMPUTE = "recompute"


class ScalingHistory(Protocol):
    """State of delayed scaling, owned by `fp8` under global names."""

    def scale(self, name: str) -> Tensor | None:
        """Scale in force for the tensor `name` (FP32, one element); None before the first step has ended."""
        ...

    def record(self, name: str, amax: Tensor) -> None:
        """Max-accumulates this step's amax (FP32, one element)."""
        ...

    def slot(self, name: str) -> Tensor:
        """Where `record` accumulates (FP32, one element), to be raised to an amax by whoever takes it."""
        ...

    def scales(self, names: tuple[str, ...]) -> Tensor | None:
        """`scale` of several tensors, FP32 [len(names)]."""
        ...

    def record_all(self, names: tuple[str, ...], amaxes: Tensor) -> None:
        """`record` of several tensors; amaxes: FP32 [len(names)]."""
        ...


class Statistics:
    """What modules report in the forwards of one step, by name: FP64 device tensors, so nothing waits for them.

    sums: of whatever is counted. means: (sum, weight), whose quotient goes into the log.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.means: dict[str, Tensor] = {}

    def add(self, name: str, value: Tensor) -> None:
        """Adds to the sum `name`; its shape is always the same."""
        _add(self.sums, name, value.detach().double())

    def add_mean(self, name: str, total: Tensor, weight: Tensor | float) -> None:
        """Adds a sum of values and their weight, scalars, to the mean `name`."""
        total = total.detach().double()
        if not isinstance(weight, Tensor):
            weight = total.new_full((), weight)  # a copy from the host would wait for the device
        _add(self.means, name, torch.stack([total, weight.detach().to(total)]))


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value


class Spans(Protocol):
    """Marks a part of the step, for timers and traces: `with spans("forward-compute", "microbatch 3"): ...`."""

    def __call__(self, name: str, detail: str = "") -> AbstractContextManager: ...


_UNMARKED = nullcontext()


def no_spans(name: str, detail: str = "") -> AbstractContextManager:
    """Marks nothing."""
    return _UNMARKED


class WgradSink(Protocol):
    """Takes weight gradients of linears that are to be computed later."""

    def submit(self, run: Callable[[], None], held_bytes: int) -> None:
        """`run` computes one and delivers it; until then it holds operands of `held_bytes`, which nobody else does."""
        ...


class OperandObserver(Protocol):
    """Looks at the operands of FP8 GEMMs when they are quantized; it changes none of them."""

    def see(self, place: str, x: Tensor, quantized: Any) -> None:
        """place: "<linear>/<role>". x: what was quantized, [M, K]; quantized: its `fp8.storage.Quantized`."""
        ...


class LayerRunner(Protocol):
    """Runs transformer layers in another way than by calling them, such as from CUDA graphs; the bits are the same."""

    def run(self, layers: nn.Module, x: Tensor, sequences: Any, step: StepContext) -> Tensor:
        """`layers(x, sequences, step)` of a block of layers, with its graph."""
        ...


@dataclass(frozen=True)
class StepContext:
    """phase: train, eval or recompute; microbatch: number within the iteration, from 0.

    grads: where weight gradients are added; None leaves them to autograd (`.grad`).
    scaling: delayed scaling's history; None where the recipe has none.
    statistics: where modules report numbers, if `records`; None: nowhere.
    wgrads: where linears leave their weight gradients; None: they are computed in backward.
    observer: sees the operands that are quantized in this step, each once; None: nobody looks.
    layers: runs the transformer layers; None: they are called.
    sample_group: which part of the global batch this rank sees (data-parallel rank), so that ranks draw differently.
    """

    phase: Phase = Phase.TRAIN
    iteration: int = 0
    microbatch: int = 0
    seed: int = 0
    sample_group: int = 0
    grads: GradSink | None = None
    scaling: ScalingHistory | None = None
    statistics: Statistics | None = None
    wgrads: WgradSink | None = None
    observer: OperandObserver | None = None
    layers: LayerRunner | None = None

    @property
    def training(self) -> bool:
        """Whether dropout acts: in train and when its forward is recomputed."""
        return self.phase is not Phase.EVAL

    @property
    def records(self) -> bool:
        """Whether statistics are recorded: a recompute or an evaluation leaves none."""
        return self.phase is Phase.TRAIN

    def recompute(self) -> StepContext:
        return replace(self, phase=Phase.RECOMPUTE)

    def random_seed(self, place: str) -> int:
        """A seed for the random numbers drawn at `place` (a global module name) in this microbatch."""
        key = f"{self.seed}/{self.iteration}/{self.microbatch}/{self.sample_group}/{place}"
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little") >> 1

    def generator(self, place: str, device: torch.device | str) -> torch.Generator:
        return torch.Generator(device).manual_seed(self.random_seed(place))
