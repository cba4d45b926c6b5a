"""What the autograd functions of linears are told besides their tensors, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megafp8.fp8 import gemm
from megafp8.fp8.comm import CommPlan
from megafp8.fp8.input_spec import Scaling
from megafp8.fp8.param import Weight
from megafp8.fp8.producer import Producer, Want
from megafp8.fp8.recipe import ROLES, Recipe
from megafp8.fp8.storage import Quantized, QuantizedStorage
from megafp8.step import StepContext


class LinearFacts:
    """What follows from a linear's recipe, peers, name and device: asked for many times a step, worked out once.

    needs: role -> GEMM -> orientation of that operand. grad_wanted: (whether dgrad runs, whether wgrad runs) ->
    orientations of dY. scalings: (role, whether the tensor has been gathered already) -> how it is quantized.
    gathers_first: the input is gathered in high precision, before it is quantized. grad_in_fp8, grad_in_pieces: how dY
    is gathered, see `CommPlan`.
    """

    def __init__(self, recipe: Recipe, comm: CommPlan, name: str | None, device: torch.device) -> None:
        self.recipe, self.comm, self.name, self.device = recipe, comm, name, device
        self.uses_history = recipe.uses_history
        self.needs = {role: gemm.needs(recipe, role, device) for role in ROLES}
        of_grad, runs = self.needs["grad_output"], (False, True)
        self.grad_wanted = {
            (dgrad, wgrad): frozenset(of_grad[name] for name, on in (("dgrad", dgrad), ("wgrad", wgrad)) if on)
            for dgrad in runs
            for wgrad in runs
        }
        quantizer = recipe.quantizer("grad_output")
        self.gathers_first = comm.gathers_input and not comm.input_in_fp8(recipe)
        self.grad_in_fp8 = comm.grad_output_in_fp8(quantizer)
        self.grad_in_pieces = comm.gathers_grad_output_in_pieces(quantizer)
        self.scalings = {(role, whole): self._scaling(role, whole) for role in ROLES for whole in (False, True)}

    def _scaling(self, role: str, whole: bool) -> Scaling:
        place = f"{self.name}/{role}" if self.name else None
        history_name = f"{self.name}/{role}" if self.uses_history else None
        cut = None if whole else self.comm.cut(role)
        return Scaling(self.recipe.quantizer(role), history_name, self.comm.axis, cut, self.comm.grid, place)


@dataclass(eq=False)
class LinearArgs:
    """What the autograd function is told besides its tensors. Not changed once it is built.

    facts: None without a recipe. name: global name of the weight, under which a history is kept. keep: whether backward
    may follow. dtype: of the output and of dX. producer: makes the input; with `requantize_input` backward has it made
    again. grad_want: how the producer's dX is wanted. passes_on: the producer's input is handed on as a second output,
    whose gradient is added to dX on the way. records: this is the step's first look at what is quantized. defers:
    weight gradients wait in the step's queue.
    """

    weight: Weight
    recipe: Recipe | None
    facts: LinearFacts | None
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
    records: bool = field(init=False)
    defers: bool = field(init=False)

    def __post_init__(self) -> None:
        step = self.step
        self.records = step is not None and step.records
        self.defers = step is not None and step.wgrads is not None and step.grads is not None

    def observe(self, role: str, quantized: Quantized, x: Callable[[], Tensor | None]) -> None:
        """Shows the step's observer, if any, an operand that came quantized. x: gives it in high precision."""
        if self.step is not None and self.step.observer is not None and self.name:
            self.step.observer.see(f"{self.name}/{role}", x(), quantized)

    def needs(self, role: str) -> dict[str, str]:
        return self.facts.needs[role]

    def input_want(self, rows: int, rowwise: bool, colwise: bool) -> Want | None:
        """How a producer should hand over its value; None: in high precision."""
        return self.facts.scalings["input", False].want(rows, rowwise, colwise, self.step, record=self.records)

    def weight_operand(self, gemm_name: str) -> QuantizedStorage:
        facts = self.facts
        scale = facts.scalings["weight", False].scale(self.step) if facts.uses_history else None
        return self.weight.operand(gemm_name, scale, all_copies=self.keep)
