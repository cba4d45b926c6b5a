"""What the autograd function of grouped linears is told besides its tensors, and how rows are wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from megafp8.fp8.expert_scales import Groups
from megafp8.fp8.linear_args import LinearArgs
from megafp8.fp8.producer import Want
from megafp8.fp8.recipe import Recipe
from megafp8.fp8.storage import Quantized, QuantizedStorage
from megafp8.fp8.weight_stack import WeightStack
from megafp8.step import ScalingHistory, StepContext


@dataclass(eq=False)
class GroupedArgs(LinearArgs):
    """stack: the weights; `weight` is the first one's. ends: int32 [G], one past each linear's last row; alignment: a
    number that all of them are multiples of. names: of the linears; places: role -> "<linear>/<role>" of each."""

    stack: WeightStack | None = None
    names: tuple[str | None, ...] = ()
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ends: Tensor | None = None
    alignment: int = 1
    _groups: Groups | None = None

    def groups(self, rows: int) -> Groups:
        """Where the linears' rows lie, of `rows` rows; worked out once for all operands, which have the same rows."""
        if self._groups is None:
            self._groups = Groups(self.ends, rows, self.alignment)
        return self._groups

    def want(self, role: str, rows: int, rowwise: bool, colwise: bool, *, record: bool) -> Want:
        want = want_of(self.recipe, role, self.places, self.step, rowwise, colwise, record=record)
        return want if has_tiles(self.recipe) else want.of_experts(self.groups(rows))

    def input_want(self, rows: int, rowwise: bool, colwise: bool) -> Want | None:
        return self.want("input", rows, rowwise, colwise, record=self.records)

    @property
    def history(self) -> ScalingHistory | None:
        return self.step.scaling if self.step is not None and self.recipe.uses_history else None

    def weight_operand(self, gemm_name: str) -> QuantizedStorage:
        if self.history is None:
            return self.stack.operand(gemm_name)
        if gemm_name == "fprop" and self.records:
            self.history.record_all(self.places["weight"], self.stack.amax())
        for weight in self.stack.weights:
            if weight.primary is not None and weight.primary.scale is not self.history.scale(weight.history_name):
                raise RuntimeError("FP8 primary weights have other scales than the history: Optimizer.write_weights()")
        return self.stack.operand(gemm_name, self.history.scales(self.places["weight"]))

    def quantize(self, role: str, x: Tensor, rowwise: bool, colwise: bool) -> Quantized:
        """All linears' rows, of the step's first look at them."""
        # As in dense linears: a recomputed forward has the step's only backward.
        record = self.records if role == "input" else self.step is not None and self.step.training
        want = self.want(role, x.shape[0], rowwise, colwise, record=record)
        want = want if want.record is None else want.measuring(x.device)
        quantized = want.quantize(x)
        want.measured()
        return quantized

    def observe(self, role: str, quantized: Quantized, x: Callable[[], Tensor | None]) -> None:
        """Shows each linear's rows to the step's observer, if any; that waits for the number of rows."""
        if self.step is None or self.step.observer is None:
            return
        value, whole, start = x(), quantized.rowwise, 0
        for number, (name, end) in enumerate(zip(self.names, self.ends.tolist(), strict=True)):
            rows = slice(start, end)
            scales = slice(number, number + 1) if whole.tile.kind == "tensor" else rows
            own = replace(whole, data=whole.data[rows], scale_inv=whole.scale_inv[scales])
            self.step.observer.see(f"{name}/{role}", None if value is None else value[rows], Quantized(own))
            start = end


def has_tiles(recipe: Recipe) -> bool:
    """Whether rows are quantized tile by tile; else all rows of a linear share a scale."""
    return recipe.quantizer("input").spec.tile.kind != "tensor"


def want_of(
    recipe: Recipe,
    role: str,
    places: Mapping[str, tuple[str, ...]],
    step: StepContext | None,
    rowwise: bool,
    colwise: bool,
    *,
    record: bool,
) -> Want:
    """How rows of grouped linears are wanted, but for where they lie. record: a history is told their amaxes."""
    if not recipe.uses_history:
        return Want(recipe.quantizer(role), rowwise, colwise)
    history, names = step.scaling, places[role]
    note = partial(history.record_all, names) if record else None
    return Want(recipe.quantizer(role), rowwise, colwise, scale=history.scales(names), record=note)
