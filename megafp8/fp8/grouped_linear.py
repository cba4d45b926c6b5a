"""Grouped linears: many like linears, each of its own rows of one buffer, in one GEMM of each kind.

    fprop   Y[rows of g]  = Q(X)[rows of g] @ Q(W[g]).T
    dgrad   dX[rows of g] = Q(dY)[rows of g] @ Q(W[g])
    wgrad   dW[g]        += Q(dY)[rows of g].T @ Q(X)[rows of g]        FP32, into the sink's buffers

Rows of a linear begin at a multiple of the recipes' tiles, with rows of zeros between (`RowSpec.alignment`): so the
tiles of the buffer as a whole are those of each linear, and rows of zeros add nothing. With one scale a tensor each
linear's rows have a scale of their own (`expert_scales.py`), from their amax or from a history; there the filling saves
copies before wgrad. Sizes stay on the device. Rows past the last end are nobody's: they may hold anything, and no GEMM
reads them.

What is kept, what a producer does and where gradients go is as in `LinearFunction`, whose pieces these are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafp8.fp8 import expert_scales, gemm, grouped_matmul
from megafp8.fp8.expert_scales import Groups
from megafp8.fp8.linear import Linear
from megafp8.fp8.linear_args import LinearArgs
from megafp8.fp8.linear_function import Remade, pick, produce, to_save
from megafp8.fp8.producer import Producer, Want
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.recipe import ROLES, Recipe
from megafp8.fp8.storage import Quantized, QuantizedStorage
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.fp8.weight_stack import WeightStack
from megafp8.fp8.wgrad import Wgrad, put
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

    @property
    def scale_each(self) -> bool:
        """Whether all rows of a linear share a scale, so that none is quantized before they are together."""
        return self.recipe is not None and self.recipe.quantizer("input").spec.tile.kind == "tensor"

    def input_want(self, rows: int, rowwise: bool, colwise: bool) -> Want | None:
        return None if self.scale_each else Want(self.recipe.quantizer("input"), rowwise, colwise)

    def groups(self, x: Tensor) -> Groups:
        """Where the linears' rows lie in x; worked out once for all its operands, which have the same rows."""
        if self._groups is None:
            self._groups = Groups(self.ends, x.shape[0], self.alignment)
        return self._groups

    @property
    def history(self) -> ScalingHistory | None:
        return self.step.scaling if self.step is not None and self.recipe.uses_history else None

    def history_scales(self, role: str) -> Tensor | None:
        """FP32 [G]: the history's; None where scales come from the operands."""
        return None if self.history is None else self.history.scales(self.places[role])

    def amax(self, role: str, x: Tensor) -> Tensor:
        """FP32 [G]: with `scale_each`, what each linear's scale is made from. A history is told the rows' amaxes."""
        quantizer, scales = self.recipe.quantizer(role), self.history_scales(role)
        # As in dense linears: a recomputed forward has the step's only backward.
        records = self.history is not None and (self.records if role == "input" else self.step.training)
        own = expert_scales.amax(quantizer, x, self.groups(x)) if records or scales is None else None
        if records:
            self.history.record_all(self.places[role], own)
        return own if scales is None else expert_scales.amax_for(quantizer, scales)

    def weight_operand(self, gemm_name: str) -> QuantizedStorage:
        if self.history is None:
            return self.stack.operand(gemm_name)
        if gemm_name == "fprop" and self.records:
            self.history.record_all(self.places["weight"], self.stack.amax())
        for weight in self.stack.weights:
            if weight.primary is not None and weight.primary.scale is not self.history.scale(weight.history_name):
                raise RuntimeError("FP8 primary weights have other scales than the history: Optimizer.write_weights()")
        return self.stack.operand(gemm_name, self.history_scales("weight"))

    def quantize(self, role: str, x: Tensor, rowwise: bool, colwise: bool, amax: Tensor | None = None) -> Quantized:
        """All linears' rows. amax: with `scale_each`, what each linear's scale is made from, if that is known."""
        quantizer = self.recipe.quantizer(role)
        if self.scale_each:
            amax = self.amax(role, x) if amax is None else amax
            return expert_scales.quantize(quantizer, x, self.groups(x), rowwise, colwise, amax)
        return quantizer.quantize(x, rowwise, colwise)

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


def can_group(linears: Sequence[Linear]) -> bool:
    """Whether these linears run as one: alike, and with scales that can be kept apart."""
    first = linears[0]
    recipe, shape = first.recipe, first.weight.shape
    one = all(linear.recipe is recipe or linear.recipe == recipe for linear in linears)
    alike = one and all(linear.weight.shape == shape for linear in linears)
    plain = all(linear.bias is None and linear.comm.grid is None for linear in linears)
    trained = len({linear.weight.requires_grad for linear in linears}) == 1
    return alike and plain and trained and (runs_grouped(first.recipe) or _own_scales(first))


def runs_grouped(recipe: Recipe | None) -> bool:
    """Whether rows of zeros keep linears' tiles apart: not where all rows share a scale, or square tiles."""
    return recipe is None or (recipe.tiles["input"], recipe.tiles["grad_output"]) == ("1d", "1d")


