"""dY in backward: quantized in the orientations that dgrad and wgrad want, and gathered under sequence parallelism.

    tensor tiles                     one FP8 copy travels and serves both GEMMs
    1D tiles, power-of-two scales    rowwise bytes travel first; colwise ones, of wgrad, while dgrad is computed
    others                           dY travels in high precision, and the whole is quantized

With several chunks what dgrad reads travels in pieces, each while another is multiplied.
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


class GradOutput(NamedTuple):
    """dgrad: its operand, None if dgrad doesn't run or has run. wgrad: gives its operand when called. held: bytes that
    a task which calls that later holds until then."""

    dgrad: QuantizedStorage | None
    wgrad: Callable[[], QuantizedStorage]
    held: int


def pick(quantized: Quantized, orientation: str) -> QuantizedStorage:
    return quantized.rowwise if orientation == "rowwise" else quantized.colwise


def grad_output(dy: Tensor, args: LinearArgs, wanted: Wanted) -> GradOutput:
    """The whole dY `[M, N]` from this rank's rows of it."""
    if isinstance(dy, QuantizedTensor):  # by the producer whose gradient it is
        args.observe("grad_output", dy.quantized, lambda: getattr(dy, "observed_value", None))
        return _whole(dy.quantized, args)
    facts, comm = args.facts, args.comm
    if not facts.grad_in_fp8:
        source = comm.gather(dy) if comm.gathers_grad_output else dy
        return _whole(_quantize(source, args, wanted, whole=comm.gathers_grad_output), args)
    shard = _quantize_shard(dy, args, wanted)
    if _one_copy(args):
        return _whole(_both_ways(comm.gather(shard.rowwise), wanted), args)
    rows = comm.post_gather(shard.rowwise) if "rowwise" in wanted else None
    columns, held = _post_columns(shard.colwise, args)
    return GradOutput(rows() if rows is not None else None, columns, held)


def dgrad_gathering(
    dy: Tensor, args: LinearArgs, wanted: Wanted, multiply: Callable[[QuantizedStorage], Tensor]
) -> tuple[Tensor, GradOutput]:
    """dX, and dY for wgrad, from this rank's rows of dY. multiply: dX of some rows of the whole dY."""
    facts, comm = args.facts, args.comm
    if not facts.grad_in_fp8:  # each piece is quantized for dgrad, and the whole for wgrad

        def multiply_piece(dy: Tensor) -> Tensor:
            rowwise = facts.scalings["grad_output", True].quantize(dy, True, False, args.step, record=False).rowwise
            return multiply(rowwise)

        dx, pieces = comm.dgrad_of_pieces(comm.post_pieces(dy), multiply_piece)
        if "colwise" not in wanted:
            return dx, _none()
        return dx, _whole(_quantize(comm.joined(pieces), args, frozenset({"colwise"}), whole=True), args)
    shard = _quantize_shard(dy, args, wanted)
    posted = comm.post_pieces(shard.rowwise)
    if _one_copy(args):
        dx, pieces = comm.dgrad_of_pieces(posted, multiply)
        return dx, _whole(_both_ways(comm.joined(pieces), wanted), args)
    columns, held = _post_columns(shard.colwise, args)
    return comm.dgrad_of_pieces(posted, multiply)[0], GradOutput(None, columns, held)


def _one_copy(args: LinearArgs) -> bool:
    """Whether the same bytes serve both GEMMs."""
    return args.recipe.quantizer("grad_output").spec.tile.kind == "tensor"


def _quantize_shard(dy: Tensor, args: LinearArgs, wanted: Wanted) -> Quantized:
    return _quantize(dy, args, frozenset({"rowwise"}) if _one_copy(args) else wanted, whole=False)


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
    mine = pick(quantized, needs["wgrad"])
    return GradOutput(pick(quantized, needs["dgrad"]), lambda: mine, 0 if mine is None else mine.nbytes)


def _none() -> GradOutput:
    return GradOutput(None, lambda: None, 0)


def _post_columns(shard: QuantizedStorage | None, args: LinearArgs) -> tuple[Callable[[], QuantizedStorage], int]:
    """The whole colwise dY, when called, and what a task that waits for its turn holds of it: it gathers when it runs.
    Otherwise it travels from now on, behind dgrad."""
    if shard is None:
        return lambda: None, 0
    if args.defers:
        return lambda: args.comm.gather(shard), shard.nbytes
    return args.comm.post_gather(shard), 0
