"""FP8 primary weights of one flat buffer: what a step writes are bytes, quantized from this rank's shards of masters.

    phase A   masters, rounded to the compute dtype -> amaxes of this rank's pieces, all in one packed buffer
              one max all-reduce over the ranks that share the buffer
    phase B   scales of every weight on every rank -> bytes of this rank's pieces -> all-gather of bytes

The rounding comes first so that what is quantized is what a high-precision weight would be. Scales are never sent:
every rank makes them from the same amaxes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from megafp8.fp8.formats import Scale, reciprocal
from megafp8.fp8.param import Weight
from megafp8.fp8.primary import (
    PrimaryBytes,
    ScaleLayouts,
    orientations,
    piece_amax,
    quantize_piece,
    scale_shape,
)
from megafp8.optimizer.layout import ALIGNMENT, Bucket, Piece, Shard
from megafp8.parallel import Axis, Pending
from megafp8.step import ScalingHistory


class _Several:
    """Several collectives as one."""

    def __init__(self, pending: list[Pending]):
        self._pending = pending

    def wait(self) -> None:
        for pending in self._pending:
            pending.wait()


class FlatPrimary:
    """The FP8 primary weights of one flat buffer; from now on the parameters hold no values.

    axis: the ranks that share the buffer's buckets. scaling: delayed scaling's history, whose scales are used.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], shard: Shard, axis: Axis, scaling: ScalingHistory | None = None
    ):
        self.shard, self.scaling = shard, scaling
        self.axis = axis if shard.layout.shards > 1 else Axis()
        self.params = [params[slot.name] for slot in shard.layout.slots]
        self.weights: dict[str, Weight] = {slot.name: params[slot.name].owner for slot in shard.layout.slots}
        self.dtype = self.params[0].dtype
        quantizers = {weight.recipe.quantizer("weight") for weight in self.weights.values()}
        assert len(quantizers) == 1, "one recipe a buffer"
        self.quantizer = quantizers.pop()
        device = self.params[0].device
        self.flats = {
            orientation: torch.zeros(shard.layout.numel, dtype=torch.uint8, device=device)
            for orientation in orientations(self.quantizer)
        }
        for slot, param in zip(shard.layout.slots, self.params, strict=True):
            data = {
                orientation: flat[slot.start : slot.stop].view(self.quantizer.spec.format.dtype).view(param.shape)
                for orientation, flat in self.flats.items()
            }
            param.owner.hold_fp8_only(PrimaryBytes(self.quantizer, data))

        self._places = self._packed_places()
        self._cut = self._cut_weights(device)
        self._layouts = self._scale_layouts(device)
        self._kernels, self._tables = None, None
        self._copies: dict[str, Tensor] = {}

    def _packed_places(self) -> dict[tuple[str, str], tuple[int, tuple[int, ...]]]:
        """(name, orientation) -> where its amaxes begin in a packed buffer, and their shape. Aligned, as GEMMs want."""
        places, offset = {}, 0
        for orientation in self.flats:
            for name in self.weights:
                shape = scale_shape(self.quantizer, self._shape(name), orientation)
                places[name, orientation] = offset, shape
                offset += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        self._packed_size = offset
        return places

    def _cut_weights(self, device: torch.device) -> tuple[Tensor, Axis] | None:
        """Which weights have other parts on other ranks, and those ranks. On the device: no step may wait for it."""
        cut = [name for name, weight in self.weights.items() if weight.shared.size > 1]
        if self.quantizer.spec.tile.kind != "tensor" or not cut:
            return None
        places = torch.tensor([self._places[name, "rowwise"][0] for name in cut], device=device)
        return places, self.weights[cut[0]].shared

    def _scale_layouts(self, device: torch.device) -> ScaleLayouts | None:
        """How scales are moved for GEMMs; None where they are used as they lie in a packed buffer."""
        spec = self.quantizer.spec
        if spec.tile.kind != "2d" or spec.scale is Scale.E8M0:
            return None
        return ScaleLayouts({name: self._places[name, "rowwise"] for name in self.weights}, device)

    def hold_copy(self, name: str) -> None:
        """From the next write on the weight is there in the compute dtype as well, and its parameter shows that."""
        param = self.weights[name].param
        flat = torch.zeros(-(-param.numel() // 2) * 2, dtype=self.dtype, device=param.device)  # even, see post_gather
        param.data = flat[: param.numel()].view(param.shape)
        self._copies[name] = flat

    def drop_copy(self, name: str, owner: Weight) -> None:
        """The weight is there in FP8 only again. owner: of its parameter, from now on."""
        del self._copies[name]
        owner.hold_fp8_only(self.weights[name].primary)
        self.weights[name] = owner

    @torch.no_grad()
    def write_copies(self, masters: Tensor) -> None:
        """Rounds this rank's shards of the masters (flat) into the copies that are held, before `post_gather`."""
        for flat in self._copies.values():
            flat.zero_()
        for piece in self.shard.pieces if self._copies else ():
            if piece.name in self._copies:
                self._copies[piece.name][piece.start : piece.stop] = masters[piece.place].to(self.dtype)
        for name in self._copies:
            torch.autograd.graph.increment_version(self.weights[name].param)

    def tiles(self, name: str) -> dict[str, int]:
        """Where a weight's amaxes begin in a packed buffer; its rows, and its columns in chunks of 64."""
        rows, columns = self._shape(name)
        found = {"amax": self._places[name, "rowwise"][0], "columns": max(1, columns // ALIGNMENT), "rows": rows}
        return found | ({"column_amax": self._places[name, "colwise"][0]} if "colwise" in self.flats else {})

    @property
    def in_chunks(self) -> bool:
        """Whether every weight has whole chunks of 64 a row, as kernels want."""
        return all(self._shape(name)[1] % ALIGNMENT == 0 for name in self.weights)

    def whole_tiles(self) -> tuple[list[Piece], list[Piece]]:
        """This rank's pieces cut into rows of tiles that it holds whole, and what is left: tiles that ranks share."""
        whole, shared = [], []
        for piece in self.shard.pieces:
            rows, columns = self._shape(piece.name)
            step = columns * self.quantizer.spec.tile.block
            start = min(-(-piece.start // step) * step, piece.stop)
            stop = piece.stop if piece.stop == rows * columns else max(piece.stop // step * step, start)
            cuts = [piece.start, start, stop, piece.stop]
            parts = [
                Piece(piece.name, a, b, piece.local + a - piece.start) for a, b in zip(cuts, cuts[1:], strict=False)
            ]
            whole += [parts[1]] if start < stop else []
            shared += [part for part in parts[::2] if part.start < part.stop]
        return whole, shared

    def new_amaxes(self) -> Tensor:
        """A packed buffer of FP32 zeros."""
        return torch.zeros(self._packed_size, dtype=torch.float32, device=self.params[0].device)

    @torch.no_grad()
    def write(self, masters: Tensor) -> None:
        """Quantizes this rank's shards of the masters (flat) into the buffer, with the whole weights' scales."""
        packed = self.new_amaxes()
        self.take_amaxes(masters, packed, self.shard.pieces)
        self.write_bytes(masters, self.share_scales(packed), self.shard.pieces)

    def take_amaxes(self, masters: Tensor, packed: Tensor, pieces: Iterable[Piece]) -> None:
        """Raises the packed amaxes by those of pieces of the masters."""
        for piece in pieces:
            for orientation in self.flats:
                out = self._of(packed, piece.name, orientation)
                values = masters[piece.place].to(self.dtype)
                piece_amax(self.quantizer, values, piece.start, self._shape(piece.name), orientation, out)

    def share_scales(self, packed: Tensor, scales: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None) -> Tensor:
        """From the amaxes of this rank's pieces the scales of the weights, on all ranks; returns the multipliers.

        scales: what makes (multipliers, what is stored) of amaxes, instead of the quantizer's operations.
        """
        self.axis.max_(packed)
        if self._cut is not None:  # the maximum over the ranks that hold the weights' other parts
            index, shared = self._cut
            packed[index] = shared.max_(packed[index])
        multipliers, inverses = self._scales(packed, scales or self.quantizer.scales)
        arranged = None if self._layouts is None else self._layouts.arrange(inverses)
        for name, weight in self.weights.items():
            found = [{o: self._of(flat, name, o) for o in self.flats} for flat in (packed, inverses)]
            more = () if arranged is None else (partial(arranged, name),)
            weight.primary.set_scales(*found, self._history_scale(weight), *more)
        return multipliers

    def write_bytes(self, masters: Tensor, multipliers: Tensor, pieces: Iterable[Piece]) -> None:
        """Writes the bytes of pieces of the masters."""
        starts = {slot.name: slot.start for slot in self.shard.layout.slots}
        for piece in pieces:
            values, offset = masters[piece.place].to(self.dtype), starts[piece.name] + piece.start
            for orientation, flat in self.flats.items():
                quantize_piece(
                    self.quantizer.spec,
                    values,
                    piece.start,
                    self._shape(piece.name),
                    orientation,
                    self._of(multipliers, piece.name, orientation),
                    flat[offset : offset + values.numel()],
                )

    def _scales(self, packed: Tensor, of_amaxes: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Multipliers and what is stored, packed as the amaxes: of them, or of the history."""
        if all(self._history_scale(weight) is None for weight in self.weights.values()):  # as before the first step
            return of_amaxes(packed)
        multipliers = torch.ones_like(packed)
        for name, weight in self.weights.items():
            self._of(multipliers, name, "rowwise").copy_(self._history_scale(weight).view(1))
        return multipliers, reciprocal(multipliers)

    def post_gather(self, bucket: Bucket) -> Pending:
        """Starts to gather the other ranks' bytes of a bucket."""
        share = self.shard.layout.share(bucket, self.shard.rank)
        axis = self.axis if bucket.start < bucket.stop else Axis()
        flats = self.flats.values()
        posted = [axis.post_gather_into(f[bucket.start : bucket.stop], f[share]) for f in flats]
        for slot in self.shard.layout.slots if self._copies else ():
            if slot.name in self._copies and bucket.start <= slot.start < bucket.stop:
                # Of each element one rank has the bits and the others have zeros: an exact sum of whole numbers.
                posted.append(axis.post_sum_(self._copies[slot.name].view(torch.int32)))
        return _Several(posted)

    @property
    def nbytes(self) -> int:
        """Bytes and scales held."""
        scales = sum(s.nbytes for w in self.weights.values() for s in w.primary.scale_inv.values())
        return scales + sum(flat.nbytes for flat in self.flats.values())

    def _of(self, packed: Tensor, name: str, orientation: str) -> Tensor:
        offset, shape = self._places[name, orientation]
        return packed[offset : offset + math.prod(shape)].view(shape)

    def _shape(self, name: str) -> tuple[int, int]:
        return tuple(self.weights[name].param.shape)

    def _history_scale(self, weight: Weight) -> Tensor | None:
        return None if self.scaling is None else self.scaling.scale(weight.history_name)