def _own_scales(linear: Linear) -> bool:
    """Whether a linear has one scale a tensor, made from this rank's values of it alone, or a history of those."""
    recipe = linear.recipe
    if recipe is None or set(recipe.tiles.values()) != {"tensor"}:
        return False
    scalings = linear.facts().scalings
    return all(scalings[role, False].cut is None for role in ROLES)


def rows_alignment(linears: Sequence[Linear]) -> int:
    """What each linear's rows are filled up to a multiple of."""
    return rows_filled_to(linears[0].recipe)


def rows_filled_to(recipe: Recipe | None) -> int:
    """The rows that a recipe's tiles span, or that its copies want; 1 where no rows are filled in."""
    if recipe is None:
        return 1
    return recipe.block if runs_grouped(recipe) else expert_scales.ALIGNMENT


class GroupedLinear:
    """linears: for which `can_group`; their parameters stay theirs."""

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = tuple(linears)
        self._stack: WeightStack | None = None
        self._places = {role: tuple(f"{linear.name}/{role}" for linear in linears) for role in ROLES}

    @property
    def stack(self) -> WeightStack:
        owners = [linear._own_weight() for linear in self.linears]
        if self._stack is None or not self._stack.is_of(owners):
            self._stack = WeightStack(owners)
        return self._stack

    @property
    def row_quantizer(self) -> Quantizer | None:
        """What quantizes the rows of the input one by one, wherever they are; None where it takes all of a linear's."""
        recipe = self.linears[0].recipe
        return recipe.quantizer("input") if recipe is not None and runs_grouped(recipe) else None

    def grad_want(self, step: StepContext | None) -> Want | None:
        """How the gradient of the output is wanted; None: in high precision."""
        return None if self.row_quantizer is None else self.linears[0].grad_want(step)

    def __call__(
        self,
        x: Tensor,
        ends: Tensor,
        step: StepContext | None = None,
        *,
        alignment: int = 1,
        producer: Producer | None = None,
        tensors: tuple[Tensor, ...] = (),
        grad_want: Want | None = None,
    ) -> Tensor:
        """x: [R, in_features], high precision or QuantizedTensor; returns [R, out_features].

        ends: int32 [G] on the device, multiples of `alignment`. producer, tensors, grad_want: as in `Linear`.
        """
        first, stack = self.linears[0], self.stack
        step = first._step(step)
        args = GroupedArgs(
            weight=stack.weights[0],
            recipe=first.recipe,
            facts=first.facts(),
            step=step,
            name=None,
            requantize_input=first.requantize_input,
            comm=first.comm,
            backend=first.gemm_backend,
            keep=torch.is_grad_enabled(),
            dtype=first.weight.dtype,
            producer=producer,
            grad_want=grad_want,
            stack=stack,
            names=tuple(linear.name for linear in self.linears),
            places=self._places,
            ends=ends,
            alignment=alignment,
        )
        return GroupedLinearFunction.apply(x, args, len(tensors), *tensors, *stack.params)


class GroupedLinearFunction(torch.autograd.Function):
    """x: [R, K]; with a producer its input, and `rest` its tensors, then all weights. Returns [R, N]."""

    @staticmethod
    def forward(ctx, x: Tensor, args: GroupedArgs, count: int, *rest: Tensor) -> Tensor:
        tensors, weights = rest[:count], rest[count:]
        ctx.args, ctx.producer_tensors, made, amax = args, count, (), None
        needs_wgrad = args.keep and weights[0].requires_grad
        if args.producer is not None:
            x, made = produce(x, tensors, args, needs_wgrad)
            if args.scale_each:  # the value that backward makes again may be another, but has the same scale
                amax = args.amax("input", x)
                made = (*made, amax) if args.keep else ()
        if args.recipe is None:
            x = x.dequantize(args.dtype) if isinstance(x, QuantizedTensor) else x.to(args.dtype)
            y, kept = grouped_matmul.fprop(x, args.stack.values(args.dtype), args.ends), x
        else:
            y, kept = _fprop_fp8(x, args, needs_wgrad, amax)
        own, ctx.rebuild = to_save(kept if needs_wgrad else None)
        ctx.counts = len(own), len(made)
        # The weights are saved so that PyTorch refuses a backward after they were written to.
        ctx.save_for_backward(*own, *made, *rest)
        return y

    @staticmethod
    @once_differentiable  # a gradient of the gradient would silently lack these linears
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        args, (own, made), count = ctx.args, ctx.counts, ctx.producer_tensors
        saved = ctx.saved_tensors
        needs_dgrad = ctx.needs_input_grad[0] or any(ctx.needs_input_grad[3 : 3 + count])
        needs_wgrad = ctx.needs_input_grad[3 + count]
        x, options = ctx.rebuild(*saved[:own]), {}
        if args.producer is not None:
            last = own + made - args.scale_each
            options = {"amax": saved[last]} if args.scale_each else {}
            x = Remade(args, x, tuple(saved[own:last]), tuple(saved[own + made : own + made + count]))
        run = _backward_high_precision if args.recipe is None else _backward_fp8
        dx, wgrad, others = run(dy, x, args, needs_dgrad, needs_wgrad, **options)
        dws = deliver_stack(args, wgrad) if needs_wgrad else (None,) * len(args.stack.params)
        return dx, None, None, *(others or (None,) * count), *dws


