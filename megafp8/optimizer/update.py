"""The update of one buffer: gradients in, masters, moments and weights out. One kernel launch on a GPU, else PyTorch.

Both give the same bits. A kernel writes the new weights, or takes the amaxes of FP8 primary ones, on its way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from megafp8.optimizer import codecs
from megafp8.optimizer.adamw import CPU_CHUNK, DEVICE_CHUNK, StepScalars, adamw
from megafp8.optimizer.layout import ALIGNMENT, Piece, Shard
from megafp8.optimizer.primary import FlatPrimary
from megafp8.optimizer.stored import Stored
from megafp8.optimizer.weights import FlatWeights


@cache
def kernels() -> ModuleType | None:
    """The GPU kernels; None where Triton is not installed."""
    try:
        from megafp8.kernels import adamw as module
    except ImportError:
        return None
    return module


class BufferUpdate:
    """Updates this rank's shard of one buffer.

    groups: name -> row of `StepScalars.rates`. keys: name -> of its random bits. master: FP32, or int16 remainders.
    """

    def __init__(
        self,
        shard: Shard,
        groups: Mapping[str, int],
        keys: Mapping[str, int],
        master: Tensor,
        exp_avg: Stored,
        exp_avg_sq: Stored,
        weights: FlatWeights | FlatPrimary,
        *,
        fused: bool = True,
    ):
        """fused: with kernels, where there are any."""
        self.shard, self.groups, self.keys = shard, groups, keys
        self.master, self.exp_avg, self.exp_avg_sq, self.weights = master, exp_avg, exp_avg_sq, weights
        self._starts = {slot.name: slot.start for slot in shard.layout.slots}
        self._launches = None
        module = kernels() if fused and master.is_cuda else None
        if module is not None:
            self.use_kernels(module)

    def use_kernels(self, module: ModuleType) -> None:
        """From now on it runs `module`'s kernels."""
        self._launches = Launches(self, module)

    def __call__(self, grad: Tensor, scalars: StepScalars, *, beta1: float, beta2: float, eps: float) -> None:
        """grad: FP32 sums, the whole buffer, of which this rank's shards are read. The weights of its shards follow."""
        constants = {"beta1": beta1, "beta2": beta2, "eps": eps}
        if self._launches is not None:
            self._launches.run(grad, scalars, constants)
        else:
            self._reference(grad, scalars, constants)
            self.write_weights()

    def write_weights(self) -> None:
        """Writes this rank's shards of the weights from its masters; upper halves of masters are weights already."""
        if self.master.dtype == torch.float32:
            self.weights.write(self.master)
        else:
            self.weights.announce()

    def _reference(self, grad: Tensor, scalars: StepScalars, constants: dict[str, float]) -> None:
        for piece, offset, size in self._parts():
            here, there = slice(piece.local + offset, piece.local + offset + size), self._starts[piece.name]
            there = slice(there + piece.start + offset, there + piece.start + offset + size)
            moments = self.exp_avg.part(here), self.exp_avg_sq.part(here)
            old = self._read_master(here, there)
            new, *new_moments = adamw(
                old, *(m.read() for m in moments), grad[there], scalars, self.groups[piece.name], **constants
            )
            # A skipped step's values may be NaN: they are computed and dropped, so that the host needn't know.
            self._write_master(torch.where(scalars.skip, old, new), here, there)
            random = [None, None]
            if any(m.values.dtype != torch.float32 for m in moments):
                index = torch.arange(size, device=grad.device) + piece.start + offset
                words = codecs.random_words(index, self.keys[piece.name], scalars.step)
                random = [words & 0xFFFF, words >> 16]
            for moment, values, bits in zip(moments, new_moments, random, strict=True):
                moment.write(values, bits, scalars.skip)

    def _parts(self) -> Iterator[tuple[Piece, int, int]]:
        """(piece, offset in it, elements), gaps of alignment included, which stay zero."""
        chunk = DEVICE_CHUNK if self.master.is_cuda else CPU_CHUNK
        for piece in self.shard.pieces:
            total = _round_up(piece.stop - piece.start)
            for offset in range(0, total, chunk):
                yield piece, offset, min(chunk, total - offset)

    def _read_master(self, here: slice, there: slice) -> Tensor:
        stored = self.master[here]
        return stored if stored.dtype == torch.float32 else codecs.join_master(self.weights.flat[there], stored)

    def _write_master(self, values: Tensor, here: slice, there: slice) -> None:
        if self.master.dtype == torch.float32:
            self.master[here] = values
        else:
            self.weights.flat[there], self.master[here] = codecs.split_master(values)


