"""The autograd function of all linears: what is multiplied, what is kept for backward, where gradients go.

    fprop   Y  = Q(X) @ Q(W).T + b
    dgrad   dX = Q(dY) @ Q(W)
    wgrad   dW += Q(dY).T @ Q(X)          FP32, into the gradient sink's buffer

X may be made on the spot by a producer, such as a norm or SwiGLU; then dX goes through its gradient on the way out.

Without a recipe the same function multiplies in high precision and still accumulates wgrad in FP32. What is exchanged
with tensor-parallel peers, a CommPlan says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from megafp8.fp8 import gemm
from megafp8.fp8.grad_output import dgrad_gathering, grad_output, pick
from megafp8.fp8.linear_args import LinearArgs
from megafp8.fp8.producer import Gradients, Tensors, Want
from megafp8.fp8.shards import Operand
from megafp8.fp8.storage import Quantized, QuantizedStorage
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.fp8.wgrad import Run, Wgrad, deliver, deliver_wgrad, multiply_wgrad, sum_rows


def once(backward: Callable) -> Callable:
    """PyTorch's `once_differentiable` (a gradient of the gradient would silently lack these linears), without its cost
    to the host where nobody asks for such a gradient."""
    guarded = once_differentiable(backward)

    @wraps(backward)
    def run(ctx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return guarded(ctx, *grads) if torch.is_grad_enabled() else backward(ctx, *grads)

    return run


class LinearFunction(torch.autograd.Function):
    """x: [M, K], high precision or QuantizedTensor; with a producer its input, and `tensors` its others.

    Returns [M, N] in `args.dtype`; where `args.passes_on`, also the producer's input as it came.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, bias: Tensor | None, args: LinearArgs, *tensors: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        ctx.args, ctx.bias, source = args, bias, x
        ctx.set_materialize_grads(False)
        needs_wgrad, made = args.keep and weight.requires_grad, ()
        if args.producer is not None:
            x, made = produce(x, tensors, args, needs_wgrad)
        if args.recipe is None:
            x = x.dequantize(args.dtype) if isinstance(x, QuantizedTensor) else x.to(args.dtype)
            y, kept = args.comm.fprop(x, lambda x: F.linear(x, weight.to(args.dtype), _early(bias, args))), x
        else:
            y, kept = _fprop_fp8(x, bias, args, needs_wgrad)
        if bias is not None and args.comm.sums_output:  # once, to the sum over the ranks
            y = y + bias
        own, ctx.rebuild = to_save(kept if needs_wgrad else None)
        ctx.counts = len(own), len(made)
        ctx.others = tuple([t if t.is_leaf else None for t in tensors])
        # The weight is saved so that PyTorch refuses a backward after it was written to.
        ctx.save_for_backward(weight, *own, *made, *tensors)
        return (y, source) if args.passes_on else y

    @staticmethod
    @once
    def backward(ctx, dy: Tensor, beside: Tensor | None = None) -> tuple[Tensor | None, ...]:
        args, (own, made) = ctx.args, ctx.counts
        if dy is None:  # only the producer's input was used
            return beside, *(None,) * (len(ctx.needs_input_grad) - 1)
        weight, *saved = ctx.saved_tensors
        needs_dgrad, needs_wgrad, needs_bias = ctx.needs_input_grad[:3]
        needs_dgrad = needs_dgrad or any(ctx.needs_input_grad[4:])
        x = ctx.rebuild(*saved[:own])
        if args.producer is not None:
            x = Remade(args, x, tuple(saved[own : own + made]), tuple(saved[own + made :]))
        if args.recipe is None:
            dx, dw, others = _backward_high_precision(dy, x, weight, args, needs_dgrad, needs_wgrad)
        else:
            dx, dw, others = _backward_fp8(dy, x, args, needs_dgrad, needs_wgrad, beside)
        db = deliver(ctx.bias, sum_rows(dy), args.step) if needs_bias else None
        return dx, dw, db, None, *_delivered(others, ctx)


