"""What the autograd functions of linears are told besides their tensors, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.fp8 import gemm
from megafp8.fp8.comm import CommPlan
from megafp8.fp8.input_spec import Scaling
from megafp8.fp8.param import Weight
from megafp8.fp8.producer import Producer, Want
from megafp8.fp8.recipe import Recipe
from megafp8.fp8.storage import Quantized, QuantizedStorage
from megafp8.step import StepContext


@dataclass(frozen=True)
class LinearArgs:
    """What the autograd function is told besides its tensors.

    name: global name of the weight, under which a history is kept. keep: whether backward may follow. dtype: of the
    output and of dX. producer: makes the input; with `requantize_input` backward has it made again. grad_want: how the
    producer's dX is wanted. passes_on: the producer's input is handed on as a second output, whose gradient is added to
    dX on the way.
    """

    weight: Weight
    recipe: Recipe | None
    step: StepContext | None
    name: str | None
    requantize_input: bool
    comm: CommPlan
    backend: str
    keep: bool
    dtype: torch.dtype
    producer: Producer | None = None
    grad_want: Want | None = None
    passes_on: bool = False

    def scaling(self, role: str, *, whole: bool = False) -> Scaling:
        """`whole`: the tensor has been gathered already."""
        name = f"{self.name}/{role}" if self.recipe.uses_history else None
        cut = None if whole else self.comm.cut(role)
        place = f"{self.name}/{role}" if self.name else None
        return Scaling(self.recipe.quantizer(role), name, self.step, self.comm.axis, cut, self.comm.grid, place)

    @property
    def defers(self) -> bool:
        """Whether weight gradients wait in the step's queue."""
        return self.step is not None and self.step.grads is not None and self.step.wgrads is not None

    def observe(self, role: str, quantized: Quantized, x: Callable[[], Tensor | None]) -> None:
        """Shows the step's observer, if any, an operand that came quantized. x: gives it in high precision."""
        if self.step is not None and self.step.observer is not None and self.name:
            self.step.observer.see(f"{self.name}/{role}", x(), quantized)

    @property
    def gathers_first(self) -> bool:
        """Whether the input is gathered in high precision, before it is quantized."""
        return self.comm.gathers_input and not self.comm.input_in_fp8(self.recipe)

    def needs(self, role: str) -> dict[str, str]:
        return gemm.needs(self.recipe, role, self.weight.param.device)

    def input_want(self, rows: int, rowwise: bool, colwise: bool) -> Want | None:
        """How a producer should hand over its value; None: in high precision."""
        record = self.step is not None and self.step.records
        return self.scaling("input").want(rows, rowwise, colwise, record=record)

    def weight_operand(self, gemm_name: str) -> QuantizedStorage:
        return self.weight.operand(gemm_name, self.scaling("weight").scale, all_copies=self.keep)