class Launches:
    """The kernels of one buffer's update, and their tables on the device."""

    def __init__(self, update: BufferUpdate, module: ModuleType):
        self.update, self.module = update, module
        weights, device = update.weights, update.master.device
        self.primary = weights if isinstance(weights, FlatPrimary) else None
        self.shared: list[Piece] = list(update.shard.pieces)
        whole: list[Piece] = []
        if self.primary is not None:
            self.spec = self.primary.quantizer.spec
            if module.knows_tiles(self.spec) and self.primary.in_chunks:
                whole, self.shared = self.primary.whole_tiles()
        self.tiles = module.Tables.of_tiles(self._rows(whole), self.spec, device) if whole else None
        stored = (update.exp_avg, update.exp_avg_sq)
        self.moments = [moment.tensors for moment in stored]
        fp8 = any(moment.amax is not None for moment in stored)
        self.decoding = codecs.decoding_table(device) if fp8 else None
        launch = module.FP8_MOMENTS if fp8 else module.DEFAULT
        self.flat = module.Tables.of(self._rows(self.shared), device, launch) if self.shared else None

    def run(self, grad: Tensor, scalars: StepScalars, constants: dict[str, float]) -> None:
        """As `BufferUpdate.__call__`."""
        master, module = self.update.master, self.module
        device_scalars = module.Scalars(
            scalars.grad_scale, scalars.correction2, scalars.step, scalars.skip.view(torch.uint8), scalars.rates
        )
        rest = (*self.moments, grad, device_scalars)
        options = {"decoding": self.decoding, **constants}
        if self.primary is None:
            if self.flat is not None:
                module.adamw(self.flat, master, self.update.weights.flat, *rest, **options)
            self.update.weights.announce()
            return
        amax, options["dtype"] = self.primary.new_amaxes(), self.primary.dtype
        if self.tiles is not None:
            module.adamw_tiles(self.tiles, master, *rest, self.primary.flats, amax, self.spec, **options)
        if self.flat is not None:
            self._update_shared(master, rest, amax, options)
        multipliers = self.primary.share_scales(amax, lambda packed: module.scales(packed, self.spec))
        if self.flat is not None:
            self._write_shared(master, multipliers)

    @property
    def _in_chunks(self) -> bool:
        """Whether kernels take the amaxes of tiles that ranks share."""
        return self.spec.tile.kind == "tensor" or (self.spec.tile.kind == "2d" and self.primary.in_chunks)

    def _update_shared(self, master: Tensor, rest: tuple, amax: Tensor, options: dict) -> None:
        if self._in_chunks:
            self.module.adamw(self.flat, master, None, *rest, **options, amax=amax, block=self.spec.tile.block)
        else:
            self.module.adamw(self.flat, master, None, *rest, **options)
            self.primary.take_amaxes(master, amax, self.shared)

    def _write_shared(self, master: Tensor, multipliers: Tensor) -> None:
        if not self._in_chunks:
            self.primary.write_bytes(master, multipliers, self.shared)
            return
        self.module.cast(
            self.flat,
            master,
            self.primary.flats["rowwise"],
            multipliers,
            fmax=self.spec.format.fmax,
            block=self.spec.tile.block,
            dtype=self.primary.dtype,
        )

    def _rows(self, pieces: Iterable[Piece]) -> Iterator[tuple]:
        starts = {slot.name: slot.start for slot in self.update.shard.layout.slots}
        for piece in pieces:
            places = (piece.local, starts[piece.name] + piece.start, _round_up(piece.stop - piece.start), piece.start)
            yield self.module.PieceRow(
                *(place // ALIGNMENT for place in places),
                group=self.update.groups[piece.name],
                key=self.update.keys[piece.name],
                **self.update.weights.tiles(piece.name),
            )


def _round_up(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
