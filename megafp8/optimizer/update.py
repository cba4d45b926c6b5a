"""The update of one buffer: gradients in, masters, moments and weights out. One kernel launch on a GPU, else PyTorch.

Both give the same bits. A kernel writes the new weights, or takes the amaxes of FP8 primary ones, on its way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
        self._kernels = kernels() if fused and master.is_cuda else None
        self._tables = self._decoding = None
        if self._kernels is not None:
            self._tables = self._kernels.Tables.of(self._rows(), master.device)
            if isinstance(weights, FlatPrimary):
                weights.use_kernels(self._kernels, self._tables)
            if exp_avg.amax is not None or exp_avg_sq.amax is not None:
                self._decoding = codecs.decoding_table(master.device)

    def __call__(self, grad: Tensor, scalars: StepScalars, *, beta1: float, beta2: float, eps: float) -> None:
        """grad: FP32 sums, the whole buffer, of which this rank's shards are read. The weights of its shards follow."""
        constants = {"beta1": beta1, "beta2": beta2, "eps": eps}
        if self._tables is None:
            self._reference(grad, scalars, constants)
            self.write_weights()
            return
        primary = self.weights if isinstance(self.weights, FlatPrimary) else None
        amaxes = primary.amaxes_in_kernel() if primary is not None else {}
        self._kernels.adamw(
            self._tables,
            self.master,
            None if primary else self.weights.flat,
            self.exp_avg,
            self.exp_avg_sq,
            grad,
            self._kernels.Scalars(
                scalars.grad_scale, scalars.correction2, scalars.step, scalars.skip.view(torch.uint8), scalars.rates
            ),
            decoding=self._decoding,
            **amaxes,
            **constants,
        )
        if primary is None:
            self.weights.announce()
        elif amaxes:
            primary.finish(self.master, amaxes["amax"])
        else:
            primary.write(self.master)

    def write_weights(self) -> None:
        """Writes this rank's shards of the weights from its masters; upper halves of masters are weights already."""
        if self.master.dtype == torch.float32:
            self.weights.write(self.master)
        else:
            self.weights.announce()

    def _rows(self) -> Iterator[tuple]:
        for piece in self.shard.pieces:
            places = (piece.local, self._starts[piece.name] + piece.start, _round_up(piece.stop - piece.start))
            yield self._kernels.PieceRow(
                *(place // ALIGNMENT for place in (*places, piece.start)),
                group=self.groups[piece.name],
                key=self.keys[piece.name],
                **self.weights.tiles(piece.name),
            )

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


def _round_up(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