def _delivered(grads: tuple[Tensor | Run | None, ...], ctx) -> tuple[Tensor | None, ...]:
    """Gradients of a producer's tensors for autograd. Those of parameters go where the weight's goes, on the way."""
    if not grads:
        return (None,) * len(ctx.others)
    delivered = []
    for grad, leaf, needed in zip(grads, ctx.others, ctx.needs_input_grad[4:], strict=True):
        if grad is not None and not isinstance(grad, Tensor):
            grad = deliver(leaf, grad, ctx.args.step) if needed and leaf is not None else grad(None, False)
        delivered.append(grad)
    return tuple(delivered)


def produce(x: Tensor, tensors: Tensors, args: LinearArgs, needs_wgrad: bool) -> tuple[Tensor | Quantized, Tensors]:
    """The producer's value, quantized where `Scaling.want` says how, and what is kept of its making."""
    colwise = needs_wgrad and not args.requantize_input and args.facts.needs["input"]["wgrad"] == "colwise"
    want = args.input_want(x.shape[0], True, colwise)
    if want is not None:
        want = want.measuring(x.device)
    value, made = args.producer.produce(x, tensors, want)
    if args.records and args.step.observer is not None and isinstance(value, Quantized):
        args.observe("input", value, lambda: args.producer.produce(x, tensors, None)[0])
    if want is not None:
        want.measured()
        made = (want.amax_out, *made) if want.keeps_amax else made
    return value, made if args.keep else ()


class Measured(NamedTuple):
    """An input that is kept in high precision and quantized again in backward, with its amax from forward."""

    value: Tensor
    amax: Tensor


@dataclass(eq=False, slots=True)
class Remade:
    """The input that a producer made, in backward. kept: of the value, in FP8; None: it is made again.

    made: what `produce` gave; tensors: the producer's other ones.
    """

    args: LinearArgs
    kept: QuantizedStorage | None
    made: Tensors
    tensors: Tensors

    def _again(self) -> tuple[Want | None, Tensors]:
        """How wgrad wants the value, with forward's amax, and what the producer kept."""
        orientation = self.args.needs("input")["wgrad"]
        rowwise, colwise = orientation == "rowwise", orientation == "colwise"
        want = self.args.input_want(self.made[0].shape[0], rowwise, colwise)
        if want is None or want.spec.tile.kind != "tensor":
            return want, self.made
        amax, made = (self.made[0], self.made[1:]) if want.keeps_amax else (None, self.made)
        amax = amax if want.scale is None else None
        return Want(want.quantizer, rowwise, colwise, amax, want.scale, groups=want.groups), made

    def again(self) -> Tensor | QuantizedStorage:
        """The value for wgrad, without a gradient."""
        if self.kept is not None:
            return self.kept
        want, made = self._again()
        return self._operand(self.args.producer.remake(made, self.tensors, want, self.args.dtype))

    def gradient(
        self, grad: Tensor, needs_value: bool, beside: Tensor | None = None
    ) -> tuple[Gradients, Tensor | QuantizedStorage | None]:
        """The producer's gradients, and the value for wgrad. beside: added to the gradient of its input."""
        args, remake = self.args, needs_value and self.kept is None
        again, made = self._again()
        want = args.grad_want and args.grad_want.measuring(grad.device)
        grads = args.producer.gradient(grad, made, self.tensors, want, (again or True) if remake else False, beside)
        if want is not None:
            want.measured()
        if isinstance(grads.x, Quantized):
            grads = grads._replace(x=QuantizedTensor(grads.x, grad.dtype))
            if args.step is not None and args.step.observer is not None:
                plain = args.producer.gradient(grad, made, self.tensors, None, False).x
                grads.x.observed_value = plain
        return grads, self._operand(grads.value) if remake else self.kept

    def _operand(self, value: Tensor | Quantized) -> Tensor | QuantizedStorage:
        return pick(value, self.args.needs("input")["wgrad"]) if isinstance(value, Quantized) else value


def to_save(kept: Tensor | Measured | QuantizedStorage | None) -> tuple[tuple[Tensor, ...], Callable]:
    """The tensors of what is kept, for autograd to hold, and how to put them together again (holding none)."""
    if kept is None:
        return (), lambda: None
    if isinstance(kept, Tensor):
        return (kept,), lambda x: x
    if isinstance(kept, Measured):
        return tuple(kept), Measured
    tile, scale, orientation = kept.tile, kept.scale, kept.orientation
    return (kept.data, kept.scale_inv), lambda data, scale_inv: QuantizedStorage(
        data, scale_inv, tile, scale, orientation
    )


