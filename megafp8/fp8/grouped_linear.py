"""Grouped linears: many like linears, each of its own rows of one buffer, in one GEMM of each kind.

    fprop   Y[rows of g]  = Q(X)[rows of g] @ Q(W[g]).T
    dgrad   dX[rows of g] = Q(dY)[rows of g] @ Q(W[g])
    wgrad   dW[g]        += Q(dY)[rows of g].T @ Q(X)[rows of g]        FP32, into the sink's buffers

Rows of a linear begin at a multiple of the recipes' tiles, with rows of zeros between (`RowSpec.alignment`): so the
tiles of the buffer as a whole are those of each linear, and rows of zeros add nothing. With one scale a tensor each
linear's rows have a scale of their own (`expert_scales.py`), from their amax or from a history; there the filling lets
one pass make all copies. Sizes stay on the device. Rows past the last end are nobody's: they may hold anything, and no
GEMM reads them.

What is kept, what a producer does and where gradients go is as in `LinearFunction`, whose pieces these are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafp8.fp8 import expert_scales, gemm, grouped_matmul
from megafp8.fp8.expert_scales import Groups
from megafp8.fp8.grouped_args import GroupedArgs, has_tiles, want_of
from megafp8.fp8.grouped_rows import RowSpec
from megafp8.fp8.linear import Linear
from megafp8.fp8.linear_function import Remade, pick, produce, to_save
from megafp8.fp8.producer import Producer, Want
from megafp8.fp8.recipe import ROLES, Recipe
from megafp8.fp8.storage import Quantized, QuantizedStorage
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.fp8.weight_stack import WeightStack
from megafp8.fp8.wgrad import Wgrad, put
from megafp8.step import StepContext


def can_group(linears: Sequence[Linear]) -> bool:
    """Whether these linears run as one: alike, and with scales that can be kept apart."""
    first = linears[0]
    recipe, shape, trained = first.recipe, first.weight.shape, first.weight.requires_grad
    for linear in linears:  # asked in every forward, of hundreds of experts
        weight = linear._parameters["weight"]
        if linear.recipe is not recipe and linear.recipe != recipe:
            return False
        if linear.bias is not None or linear.comm.grid is not None:
            return False
        if weight.requires_grad != trained or weight.shape != shape:
            return False
    return runs_grouped(recipe) or _own_scales(first)


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
        self._names = tuple(linear.name for linear in linears)
        self._places = {role: tuple(f"{linear.name}/{role}" for linear in linears) for role in ROLES}

    @property
    def stack(self) -> WeightStack:
        if not self._is_current():
            self._stack = WeightStack([linear._own_weight() for linear in self.linears])
        return self._stack

    def _is_current(self) -> bool:
        """Whether the stack is of the linears' parameters and recipes as they are now."""
        if self._stack is None:
            return False
        for linear, weight in zip(self.linears, self._stack.weights, strict=True):
            if linear._parameters["weight"] is not weight.param or linear.recipe is not weight.recipe:
                return False
            if linear._owner is not weight:
                return False
        return True

    def row_spec(self, step: StepContext, alignment: int) -> RowSpec:
        """How rows of the input are wanted, which begin at multiples of `alignment`."""
        first = self.linears[0]
        recipe, colwise = first.recipe, first.input_spec(step.training and torch.is_grad_enabled()).colwise
        if recipe is None or (not has_tiles(recipe) and step.observer is not None):
            return RowSpec(alignment=alignment)  # who observes wants to see the values
        if has_tiles(recipe):
            return RowSpec(recipe.quantizer("input"), colwise, alignment)
        step = first._step(step)
        each = want_of(recipe, "input", self._places, step, True, colwise, record=step.records)
        return RowSpec(each.quantizer, colwise, alignment, each)

    def grad_want(self, step: StepContext | None, groups: Groups) -> Want | None:
        """How the gradient of the output is wanted; None: in high precision. groups: where rows lie."""
        each = self.each_grad_want(step)
        return self.linears[0].grad_want(step) if each is None else each.of_experts(groups)

    def each_grad_want(self, step: StepContext | None) -> Want | None:
        """The same, where all rows of a linear share a scale, but for where they lie; else None."""
        first = self.linears[0]
        if first.recipe is None or has_tiles(first.recipe):
            return None
        step, wanted = first._step(step), first.facts().grad_wanted[True, first.weight.requires_grad]
        record = step is not None and step.training  # a recomputed forward has the step's only backward
        orientations = "rowwise" in wanted, "colwise" in wanted
        return want_of(first.recipe, "grad_output", self._places, step, *orientations, record=record)

    def gradient_spec(self, step: StepContext | None, alignment: int) -> RowSpec | None:
        """How rows of the output's gradient are wanted; None: in high precision."""
        each = self.each_grad_want(step)
        want = self.linears[0].grad_want(step) if each is None else each
        return None if want is None else RowSpec(want.quantizer, want.colwise, alignment, each)

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
            names=self._names,
            places=self._places,
            ends=ends,
            alignment=alignment,
        )
        # Where gradients go into a sink, one weight stands for all: autograd's work for each input takes the host time.
        weights = stack.params if step is None or step.grads is None else stack.params[:1]
        return GroupedLinearFunction.apply(x, args, len(tensors), *tensors, *weights)


