"""FP8 primary weights of one flat buffer: what a step writes are bytes, quantized from this rank's shards of masters.

    phase A   masters, rounded to the compute dtype -> amaxes of this rank's pieces, all in one packed buffer
              one max all-reduce over the ranks that share the buffer
    phase B   scales of every weight on every rank -> bytes of this rank's pieces -> all-gather of bytes

The rounding comes first so that what is quantized is what a high-precision weight would be. Scales are never sent:
every rank makes them from the same amaxes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import ModuleType

import torch
from torch import Tensor, nn

from megafp8.fp8.formats import reciprocal
from megafp8.fp8.param import Weight
from megafp8.fp8.primary import PrimaryBytes, orientations, piece_amax, quantize_piece, scale_shape
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

    def hold_copy(self, name: str) -> None:
        """From the next `write` on the weight is there in the compute dtype as well, and its parameter shows that."""
        param = self.weights[name].param
        flat = torch.zeros(-(-param.numel() // 2) * 2, dtype=self.dtype, device=param.device)  # even, see post_gather
        param.data = flat[: param.numel()].view(param.shape)
        self._copies[name] = flat

    def drop_copy(self, name: str, owner: Weight) -> None:
        """The weight is there in FP8 only again. owner: of its parameter, from now on."""
        del self._copies[name]
        owner.hold_fp8_only(self.weights[name].primary)
        self.weights[name] = owner

    def _write_copies(self, masters: Tensor) -> None:
        for flat in self._copies.values():
            flat.zero_()
        for piece, values, _ in self._pieces(masters) if self._copies else ():
            if piece.name in self._copies:
                self._copies[piece.name][piece.start : piece.start + values.numel()] = values
        for name in self._copies:
            torch.autograd.graph.increment_version(self.weights[name].param)

    def use_kernels(self, kernels: ModuleType, tables: object) -> None:
        """From now on bytes are written, and amaxes may be taken, by GPU kernels, where they know the tiles."""
        tile = self.quantizer.spec.tile
        whole = all(self._shape(name)[1] % ALIGNMENT == 0 for name in self.weights)
        if tile.kind == "tensor" or (tile.kind == "2d" and tile.block in (16, 32, 64, 128) and whole):
            self._kernels, self._tables = kernels, tables

    def tiles(self, name: str) -> dict[str, int]:
        """Where a weight's amaxes begin in a packed buffer, and its columns in chunks of 64."""
        return {"amax": self._places[name, "rowwise"][0], "columns": max(1, self._shape(name)[1] // ALIGNMENT)}

    def amaxes_in_kernel(self) -> dict[str, object]:
        """Arguments of the update's kernel that let it take amaxes, if it can; then call `finish` with them."""
        if self._kernels is None:
            return {}
        return {"amax": self._new_amaxes(), "block": self.quantizer.spec.tile.block, "dtype": self.dtype}

    @torch.no_grad()
    def write(self, masters: Tensor) -> None:
        """Quantizes this rank's shards of the masters (flat) into the buffer, with the whole weights' scales."""
        packed = self._new_amaxes()
        for piece, values, _ in self._pieces(masters):
            for orientation in self.flats:
                out = self._of(packed, piece.name, orientation)
                piece_amax(self.quantizer, values, piece.start, self._shape(piece.name), orientation, out)
        self.finish(masters, packed)

    @torch.no_grad()
    def finish(self, masters: Tensor, packed: Tensor) -> None:
        """packed: the amaxes of this rank's pieces."""
        self._write_copies(masters)
        self.axis.max_(packed)
        if self._cut is not None:  # the maximum over the ranks that hold the weights' other parts
            index, shared = self._cut
            packed[index] = shared.max_(packed[index])
        multipliers, inverses = self._scales(packed)
        for name, weight in self.weights.items():
            found = [{o: self._of(flat, name, o) for o in self.flats} for flat in (packed, inverses)]
            weight.primary.set_scales(*found, self._history_scale(weight))
        if self._kernels is not None:
            self._kernels.cast(
                self._tables,
                masters,
                self.flats["rowwise"],
                multipliers,
                fmax=self.quantizer.spec.format.fmax,
                block=self.quantizer.spec.tile.block,
                dtype=self.dtype,
            )
            return
        for piece, values, offset in self._pieces(masters):
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

    def _scales(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Multipliers and what is stored, packed as the amaxes: of them, or of the history."""
        if all(self._history_scale(weight) is None for weight in self.weights.values()):  # as before the first step
            return self.quantizer.scales(packed)
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

    def _new_amaxes(self) -> Tensor:
        return torch.zeros(self._packed_size, dtype=torch.float32, device=self.params[0].device)

    def _of(self, packed: Tensor, name: str, orientation: str) -> Tensor:
        offset, shape = self._places[name, orientation]
        return packed[offset : offset + math.prod(shape)].view(shape)

    def _pieces(self, masters: Tensor) -> Iterator[tuple[Piece, Tensor, int]]:
        """(piece, its values rounded to the compute dtype, its offset in the buffer)."""
        starts = {slot.name: slot.start for slot in self.shard.layout.slots}
        for piece in self.shard.pieces:
            yield piece, masters[piece.place].to(self.dtype), starts[piece.name] + piece.start

    def _shape(self, name: str) -> tuple[int, int]:
        return tuple(self.weights[name].param.shape)

    def _history_scale(self, weight: Weight) -> Tensor | None:
        return None if self.scaling is None else self.scaling.scale(weight.history_name)