def _early(bias: Tensor | None, args: LinearArgs) -> Tensor | None:
    """The bias, if this rank's product is the whole sum: then the GEMM adds it."""
    return None if bias is None or args.comm.sums_output else bias.to(args.dtype)


def _delivered_wgrad(args: LinearArgs, run: Run, held_bytes: int) -> Tensor | None:
    # The saved weight is another tensor than the parameter where saved-tensor hooks act, such as under recomputation.
    return deliver_wgrad(args.weight.param, Wgrad(run, held_bytes), args.step)


def _backward_high_precision(
    dy: Tensor, x: Tensor | None, weight: Tensor, args: LinearArgs, needs_dgrad: bool, needs_wgrad: bool
) -> tuple[Tensor | None, Tensor | None, tuple]:
    """dX, dW as autograd gets it, and nothing of a producer. The sum of dX travels while wgrad is computed."""
    comm, dx, dw, wait, weight = args.comm, None, None, None, weight.to(dy.dtype)
    if needs_dgrad and comm.gathers_grad_output_in_pieces(None):
        dx, dy = comm.dgrad_gathering(dy, lambda dy: dy @ weight)
    elif comm.gathers_grad_output:
        dy = comm.gather(dy)
    arriving = _arriving_input(lambda: x, args) if needs_wgrad else None
    if needs_dgrad and dx is None:
        wait = comm.post_dgrad(dy, lambda dy: dy @ weight)
    if needs_wgrad:
        dw = _delivered_wgrad(args, lambda out, adds: multiply_wgrad(dy, arriving(), out, adds), dy.nbytes + x.nbytes)
    return wait() if wait is not None else dx, dw, ()


def _arriving_input(kept: Callable[[], Operand], args: LinearArgs) -> Callable[[], Operand]:
    """The whole input for wgrad, when called. It travels from now on, behind dgrad; a task that waits gathers when it
    runs, so that it doesn't hold the other ranks' parts."""
    if not args.comm.gathers_input or (args.facts is not None and args.facts.gathers_first):
        return kept
    return (lambda: args.comm.gather(kept())) if args.defers else args.comm.post_gather(kept())


def _fprop_fp8(
    x: Tensor | Quantized, bias: Tensor | None, args: LinearArgs, needs_wgrad: bool
) -> tuple[Tensor, Tensor | Measured | QuantizedStorage | None]:
    """Y, and what to keep of x for wgrad: one orientation in FP8, or `x` itself where somebody keeps it anyway."""
    facts, comm = args.facts, args.comm
    kept_as, whole, amax = facts.needs["input"]["wgrad"], facts.gathers_first, None
    given = x.quantized if isinstance(x, QuantizedTensor) else x if isinstance(x, Quantized) else None
    requantize = (args.requantize_input or whole) and (given is None or args.producer is not None)
    if given is not None:
        quantized = given
    else:
        colwise = kept_as == "colwise" and needs_wgrad and not requantize
        source, scaling = comm.gather(x) if whole else x, facts.scalings["input", whole]
        if requantize and needs_wgrad and not whole and scaling.measures(args.step):
            amax = torch.empty(1, dtype=torch.float32, device=x.device)
        quantized = scaling.quantize(source, True, colwise, args.step, record=args.records, amax_out=amax)
    if facts.uses_history and args.records:
        of_weight = facts.scalings["weight", False]
        of_weight.history(args.step).record(of_weight.name, args.weight.amax(of_weight.scale(args.step)))
    w = args.weight_operand("fprop")
    early = _early(bias, args)
    if early is not None and comm.grid is not None:
        early = comm.grid.pad(early, 0)

    def multiply(x: QuantizedStorage) -> Tensor:
        return comm.output(gemm.fprop(x, w, early, args.dtype, args.backend, args.recipe.fast_accumulation))

    y = comm.fprop(quantized.rowwise, multiply, whole=whole)
    if requantize or not needs_wgrad:
        kept = x if amax is None else Measured(x, amax)
        return y, kept if args.producer is None else None
    kept = pick(quantized, kept_as)
    if kept is None:
        kept = args.recipe.quantizer("input").derive_colwise(quantized.rowwise)
    return y, kept


