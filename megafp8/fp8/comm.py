"""What a tensor-parallel linear exchanges with its peers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from megafp8.fp8.storage import Quantized

Operand = Tensor | Quantized


class CommPlan(Protocol):
    """What a tensor-parallel linear exchanges with its peers; a linear without peers has none.

    Inputs and gradients are `Quantized` under a recipe, tensors `[rows, features]` otherwise. `gather_input` runs
    before fprop, and again in backward on what was kept of the local input.
    """

    def gather_input(self, x: Operand) -> Operand: ...

    def reduce_output(self, y: Tensor) -> Tensor: ...

    def gather_grad_output(self, dy: Tensor) -> Tensor: ...

    def reduce_grad_input(self, dx: Tensor) -> Tensor: ...
