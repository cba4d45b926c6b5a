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

import torch
from torch import Tensor, nn

from megafp8.fp8.param import Weight
from megafp8.fp8.primary import PrimaryBytes, orientations, piece_amax, quantize_piece, scale_shape
from megafp8.optimizer.layout import Bucket, Piece, Shard
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

        self._cut = self._cut_weights(device)

    def _cut_weights(self, device: torch.device) -> tuple[Tensor, Axis] | None:
        """Which weights have other parts on other ranks, and those ranks. On the device: no step may wait for it."""
        cut = [i for i, weight in enumerate(self.weights.values()) if weight.shared.size > 1]
        if self.quantizer.spec.tile.kind != "tensor" or not cut:
            return None
        return torch.tensor(cut, device=device), list(self.weights.values())[cut[0]].shared

    @torch.no_grad()
    def write(self, masters: Tensor) -> None:
        """Quantizes this rank's shards of the masters (flat) into the buffer, with the whole weights' scales."""
        amaxes = self._amaxes(masters)
        multipliers = {
            name: weight.primary.set_scales(amaxes[name], self._scale(weight)) for name, weight in self.weights.items()
        }
        for piece, values, offset in self._pieces(masters):
            for orientation, flat in self.flats.items():
                quantize_piece(
                    self.quantizer.spec,
                    values,
                    piece.start,
                    self._shape(piece.name),
                    orientation,
                    multipliers[piece.name][orientation],
                    flat[offset : offset + values.numel()],
                )

    def post_gather(self, bucket: Bucket) -> Pending:
        """Starts to gather the other ranks' bytes of a bucket."""
        share = self.shard.layout.share(bucket, self.shard.rank)
        axis = self.axis if bucket.start < bucket.stop else Axis()
        flats = self.flats.values()
        return _Several([axis.post_gather_into(f[bucket.start : bucket.stop], f[share]) for f in flats])

    @property
    def nbytes(self) -> int:
        """Bytes and scales held."""
        scales = sum(s.nbytes for w in self.weights.values() for s in w.primary.scale_inv.values())
        return scales + sum(flat.nbytes for flat in self.flats.values())

    def _amaxes(self, masters: Tensor) -> dict[str, dict[str, Tensor]]:
        """Name -> orientation -> amaxes of the whole weight, views of one packed buffer."""
        shapes = {
            (name, orientation): scale_shape(self.quantizer, self._shape(name), orientation)
            for name in self.weights
            for orientation in self.flats
        }
        sizes = [math.prod(shape) for shape in shapes.values()]
        packed = torch.zeros(sum(sizes), dtype=torch.float32, device=masters.device)
        amaxes: dict[str, dict[str, Tensor]] = {name: {} for name in self.weights}
        for ((name, orientation), shape), part in zip(shapes.items(), packed.split(sizes), strict=True):
            amaxes[name][orientation] = part.view(shape)
        for piece, values, _ in self._pieces(masters):
            for orientation, out in amaxes[piece.name].items():
                piece_amax(self.quantizer, values, piece.start, self._shape(piece.name), orientation, out)
        self.axis.max_(packed)
        self._share(packed)
        return amaxes

    def _share(self, packed: Tensor) -> None:
        """Under tensor tiles: the maximum over the ranks that hold the weights' other parts."""
        if self._cut is not None:
            index, shared = self._cut
            packed[index] = shared.max_(packed[index])

    def _pieces(self, masters: Tensor) -> Iterator[tuple[Piece, Tensor, int]]:
        """(piece, its values rounded to the compute dtype, its offset in the buffer)."""
        starts = {slot.name: slot.start for slot in self.shard.layout.slots}
        for piece in self.shard.pieces:
            yield piece, masters[piece.place].to(self.dtype), starts[piece.name] + piece.start

    def _shape(self, name: str) -> tuple[int, int]:
        return tuple(self.weights[name].param.shape)

    def _scale(self, weight: Weight) -> Tensor | None:
        return None if self.scaling is None else self.scaling.scale(weight.history_name)