def _backward_fp8(
    dy: Tensor,
    x: Tensor | Measured | QuantizedStorage | Remade | None,
    args: LinearArgs,
    needs_dgrad: bool,
    needs_wgrad: bool,
    beside: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, tuple]:
    """dX, dW as autograd gets it, and gradients of a producer's tensors. dY is quantized once, in the orientations that
    the two GEMMs want. beside: added to a producer's dX.

    The sum of dX travels while wgrad is computed, unless what wgrad reads is made with the producer's gradient.
    """
    facts, comm = args.facts, args.comm
    wanted = facts.grad_wanted[needs_dgrad, needs_wgrad]
    if not wanted:
        return None, None, ()
    remade = x if isinstance(x, Remade) else None
    if remade is not None:
        there = comm.sums_grad_input and remade.kept is not None
        if comm.gathers_input or not needs_dgrad or there:  # it travels during dgrad, or is there already
            x = remade.again() if needs_wgrad else None
    dx, dw, others, wait = None, None, (), None
    w = args.weight_operand("dgrad") if needs_dgrad else None

    def multiply(dy: QuantizedStorage) -> Tensor:
        dx = gemm.dgrad(dy, w, args.dtype, args.backend)
        return comm.grad_input(dx).contiguous()  # attention's backward takes no gradient whose rows lie apart

    if needs_dgrad and facts.grad_in_pieces:
        dx, grad = dgrad_gathering(dy, args, wanted, multiply)
    else:
        grad = grad_output(dy, args, wanted)
    arriving = _arriving(x, args) if needs_wgrad and not isinstance(x, Remade) else None
    if needs_dgrad and dx is None:
        wait = comm.post_dgrad(grad.dgrad, multiply)
    # What is dropped here and below, wgrad shall not find in memory beside its own operands.
    for_wgrad, grad = grad.wgrad, None
    makes_again, early = needs_wgrad and arriving is None, arriving is not None and comm.sums_grad_input
    if early:
        dw = _wgrad_fp8(for_wgrad, arriving, args)
        arriving = for_wgrad = None
    if wait is not None:
        dx, wait = wait(), None
    if needs_dgrad and remade is not None:
        (dx, others, _), again = remade.gradient(dx, makes_again, beside)
        arriving = _arriving(again, args) if makes_again else arriving
    if needs_wgrad and not early:
        dw = _wgrad_fp8(for_wgrad, arriving, args)
    return dx, dw, others


def _wgrad_fp8(
    dy: QuantizedStorage, arriving: tuple[Callable[[], QuantizedStorage], int], args: LinearArgs
) -> Tensor | None:
    """Delivers dW, or leaves that to a task, which owns the FP8 operands of its GEMM and nothing else: the input is
    quantized before, where forward kept it in high precision."""
    load_x, held = arriving

    def wgrad(out: Tensor | None, adds: bool) -> Tensor:
        return gemm.wgrad(dy, load_x(), out, args.backend, adds)

    return _delivered_wgrad(args, wgrad, dy.nbytes + held if args.defers else 0)


def _arriving(x: Tensor | Measured | QuantizedStorage, args: LinearArgs) -> tuple[Callable[[], QuantizedStorage], int]:
    """The whole input for wgrad, when called, and the bytes that a task which waits holds of it."""
    kept = _kept_input(x, args) if args.defers else None
    load = (lambda: kept) if args.defers else (lambda: _kept_input(x, args))  # a task that waits must not hold `x`
    return _arriving_input(load, args), kept.nbytes if args.defers else 0


def _kept_input(x: Tensor | Measured | QuantizedStorage, args: LinearArgs) -> QuantizedStorage:
    """What forward kept, in the orientation that wgrad wants: of this rank's rows where they are gathered in FP8."""
    if isinstance(x, QuantizedStorage):
        return x
    orientation, whole, amax = args.facts.needs["input"]["wgrad"], args.facts.gathers_first, None
    if isinstance(x, Measured):
        x, amax = x
    scaling, wanted = args.facts.scalings["input", whole], (orientation == "rowwise", orientation == "colwise")
    source = args.comm.gather(x) if whole else x
    return pick(scaling.quantize(source, *wanted, args.step, record=False, amax=amax), orientation)