def _fprop_fp8(
    x: Tensor | Quantized, args: GroupedArgs, needs_wgrad: bool, amax: Tensor | None = None
) -> tuple[Tensor, QuantizedStorage | Tensor | None]:
    """Y, and what to keep of x for wgrad. amax: what each linear's scale is made from, where that is known already."""
    orientation = args.needs("input")["wgrad"]
    given = x.quantized if isinstance(x, QuantizedTensor) else x if isinstance(x, Quantized) else None
    remakes = args.requantize_input and args.producer is not None
    value = None
    if given is None:
        colwise, value = needs_wgrad and orientation == "colwise" and not remakes, x
        given = args.quantize("input", x, True, colwise, amax)
    shown = args.producer is not None and value is None  # a producer's bytes have been shown
    if not shown and args.step is not None and args.step.records:
        args.observe("input", given, lambda: value)
    weight, fast = args.weight_operand("fprop"), args.recipe.fast_accumulation
    y = gemm.grouped_fprop(given.rowwise, weight, args.ends, args.dtype, args.backend, fast)
    if remakes or not needs_wgrad:
        return y, None
    kept = pick(given, orientation)
    return y, args.recipe.quantizer("input").derive_colwise(given.rowwise) if kept is None else kept


def _backward_high_precision(
    dy: Tensor, x: Tensor | None, args: GroupedArgs, needs_dgrad: bool, needs_wgrad: bool
) -> tuple[Tensor | None, Wgrad | None, tuple]:
    ends = args.ends
    dx = grouped_matmul.dgrad(dy, args.stack.values(dy.dtype), ends) if needs_dgrad else None
    if not needs_wgrad:
        return dx, None, ()
    return dx, Wgrad(lambda *out: grouped_matmul.wgrad(dy, x, ends, *out), dy.nbytes + x.nbytes), ()


def _backward_fp8(
    dy: Tensor,
    x: QuantizedStorage | Remade | None,
    args: GroupedArgs,
    needs_dgrad: bool,
    needs_wgrad: bool,
    amax: Tensor | None = None,
) -> tuple[Tensor | None, Wgrad | None, tuple]:
    """dX, the wgrad task, and gradients of a producer's tensors. dY is quantized once. amax: of a producer's value in
    forward, where each linear's rows have one scale."""
    needs, ends = args.needs("grad_output"), args.ends
    wanted = {needs[name] for name, on in (("dgrad", needs_dgrad), ("wgrad", needs_wgrad)) if on}
    if not wanted:
        return None, None, ()
    if isinstance(dy, QuantizedTensor):  # by the producer whose gradient it is
        quantized, value = dy.quantized, getattr(dy, "observed_value", None)
    else:
        quantized, value = args.quantize("grad_output", dy, "rowwise" in wanted, "colwise" in wanted), dy
    if quantized.rowwise is not None and args.step is not None and args.step.training:
        args.observe("grad_output", quantized, lambda: value)
    dx, others = None, ()
    if needs_dgrad:
        weight = args.weight_operand("dgrad")
        dx = gemm.grouped_dgrad(pick(quantized, needs["dgrad"]), weight, ends, args.dtype, args.backend)
    if isinstance(x, Remade):
        if needs_dgrad:
            (dx, others, _), x = x.gradient(dx, needs_wgrad)
        else:
            x = x.again()
    if not needs_wgrad:
        return dx, None, others
    if isinstance(x, Tensor):
        orientation = args.needs("input")["wgrad"]
        x = pick(args.quantize("input", x, orientation == "rowwise", orientation == "colwise", amax), orientation)
    grad_output, alignment, backend = pick(quantized, needs["wgrad"]), args.alignment, args.backend

    def wgrad(out: Tensor | None, adds: bool) -> Tensor:
        return gemm.grouped_wgrad(grad_output, x, ends, out, alignment, backend, adds)

    return dx, Wgrad(wgrad, grad_output.nbytes + x.nbytes), others


def deliver_stack(args: GroupedArgs, wgrad: Wgrad) -> tuple[Tensor | None, ...]:
    """Delivers the gradients of all weights, now or when the step's queue runs them."""
    params, step = args.stack.params, args.step
    if step is None or step.grads is None:
        return tuple(dw.to(param.dtype) for dw, param in zip(wgrad.run(None, False), params, strict=True))
    grads = step.grads

    def run() -> None:
        targets = [grads.target(param) for param in params]
        adds = any(adds for _, adds in targets)
        for buffer, one_adds in targets if adds else ():
            if not one_adds:
                buffer.zero_()
        together = args.stack.gradients([buffer for buffer, _ in targets])
        product = wgrad.run(together, adds)
        if together is None:
            for (buffer, _), part in zip(targets, product, strict=True):
                put(part, buffer, adds)
        for param in params:
            grads.ready(param)

    if args.defers:
        step.wgrads.submit(run, wgrad.held_bytes)
    else:
        run()
    return (None,) * len(params)
