"""CommPlan: what a tensor-parallel linear exchanges with its peers, and how that overlaps with its GEMMs.

             column-parallel (qkv, fc1, LM head)       row-parallel (proj, fc2)
    weight   output features cut                       input features cut
    fprop    X whole, or gathered                      Y summed, or summed and scattered
    dgrad    dX summed, or summed and scattered        dY whole, or gathered
    wgrad    X whole, or gathered again                X local

The second forms are those of sequence parallelism, where each rank holds a part of the tokens outside of the linears.
X travels in FP8 both ways, so that what is kept for backward is the local shard only; sums travel in high precision.
dY has two FP8 copies under 1D tiles, as many bytes as in BF16: there it travels in BF16, once (`grad_output.py`).

In backward X travels again while dgrad is computed, and the sum of dX while wgrad is (`post_gather`, `post_dgrad`); not
where wgrad is deferred, nor X where it goes in high precision to be quantized as a whole.

With several chunks, one chunk's rows travel while another's are multiplied. Every row's product is the same, and wgrad,
which sums over rows, is never cut.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from megafp8.fp8.feature_grid import FeatureGrid
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.recipe import Recipe
from megafp8.fp8.shards import Operand, cut_rows, post_gather, post_gather_pieces, rows_of, travels_in_fp8
from megafp8.fp8.storage import QuantizedStorage
from megafp8.parallel import Axis

log = logging.getLogger(__name__)

Cut = Literal["rows", "features"]


@dataclass(frozen=True)
class CommPlan:
    """axis: the tensor-parallel ranks. kind: "column" or "row"; "alone" exchanges nothing.

    sequence_parallel: outside of the linear, X (column) and Y (row) are a part of the rows.
    chunks: pieces that fprop and dgrad are cut into for overlap.
    fp8_gather: False gathers in high precision and quantizes the whole: the same bytes, twice the traffic.
    grid: of the features that are cut (column: out, row: in), where the cut goes through FP8 tiles. Rowwise operands
        and FP8 products are padded then; wgrad, which has these features as its rows or columns, is not.
    sums: False leaves this rank's part of Y (row) and dX (column) as it is: the caller adds up the ranks'.
    """

    axis: Axis = field(default_factory=Axis)
    kind: Literal["alone", "column", "row"] = "alone"
    sequence_parallel: bool = False
    chunks: int = 1
    fp8_gather: bool = True
    grid: FeatureGrid | None = None
    sums: bool = True

    def __post_init__(self) -> None:
        assert self.kind == "alone" or self.axis.size > 1, self

    @property
    def gathers_input(self) -> bool:
        return self.kind == "column" and self.sequence_parallel

    @property
    def gathers_grad_output(self) -> bool:
        return self.kind == "row" and self.sequence_parallel

    @property
    def sums_output(self) -> bool:
        """Whether Y of one rank is only a part of the sum: then the bias is added afterwards."""
        return self.kind == "row" and self.sums

    @property
    def sums_grad_input(self) -> bool:
        """Whether dX of one rank is only a part of the sum."""
        return self.kind == "column" and self.sums

    @property
    def overlaps(self) -> bool:
        return self.chunks > 1

    def input_in_fp8(self, recipe: Recipe) -> bool:
        """Whether X is gathered as FP8 bytes, rather than in high precision and quantized after that."""
        if not self.gathers_input:
            return False
        able = travels_in_fp8(recipe.quantizer("input"))
        if not able:
            _say_high_precision(recipe.name)
        return able and self.fp8_gather

    def grad_output_in_fp8(self, quantizer: Quantizer) -> bool:
        """Whether dY is gathered as FP8 bytes: only where one copy serves both of its GEMMs."""
        return self.gathers_grad_output and quantizer.spec.tile.kind == "tensor" and self.fp8_gather

    def cut(self, role: str) -> Cut | None:
        """How the operand of a role lies over the ranks before any gather; None: each has the whole."""
        if self.kind == "alone":
            return None
        features = {"column": ("weight", "grad_output"), "row": ("weight", "input")}
        if role in features[self.kind]:
            return "features"
        return "rows" if self.sequence_parallel else None

    def output(self, y: Tensor) -> Tensor:
        """Y of an FP8 GEMM, without the padding of `grid`."""
        return self.grid.unpad(y, 1) if self.grid is not None and self.kind == "column" else y

    def grad_input(self, dx: Tensor) -> Tensor:
        """dX of an FP8 GEMM, without the padding of `grid`."""
        return self.grid.unpad(dx, 1) if self.grid is not None and self.kind == "row" else dx

    def gather(self, x: Operand) -> Operand:
        """The whole operand, of the ranks' rows in turn."""
        return post_gather(x, self.axis)()

    def post_gather(self, x: Operand) -> Callable[[], Operand]:
        """Starts `gather`; call the result to wait for it."""
        return post_gather(x, self.axis)

    def fprop(self, x: Operand, multiply: Callable[[Operand], Tensor], *, whole: bool = False) -> Tensor:
        """Y of the layer's output side, from this rank's X; `whole`: X has been gathered already."""
        if self.kind == "alone":
            return multiply(x)
        return self._exchange(x, multiply, gathers=self.gathers_input and not whole, sums=self.sums_output)()

    def post_dgrad(self, dy: Operand, multiply: Callable[[Operand], Tensor]) -> Callable[[], Tensor]:
        """Multiplies the whole dY and starts to sum; call the result to wait for dX of the layer's input side."""
        return self._exchange(dy, multiply, gathers=False, sums=self.sums_grad_input)

    def gathers_grad_output_in_pieces(self, quantizer: Quantizer | None) -> bool:
        """Whether `dgrad_gathering` may be used: pieces of dY must be quantized as the whole (None: not at all)."""
        if not (self.gathers_grad_output and self.overlaps):
            return False
        return quantizer is None or quantizer.spec.tile.kind == "1d" or self.grad_output_in_fp8(quantizer)

    def dgrad_gathering(self, dy: Operand, multiply: Callable[[Operand], Tensor]) -> tuple[Tensor, Operand]:
        """(dX, the whole dY) from this rank's dY: while a piece is multiplied, the next ones travel."""
        posted = list(post_gather_pieces(dy, _pieces(rows_of(dy), self.chunks), self.axis))
        pieces, products = [], []
        for wait in posted:
            pieces.append(wait())
            products.append(multiply(pieces[-1]))
        return _joined(products, self.axis.size), _joined_operand(pieces, self.axis.size)

    def _exchange(
        self, x: Operand, multiply: Callable[[Operand], Tensor], *, gathers: bool, sums: bool
    ) -> Callable[[], Tensor]:
        """The product of the whole `x`; sums, which have started when this returns, are there when it is called."""
        if not (gathers or sums):
            product = multiply(x)
            return lambda: product
        # A chunk takes the same rows of each rank, so that a gathered or scattered chunk is a piece of its shard.
        ranks = self.axis.size if gathers or self.sequence_parallel else 1
        pieces = _pieces(rows_of(x) if gathers else rows_of(x) // ranks, 1 if _square_tiles(x) else self.chunks)
        if not sums:
            whole = _joined([multiply(part) for part in self._gathered(x, pieces)], ranks)
            return lambda: whole
        parts = self._gathered(x, pieces) if gathers else iter(cut_rows(x, pieces, ranks))
        return self._post_sums(parts, pieces, multiply)

    def _gathered(self, x: Operand, pieces: list[slice]) -> Iterator[Operand]:
        """The pieces of the whole operand; while one is at work, the next one travels."""
        posted = post_gather_pieces(x, pieces, self.axis)
        wait = next(posted)
        for following in posted:
            yield wait()
            wait = following
        yield wait()

    def _post_sums(
        self, parts: Iterator[Operand], pieces: list[slice], multiply: Callable[[Operand], Tensor]
    ) -> Callable[[], Tensor]:
        """Sums over the ranks of the products of pieces; scattered ones arrive where they belong."""
        out, waits, products = None, [], []
        for part, piece in zip(parts, pieces, strict=True):
            product = multiply(part)
            if not self.sequence_parallel:
                waits.append(self._post_sum(product))
                continue
            products.append(product)  # not to be freed before it has left
            if out is None:
                out = product.new_empty(pieces[-1].stop, *product.shape[1:])
            waits.append(self.axis.post_scatter_sum_into(out[piece], product).wait)

        def wait() -> Tensor:
            sums = [wait() for wait in waits]
            products.clear()
            return out if self.sequence_parallel else _joined(sums, 1)

        return wait

    def _post_sum(self, y: Tensor) -> Callable[[], Tensor]:
        pending = self.axis.post_sum_(y)

        def wait() -> Tensor:
            pending.wait()
            return y

        return wait


ALONE = CommPlan()
"""The plan of a linear without peers."""


def _square_tiles(x: Operand) -> bool:
    return isinstance(x, QuantizedStorage) and x.tile.kind == "2d"


def _pieces(rows: int, chunks: int) -> list[slice]:
    """`rows` rows as at most `chunks` slices of nearly equal length."""
    chunks = max(1, min(chunks, rows))
    bounds = [rows * i // chunks for i in range(chunks + 1)]
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def _joined(parts: list[Tensor], ranks: int) -> Tensor:
    """Undoes `shards.cut_rows`."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.view(ranks, -1, part.shape[1]) for part in parts], 1).flatten(0, 1)


def _joined_operand(parts: list[Operand], ranks: int) -> Operand:
    """`_joined` for tensors and tensorwise storage."""
    if isinstance(parts[0], Tensor):
        return _joined(parts, ranks)
    assert parts[0].tile.kind == "tensor", parts[0].tile
    data = _joined([part.data.view(torch.uint8) for part in parts], ranks)
    return replace(parts[0], data=data.view(parts[0].data.dtype))


@cache
def _say_high_precision(recipe: str) -> None:
    log.warning(
        "tensor-parallel inputs of recipe '%s' with these tiles and scales are gathered in high precision", recipe
    )