class GroupedLinearFunction(torch.autograd.Function):
    """x: [R, K]; with a producer its input, and `rest` its tensors, then all weights, or with a sink for gradients the
    first. Returns [R, N]."""

    @staticmethod
    def forward(ctx, x: Tensor, args: GroupedArgs, count: int, *rest: Tensor) -> Tensor:
        tensors, weights = rest[:count], rest[count:]
        ctx.args, ctx.producer_tensors, made = args, count, ()
        needs_wgrad = args.keep and weights[0].requires_grad
        if args.producer is not None:
            x, made = produce(x, tensors, args, needs_wgrad)
        if args.recipe is None:
            x = x.dequantize(args.dtype) if isinstance(x, QuantizedTensor) else x.to(args.dtype)
            y, kept = grouped_matmul.fprop(x, args.stack.values(args.dtype), args.ends), x
        else:
            y, kept = _fprop_fp8(x, args, needs_wgrad)
        own, ctx.rebuild = to_save(kept if needs_wgrad else None)
        ctx.counts = len(own), len(made)
        ctx.versions = args.stack.versions()
        ctx.save_for_backward(*own, *made, *tensors)
        return y

    @staticmethod
    @once_differentiable  # a gradient of the gradient would silently lack these linears
    def backward(ctx, dy: Tensor) -> tuple[Tensor | None, ...]:
        args, (own, made), count = ctx.args, ctx.counts, ctx.producer_tensors
        if ctx.versions != args.stack.versions():  # what PyTorch says of saved tensors
            raise RuntimeError(f"weights of {args.names[0]} and others have been modified by an inplace operation")
        saved = ctx.saved_tensors
        needs_dgrad = ctx.needs_input_grad[0] or any(ctx.needs_input_grad[3 : 3 + count])
        needs_wgrad = ctx.needs_input_grad[3 + count]
        x = ctx.rebuild(*saved[:own])
        if args.producer is not None:
            x = Remade(args, x, tuple(saved[own : own + made]), tuple(saved[own + made : own + made + count]))
        run = _backward_high_precision if args.recipe is None else _backward_fp8
        dx, wgrad, others = run(dy, x, args, needs_dgrad, needs_wgrad)
        dws = deliver_stack(args, wgrad) if needs_wgrad else ()
        dws = dws or (None,) * (len(ctx.needs_input_grad) - 3 - count)
        return dx, None, None, *(others or (None,) * count), *dws


def _fprop_fp8(
    x: Tensor | Quantized, args: GroupedArgs, needs_wgrad: bool
) -> tuple[Tensor, QuantizedStorage | Tensor | None]:
    """Y, and what to keep of x for wgrad."""
    orientation = args.needs("input")["wgrad"]
    given = x.quantized if isinstance(x, QuantizedTensor) else x if isinstance(x, Quantized) else None
    remakes = args.requantize_input and args.producer is not None
    value = None
    if given is None:
        colwise, value = needs_wgrad and orientation == "colwise" and not remakes, x
        given = args.quantize("input", x, True, colwise)
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
) -> tuple[Tensor | None, Wgrad | None, tuple]:
    """dX, the wgrad task, and gradients of a producer's tensors. dY is quantized once."""
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
    grad_output, alignment, backend = pick(quantized, needs["wgrad"]), args.alignment, args.backend

    def wgrad(out: Tensor | None, adds: bool) -> Tensor:
        return gemm.grouped_wgrad(grad_output, x, ends, out, alignment, backend, adds)

    return dx, Wgrad(wgrad, grad_output.nbytes + x.nbytes), others


def deliver_stack(args: GroupedArgs, wgrad: Wgrad) -> tuple[Tensor, ...]:
    """Delivers the gradients of all weights, now or when the step's queue runs them: to the step's sink, or returns
    them where there is none."""
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
    return ()
