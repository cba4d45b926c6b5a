"""What a tensor-parallel linear sends in one microbatch: operands, sums, and the scales that ranks share.

The counterpart of `fp8.comm`, `fp8.linear_function` and `fp8.input_spec`, message for message. T tokens of a
microbatch, t of them here under sequence parallelism, e bytes of the compute dtype, W = [N, K]:

                 column-parallel                       row-parallel
    forward      gather  t K (1 + scales) or t K e     sum or scatter_sum  T N e
    backward     sum or scatter_sum  T K e             gather  t N (tensor tiles: FP8) or t N e
                 gather  t K (1 + scales) or t K e

Tensorwise scales of what ranks have parts of are of 4 bytes, a message each; backward has forward's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megafp8.fp8.feature_grid import FeatureGrid
from megafp8.fp8.formats import Scale
from megafp8.fp8.quantizer import Quantizer
from megafp8.fp8.recipe import Recipe
from megafp8.fp8.shards import RowTiles, travels_in_fp8
from megafp8.parallel import Axis
from megafp8.plan.traffic import Group, Passes

AMAX = 4
"""Bytes of one amax, FP32."""


@dataclass(frozen=True)
class LinearTraffic:
    """name: within the layer. kind: "column" or "row". tokens: T. features_in, features_out: global K and N; parts:
    stacked parts of the output features that are cut alike. element: e.

    sequence_parallel, chunks, sums: as in `fp8.comm.CommPlan`. requantizes: backward quantizes the input again.
    """

    name: str
    kind: str
    group: Group
    tokens: int
    features_in: int
    features_out: int
    recipe: Recipe | None
    element: int
    sequence_parallel: bool = False
    chunks: int = 1
    parts: int = 1
    sums: bool = True
    requantizes: bool = False

    @property
    def local(self) -> int:
        return self.tokens // self.group.size if self.sequence_parallel else self.tokens

    @property
    def grid(self) -> FeatureGrid | None:
        """Of the features that are cut, where the cut goes through tiles."""
        block = self.recipe.quantizer("weight").spec.tile.block if self.recipe is not None else 0
        if not block or self.group.size == 1:
            return None
        size = self.features_out // self.parts if self.kind == "column" else self.features_in
        grid = FeatureGrid(self.parts if self.kind == "column" else 1, size, Axis(self.group.size), block)
        return None if grid.aligned else grid

    def passes(self) -> Passes:
        found = Passes()
        if self.group.size > 1:
            if self.kind == "column":
                self._column(found)
            else:
                self._row(found)
        return found

    def weight_passes(self) -> Passes:
        """Once a step, where tiles of the weight are shared: their amaxes, when its FP8 copies are made."""
        found, grid = Passes(), self.grid
        if grid is not None:
            other = self.features_in if self.kind == "column" else self.features_out
            size = shared_tiles(grid) * -(-other // grid.block) * AMAX
            found.add("forward", "max", self.group, f"{self.name} shared tiles", size)
        return found

    def _column(self, found: Passes) -> None:
        gathers, forward = self.sequence_parallel, "forward"
        in_fp8 = self.recipe is not None and travels_in_fp8(self.recipe.quantizer("input"))
        high = self.local * self.features_in * self.element
        if gathers and in_fp8:
            self._share_rows(found, forward, "input", colwise=not self.requantizes)
            self._gather_rowwise(found)
            if self.requantizes and not self._tensor("input"):
                self._share_rows(found, "backward", "input", colwise=True)
            self._gather_colwise(found)
        elif gathers:
            pieces = self._pieces(self.local, "input") if self.recipe is None else 1
            found.add(forward, "gather", self.group, f"{self.name} input", high, pieces)
            found.add("backward", "gather", self.group, f"{self.name} input", high)
        self._share_features(found, "backward", "grad_output")
        if self.sums:
            self._sum(found, "backward", "grad_input", self.features_in, "grad_output")

    def _row(self, found: Passes) -> None:
        self._share_features(found, "forward", "input")
        if self.sums:
            self._sum(found, "forward", "output", self.features_out, "input")
        if not self.sequence_parallel:
            return
        size, name = self.local * self.features_out, f"{self.name} grad_output"
        if self._tensor("grad_output"):
            self._share_rows(found, "backward", "grad_output", colwise=False)
            found.add("backward", "gather", self.group, name, size, self._pieces(self.local, "grad_output"))
        else:
            kind = None if self.recipe is None else self.recipe.quantizer("grad_output").spec.tile.kind
            pieces = self._pieces(self.local, "grad_output") if kind in (None, "1d") else 1
            found.add("backward", "gather", self.group, name, size * self.element, pieces)

    def _sum(self, found: Passes, where: str, what: str, features: int, role: str) -> None:
        """Of this rank's part of a product of all tokens, whose left operand has a role."""
        kind, size = "scatter_sum" if self.sequence_parallel else "sum", self.tokens * features * self.element
        found.add(where, kind, self.group, f"{self.name} {what}", size, self._pieces(self.local, role))

    def _pieces(self, rows: int, role: str) -> int:
        """Messages that so many rows go in."""
        square = self.recipe is not None and self.recipe.quantizer(role).spec.tile.kind == "2d"
        return 1 if square else max(1, min(self.chunks, rows))

    def _tensor(self, role: str) -> bool:
        return self.recipe is not None and self.recipe.quantizer(role).spec.tile.kind == "tensor"

    def _share_features(self, found: Passes, where: str, role: str) -> None:
        """Amaxes of an operand whose features are cut: the tensor's, or those of tiles that ranks share."""
        if self.recipe is None:
            return
        name, rows = f"{self.name} {role} amax", self.tokens
        if self._tensor(role) and not self.recipe.uses_history:
            found.add(where, "max", self.group, name, AMAX)
        elif self.grid is not None:
            found.add(where, "max", self.group, name, shared_tiles(self.grid) * rows * AMAX)

    def _share_rows(self, found: Passes, where: str, role: str, *, colwise: bool) -> None:
        """Amaxes of an operand whose rows are cut."""
        name = f"{self.name} {role} amax"
        if self._tensor(role):
            if not self.recipe.uses_history:
                found.add(where, "max", self.group, name, AMAX)
            return
        tiles = self._row_tiles(role)
        if colwise and not tiles.aligned:
            owners = [tile for rank in range(tiles.axis.size) for tile in tiles.touched(rank)]
            shared = len({tile for tile in owners if owners.count(tile) > 1})
            found.add(where, "max", self.group, name, shared * self.features_in * AMAX)

    def _row_tiles(self, role: str) -> RowTiles:
        return RowTiles(self.local, self.recipe.quantizer(role).spec.tile.block, Axis(self.group.size))

    def _gather_rowwise(self, found: Passes) -> None:
        quantizer, pieces = self.recipe.quantizer("input"), self._pieces(self.local, "input")
        size = self.local * self.features_in
        if not self._tensor("input"):  # all scales travel with the first piece
            scales = quantizer.spec.tile.scale_shape(self.local, self.features_in)
            size += scales[0] * scales[1] * scale_bytes(quantizer)
        found.add("forward", "gather", self.group, f"{self.name} input", size, pieces)

    def _gather_colwise(self, found: Passes) -> None:
        size = self.local * self.features_in
        if not self._tensor("input"):
            quantizer = self.recipe.quantizer("input")
            size += self._row_tiles("input").most * self.features_in * scale_bytes(quantizer)
        found.add("backward", "gather", self.group, f"{self.name} input", size)


def scale_bytes(quantizer: Quantizer) -> int:
    """Bytes of one scale."""
    return 1 if quantizer.spec.scale is Scale.E8M0 else 4


def shared_tiles(grid: FeatureGrid) -> int:
    """Tiles that several ranks, or several parts, have features of."""
    everyone = [number for rank in range(grid.axis.size) for number in grid.tiles(rank)]
    return len({number for number in everyone if everyone.count(number) > 1})


def as_expert(linear: LinearTraffic, rows: int) -> LinearTraffic:
    """The linear of one expert, which sees `rows` rows; its outputs are summed elsewhere."""
    return replace(linear, tokens=rows, sequence_parallel=False, chunks=1, sums=False)
