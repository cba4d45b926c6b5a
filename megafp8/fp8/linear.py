"""The one linear of megafp8: quantizes its input, multiplies in FP8, keeps one FP8 copy for backward.

How it does so is in linear_function.py; here are its parameters, and what it wants of the producer of its input.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from megafp8.fp8.comm import ALONE, CommPlan
from megafp8.fp8.formats import Scale
from megafp8.fp8.input_spec import InputSpec
from megafp8.fp8.linear_args import LinearArgs, LinearFacts
from megafp8.fp8.linear_function import LinearFunction
from megafp8.fp8.param import Weight
from megafp8.fp8.producer import Producer, Want
from megafp8.fp8.recipe import ROLES, Recipe
from megafp8.params import ParamSpec, attach_spec
from megafp8.step import Phase, ScalingHistory, StepContext


class Linear(nn.Module):
    """`y = x @ weight.T + bias` in FP8 as `recipe` says; in high precision without one.

    in_features, out_features: of this rank's part. weight_spec, bias_spec: attached to the parameters; their owner
    initializes them. Without specs parameters start as those of `nn.Linear`.
    params_dtype: of weight, bias and output. name: global name for a history (default: the weight spec's name).
    requantize_input: keep the high-precision input, which somebody else keeps anyway, instead of an FP8 copy.
    comm: what is exchanged with the ranks that hold the other parts of the weight.
    keep_transposed: keep the weight's transposed copy until the weight changes.
    gemm_backend: "auto", "cublaslt" or "reference".
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: Recipe | None = None,
        weight_spec: ParamSpec | None = None,
        bias_spec: ParamSpec | None = None,
        params_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        name: str | None = None,
        requantize_input: bool = False,
        keep_transposed: bool = True,
        comm: CommPlan = ALONE,
        gemm_backend: str = "auto",
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.recipe, self.comm, self.gemm_backend = recipe, comm, gemm_backend
        self.requantize_input, self.keep_transposed = requantize_input, keep_transposed
        self.name = name or (weight_spec.name if weight_spec else None)
        self.history: ScalingHistory | None = None
        options = {"dtype": params_dtype, "device": device}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **options))
        self.bias = nn.Parameter(torch.empty(out_features, **options)) if bias else None
        if weight_spec is not None:
            attach_spec(self.weight, weight_spec)
        else:
            nn.Linear.reset_parameters(self)
        if bias_spec is not None:
            attach_spec(self.bias, bias_spec)
        self._own_weight()

    def _own_weight(self, weight: nn.Parameter | None = None) -> Weight:
        """The owner of the weight's bytes; a new one where `to()` or `load_state_dict` replaced the parameter."""
        owner, weight = self.__dict__.get("_owner"), self.weight if weight is None else weight
        if owner is None or owner.param is not weight or owner.recipe is not self.recipe:
            history_name = f"{self.name}/weight" if self.recipe is not None and self.recipe.uses_history else None
            options = {"keep_transposed": self.keep_transposed, "comm": self.comm, "history_name": history_name}
            owner = Weight(weight, self.recipe, **options)
            self._owner = weight.owner = owner
        return owner

    def facts(self, weight: nn.Parameter | None = None) -> LinearFacts | None:
        """What follows from how the linear is now; None without a recipe."""
        recipe, comm, name = self.recipe, self.comm, self.name
        if recipe is None:
            return None
        facts, device = self.__dict__.get("_facts"), (self.weight if weight is None else weight).device
        known = facts is not None and facts.recipe is recipe and facts.comm is comm
        if not known or facts.name != name or facts.device != device:
            facts = self._facts = LinearFacts(recipe, comm, name, device)
        return facts

    def use_recipe(self, recipe: Recipe | None) -> None:
        """Changes what the linear computes with, between two steps; a weight on its way must have arrived."""
        self.recipe = recipe
        self._own_weight()

    def input_spec(self, training: bool = True) -> InputSpec:
        """What a producer should hand over; `training`: whether backward follows."""
        facts = self.facts()
        if facts is None or facts.gathers_first:
            return InputSpec(self.weight.dtype)
        needs_colwise, scaling = facts.needs["input"]["wgrad"] == "colwise", facts.scalings["input", False]
        return InputSpec(
            self.weight.dtype,
            scaling.quantizer,
            colwise=training and self.weight.requires_grad and needs_colwise and not self.requantize_input,
            requantizes=self.requantize_input,
            history_name=scaling.name,
            comm=self.comm,
            place=scaling.place,
        )

    def derive_weight(self, step: StepContext) -> None:
        """Makes the weight's copies that a step's forward and backward ask for, if they are not there already."""
        facts = self.facts()
        if facts is not None:
            scale = facts.scalings["weight", False].scale(step) if facts.uses_history else None
            self._own_weight().derive(scale)

    @property
    def takes_producer(self) -> bool:
        """Whether `forward` runs a producer inside: where the input is quantized here."""
        facts = self.facts()
        return facts is not None and not facts.gathers_first

    def grad_want(self, step: StepContext | None = None) -> Want | None:
        """How a producer that consumes this linear's output should hand over its gradient; None: in high precision."""
        facts = self.facts()
        if facts is None or self.bias is not None or self.comm.gathers_grad_output:
            return None
        step, wanted = self._step(step), facts.grad_wanted[True, self.weight.requires_grad]
        record = step is not None and step.training  # a recomputed forward has the step's only backward
        scaling = facts.scalings["grad_output", False]
        return scaling.want(0, "rowwise" in wanted, "colwise" in wanted, step, record=record)

    def history_tensors(self) -> dict[str, float]:
        """Global name -> largest finite value of each tensor whose scale comes from a history."""
        if self.recipe is None or not self.recipe.uses_history:
            return {}
        return {f"{self.name}/{role}": self.recipe.quantizer(role).spec.format.fmax for role in ROLES}

    def saved_bytes(self, rows: int) -> int:
        """Bytes held for backward on this linear's behalf, for an input of `rows` rows."""
        if not self.weight.requires_grad or self.requantize_input:
            return 0
        if self.recipe is None:
            return rows * self.in_features * self.weight.element_size()
        spec = self.recipe.quantizer("input").spec
        scale_bytes = 1 if spec.scale is Scale.E8M0 else 4
        return rows * self.in_features + math.prod(spec.tile.scale_shape(self.in_features, rows)) * scale_bytes

    def forward(
        self,
        x: Tensor,
        step: StepContext | None = None,
        *,
        producer: Producer | None = None,
        tensors: tuple[Tensor, ...] = (),
        grad_want: Want | None = None,
        passes_on: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """x: [..., in_features], high precision or QuantizedTensor. Returns [..., out_features].

        producer: makes the input from `x` [..., any] and `tensors`, where `takes_producer`; then `requantize_input`
        means that it makes it again in backward. grad_want: how the gradient of `x` is wanted then. passes_on: also
        returns `x`, for whoever else reads it: the two gradients of `x` are then added where the producer's is made.
        """
        if producer is None and x.shape[-1] != self.in_features:
            raise ValueError(f"linear {self.name or ''} takes {self.in_features} features, got {tuple(x.shape)}")
        weight, bias, step = self.weight, self.bias, self._step(step)
        autocast = torch.is_autocast_enabled(x.device.type)
        args = LinearArgs(
            weight=self._own_weight(weight),
            recipe=self.recipe,
            facts=self.facts(weight),
            step=step,
            name=self.name,
            requantize_input=self.requantize_input,
            comm=self.comm,
            backend=self.gemm_backend,
            keep=torch.is_grad_enabled(),
            dtype=torch.get_autocast_dtype(x.device.type) if autocast else weight.dtype,
            producer=producer,
            grad_want=grad_want,
            passes_on=passes_on,
        )
        flat = x.dim() == 2
        y = LinearFunction.apply(x if flat else x.reshape(-1, x.shape[-1]), weight, bias, args, *tensors)
        if flat:
            return y
        y, handed_on = y if passes_on else (y, None)
        y = y.view(*x.shape[:-1], self.out_features)
        return (y, handed_on.view(x.shape)) if passes_on else y

    def _step(self, step: StepContext | None) -> StepContext | None:
        if self.recipe is None or not self.recipe.uses_history or (step is not None and step.scaling is not None):
            return step
        if self.history is None or self.name is None or step is not None:
            raise ValueError(
                f"recipe '{self.recipe.name}' of linear {self.name!r} needs a history: give the linear a name and "
                "pass step=StepContext(scaling=DelayedScaling.of(model)), or use convert()"
            )
        return StepContext(phase=Phase.TRAIN if self.training else Phase.EVAL, scaling=self.history)

    def extra_repr(self) -> str:
        recipe = self.recipe.name if self.recipe else "high precision"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {recipe}"
        )
