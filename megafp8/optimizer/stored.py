"""Masters and moments that are stored in less than FP32, behind the interface of `ShardState`.

`values()` gives FP32 copies, `assign()` takes them back bit for bit: what was decoded is stored as it was, so that
checkpoints hold FP32 numbers whatever the precision, and any precision loads any other's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.optimizer import codecs
from megafp8.optimizer.adamw import sqrt_rn
from megafp8.optimizer.layout import ALIGNMENT, Shard
from megafp8.optimizer.shards import ShardState
from megafp8.params import ParamSpec, StateItem


class Stored(NamedTuple):
    """A moment of one buffer. values: FP32, BF16, or FP8 bytes (uint8), which have an FP32 amax and a code a block.

    root: FP8 bytes are of its roots, as those of second moments are.
    """

    values: Tensor
    amax: Tensor | None = None
    code: Tensor | None = None
    root: bool = False

    @staticmethod
    def zeros(kind: str, numel: int, device: torch.device, *, root: bool) -> Stored:
        """kind: a key of `precision.MOMENTS`."""
        if kind == "fp8":
            return Stored(
                torch.zeros(numel, dtype=torch.uint8, device=device),
                torch.zeros(numel // ALIGNMENT, device=device),
                torch.zeros(numel // ALIGNMENT, dtype=torch.uint8, device=device),
                root,
            )
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[kind]
        return Stored(torch.zeros(numel, dtype=dtype, device=device))

    def part(self, place: slice) -> Stored:
        """Views of elements `place`, whole blocks."""
        if self.amax is None:
            return Stored(self.values[place])
        blocks = slice(place.start // ALIGNMENT, -(-place.stop // ALIGNMENT))
        return Stored(self.values[place], self.amax[blocks], self.code[blocks], self.root)

    def read(self) -> Tensor:
        """FP32 values; those of FP32 themselves."""
        if self.amax is None:
            return self.values.float()
        values = codecs.decode_fp8(*self.tensors, codecs.decoding_table(self.values.device))
        return values * values if self.root else values

    def write(self, values: Tensor, random: Tensor | None = None, skip: Tensor | None = None) -> None:
        """Stores FP32 values.

        random: 16 bits (int64) an element; None: values that `read()` gave keep their bits. skip: bool scalar, leave
        all as it is.
        """
        if self.amax is not None:
            values = sqrt_rn(values) if self.root else values
            if random is None:
                new = codecs.restore_fp8(values, codecs.decoding_table(values.device), keep=self.root)
            else:
                new = codecs.encode_fp8(values, random, keep=self.root)
        elif self.values.dtype == torch.bfloat16:
            new = (values.bfloat16() if random is None else codecs.round_to_bf16(values, random),)
        else:
            new = (values,)
        for mine, value in zip(self.tensors, new, strict=False):
            mine.copy_(value if skip is None else torch.where(skip, mine, value))

    @property
    def tensors(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return self.values, self.amax, self.code

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors if tensor is not None)


class _Held:
    """State of every element of this rank's shards, in precisions of its own a buffer; zero at first."""

    def __init__(
        self, kinds: Sequence[str], shards: Sequence[Shard], shapes: Mapping[str, tuple[int, ...]], device: torch.device
    ):
        """kinds: of each buffer; the FP32 values are held as they are where all are "fp32"."""
        self._shards, self._shapes, self._device = shards, shapes, device
        self._fp32 = ShardState(shards, shapes, device) if set(kinds) == {"fp32"} else None

    def blank(self) -> ShardState:
        """FP32 values to fill and to `assign`."""
        return self._fp32 or ShardState(self._shards, self._shapes, self._device)

    def values(self) -> ShardState:
        """FP32: itself where all is stored so, else copies."""
        raise NotImplementedError

    @property
    def views(self) -> dict[str, Tensor]:
        return self.values().views

    @property
    def flats(self) -> list[Tensor]:
        return self.values().flats

    def state(
        self, prefix: str, specs: Mapping[str, ParamSpec], replicas: frozenset[str] = frozenset()
    ) -> dict[str, StateItem]:
        """See `ShardState.state`."""
        return self.values().state(prefix, specs, replicas)


class Moments(_Held):
    """One moment. Kinds are keys of `precision.MOMENTS`; root: FP8 holds its roots. stored: one a buffer."""

    def __init__(self, kinds: Sequence[str], shards: Sequence[Shard], *rest, root: bool):
        super().__init__(kinds, shards, *rest)
        if self._fp32 is not None:
            self.stored = [Stored(flat) for flat in self._fp32.flats]
        else:
            self.stored = [
                Stored.zeros(k, shard.numel, self._device, root=root) for k, shard in zip(kinds, shards, strict=True)
            ]

    def values(self) -> ShardState:
        if self._fp32 is not None:
            return self._fp32
        copies = self.blank()
        for flat, stored in zip(copies.flats, self.stored, strict=True):
            for place in _parts(len(flat)):
                flat[place] = stored.part(place).read()
        return copies

    def assign(self, values: ShardState) -> None:
        """Stores what `values()` gave, or FP32 values from elsewhere, rounded to nearest."""
        if values is not self._fp32:
            for flat, stored in zip(values.flats, self.stored, strict=True):
                for place in _parts(len(flat)):
                    stored.part(place).write(flat[place])

    def zero(self) -> None:
        for stored in self.stored:
            for tensor in stored.tensors:
                if tensor is not None:
                    tensor.zero_()

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.stored)


class Masters(_Held):
    """The FP32 masters, or what is left of them beside their BF16 weights. Kinds are keys of `precision.MASTERS`.

    stored: one tensor a buffer, FP32, or int16 remainders (`codecs.split_master`).
    """

    def __init__(self, kinds: Sequence[str], shards: Sequence[Shard], *rest):
        super().__init__(kinds, shards, *rest)
        types = {"fp32": torch.float32, "remainder": torch.int16}
        self.stored = (
            self._fp32.flats
            if self._fp32 is not None
            else [torch.zeros(s.numel, dtype=types[k], device=self._device) for k, s in zip(kinds, shards, strict=True)]
        )
        self._weights: list[list[Tensor]] = []

    def attach(self, weights: Sequence[Sequence[Tensor]]) -> None:
        """weights: for each buffer the views of this rank's BF16 weights, which remainders belong to."""
        self._weights = [list(parts) for parts in weights]

    def values(self) -> ShardState:
        if self._fp32 is not None:
            return self._fp32
        copies = self.blank()
        for flat, stored, weights in zip(copies.flats, self.stored, self._weights, strict=True):
            flat.copy_(stored if stored.dtype == torch.float32 else codecs.join_master(torch.cat(weights), stored))
        return copies

    def assign(self, values: ShardState) -> None:
        """Stores FP32 values, exactly; of masters without an FP32 value of their own, weights are written too."""
        if values is self._fp32:
            return
        for flat, stored, weights in zip(values.flats, self.stored, self._weights, strict=True):
            if stored.dtype == torch.float32:
                stored.copy_(flat)
                continue
            upper, lower = codecs.split_master(flat)
            stored.copy_(lower)
            for weight, part in zip(weights, upper.split([w.numel() for w in weights]), strict=True):
                weight.copy_(part)

    @property
    def nbytes(self) -> int:
        return sum(stored.nbytes for stored in self.stored)


def _parts(numel: int, most: int = 1 << 24) -> Iterator[slice]:
    """Bounds the temporaries of encoding and decoding."""
    return (slice(start, min(numel, start + most)) for start in range(0, numel, most))
