"""dY in backward: quantized in the orientations that dgrad and wgrad want, and gathered under sequence parallelism.

    tensor tiles    one FP8 copy travels and serves both GEMMs
    others          dY travels in high precision, and the whole is quantized

Under 1D tiles two FP8 copies would be as many bytes. With several chunks what dgrad reads travels in pieces, each while
another is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from megafp8.fp8.linear_args import LinearArgs
from megafp8.fp8.storage import Quantized, QuantizedStorage
from megafp8.fp8.tensor import QuantizedTensor

Wanted = frozenset[str]
"""Orientations of dY that the GEMMs which run read."""

ROWWISE, COLWISE = frozenset({"rowwise"}), frozenset({"colwise"})


class GradOutput(NamedTuple):
    """The operands of dgrad and wgrad; None where nobody reads it any more."""

    dgrad: QuantizedStorage | None
    wgrad: QuantizedStorage | None


def pick(quantized: Quantized, orientation: str) -> QuantizedStorage:
    return quantized.rowwise if orientation == "rowwise" else quantized.colwise


def grad_output(dy: Tensor, args: LinearArgs, wanted: Wanted) -> GradOutput:
    """The whole dY `[M, N]` from this rank's rows of it."""
    if isinstance(dy, QuantizedTensor):  # by the producer whose gradient it is
        args.observe("grad_output", dy.quantized, lambda: getattr(dy, "observed_value", None))
        return _whole(dy.quantized, args)
    facts, comm = args.facts, args.comm
    if facts.grad_in_fp8:
        return _whole(_both_ways(comm.gather(_quantize_shard(dy, args)), wanted), args)
    source = comm.gather(dy) if comm.gathers_grad_output else dy
    return _whole(_quantize(source, args, wanted, whole=comm.gathers_grad_output), args)


def dgrad_gathering(
    dy: Tensor, args: LinearArgs, wanted: Wanted, multiply: Callable[[QuantizedStorage], Tensor]
) -> tuple[Tensor, GradOutput]:
    """dX, and dY for wgrad, from this rank's rows of dY. multiply: dX of some rows of the whole dY."""
    facts, comm = args.facts, args.comm
    if facts.grad_in_fp8:
        dx, row = comm.dgrad_gathering(_quantize_shard(dy, args), multiply)
        return dx, _whole(_both_ways(row, wanted), args)._replace(dgrad=None)

    def multiply_piece(dy: Tensor) -> Tensor:
        rowwise = facts.scalings["grad_output", True].quantize(dy, True, False, args.step, record=False).rowwise
        return multiply(rowwise)

    dx, whole = comm.dgrad_gathering(dy, multiply_piece)  # each piece is quantized for dgrad, and the whole for wgrad
    if "colwise" not in wanted:
        return dx, GradOutput(None, None)
    return dx, _whole(_quantize(whole, args, COLWISE, whole=True), args)


def _quantize_shard(dy: Tensor, args: LinearArgs) -> QuantizedStorage:
    return _quantize(dy, args, ROWWISE, whole=False).rowwise


def _quantize(dy: Tensor, args: LinearArgs, wanted: Wanted, *, whole: bool) -> Quantized:
    step = args.step
    record = step is not None and step.training  # a recomputed forward has the step's only backward
    scaling = args.facts.scalings["grad_output", whole]
    return scaling.quantize(dy, "rowwise" in wanted, "colwise" in wanted, step, record=record)


def _both_ways(row: QuantizedStorage, wanted: Wanted) -> Quantized:
    """Of tensor tiles, from the rowwise bytes."""
    return Quantized(row if "rowwise" in wanted else None, row.flipped() if "colwise" in wanted else None)


def _whole(quantized: Quantized, args: LinearArgs) -> GradOutput:
    needs = args.needs("grad_output")
    return GradOutput(pick(quantized, needs["dgrad"]), pick(quantized, needs["wgrad"]))
