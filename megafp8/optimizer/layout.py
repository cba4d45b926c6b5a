"""Layout of the flat buffers and of the parts that ranks hold of them: pure functions.

Parameters are laid out in one flat buffer for each (stored dtype, expert or not, partial gradient or not, precision of
masters and moments). A buffer is a row of buckets, which are reduced and gathered one by one, in the order in which
gradients get ready. Each bucket is cut into equal shards, one a rank, wherever that falls: through parameters and
through their tiles. A rank's state (masters, moments) is its shards of all buckets, one after the other; unsharded,
that is the buffer itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megafp8.optimizer.precision import FP32_STATE, Precision
from megafp8.params import Box, ParamSpec, range_boxes

ALIGNMENT = 64
"""Elements that every parameter's and every shard's offset is a multiple of: 256 bytes in FP32, 64 in FP8."""
BUCKET_ELEMENTS = 40_000_000
"""Elements that a bucket has at least where reductions overlap with backward, as in Megatron-LM."""


class Group(NamedTuple):
    """What an update treats alike. decay: weight decay applies; decoupled: follows --decoupled-lr.

    lr_mult, wd_mult: factors of the learning rate and of the weight decay.
    """

    decay: bool
    decoupled: bool = False
    lr_mult: float = 1.0
    wd_mult: float = 1.0


@dataclass(frozen=True)
class Entry:
    """What the layout needs to know of one parameter; `numel` counts the local tensor, padding included.

    dtype: as stored, FP8 for FP8 primary weights. partial: each rank's gradient is only a part, summed over other axes
    before it is reduced. order: gradients with lower numbers get ready earlier. precision: of its masters and moments.
    stack, number: parameters of a stack lie side by side, by number, in one bucket; their gradients come together.
    """

    name: str
    numel: int
    dtype: torch.dtype
    expert: bool
    group: Group
    partial: bool = False
    order: int = 0
    precision: Precision = FP32_STATE
    stack: str = ""
    number: int = 0


class Slot(NamedTuple):
    """One parameter's elements `start:stop` of a buffer."""

    name: str
    start: int
    stop: int


class Segment(NamedTuple):
    """A run of a buffer whose parameters share a group; the gaps left by alignment belong to it and stay zero."""

    group: Group
    start: int
    stop: int


class Bucket(NamedTuple):
    """Elements `start:stop` of a buffer, reduced and gathered together. order: of its last gradient to get ready."""

    start: int
    stop: int
    order: int = 0


@dataclass(frozen=True)
class BufferLayout:
    """One flat buffer. slots: in the order of offsets; segments: cover `0:numel` without a gap, as buckets do.

    shards: parts that every bucket is cut into.
    """

    dtype: torch.dtype
    expert: bool
    numel: int
    slots: tuple[Slot, ...]
    segments: tuple[Segment, ...]
    partial: bool = False
    buckets: tuple[Bucket, ...] = ()
    shards: int = 1
    precision: Precision = FP32_STATE

    def share(self, bucket: Bucket, rank: int) -> slice:
        """What `rank` holds of a bucket, in the buffer's offsets."""
        length = (bucket.stop - bucket.start) // self.shards
        return slice(bucket.start + rank * length, bucket.start + (rank + 1) * length)


def plan_layouts(
    entries: Iterable[Entry], *, shards: int = 1, expert_shards: int = 1, bucket_elements: int | None = None
) -> tuple[BufferLayout, ...]:
    """The buffers of these parameters.

    Pure and independent of the order of `entries`. Within a bucket parameters lie by group, then in their order.

    Args:
        shards, expert_shards: ranks that share a bucket, of the experts' buffers and of the others.
        bucket_elements: close a bucket when it has as many; None: a buffer is one bucket.

    """
    buffers: dict[tuple[str, bool, bool, Precision], list[Entry]] = {}
    for entry in _stacks_together(list(entries)):
        key = (str(entry.dtype), entry.expert, entry.partial, entry.precision)
        buffers.setdefault(key, []).append(entry)
    return tuple(
        _plan_buffer(buffers[key], expert_shards if key[1] else shards, bucket_elements) for key in sorted(buffers)
    )


def _plan_buffer(entries: list[Entry], shards: int, bucket_elements: int | None) -> BufferLayout:
    slots: list[Slot] = []
    segments: list[Segment] = []
    buckets: list[Bucket] = []
    for members in _deal(entries, bucket_elements):
        start = buckets[-1].stop if buckets else 0
        offset, ends = start, []
        for entry in members:
            slots.append(Slot(entry.name, offset, offset + entry.numel))
            offset += _round_up(entry.numel, ALIGNMENT)
            ends.append(offset)
        ends[-1] = start + _round_up(offset - start, ALIGNMENT * shards)
        for entry, end in zip(members, ends, strict=True):
            if segments and segments[-1].group == entry.group:
                segments[-1] = segments[-1]._replace(stop=end)
            else:
                segments.append(Segment(entry.group, segments[-1].stop if segments else 0, end))
        buckets.append(Bucket(start, ends[-1], max(entry.order for entry in members)))
    first = entries[0]
    return BufferLayout(
        first.dtype,
        first.expert,
        buckets[-1].stop,
        tuple(slots),
        tuple(segments),
        first.partial,
        tuple(buckets),
        shards,
        first.precision,
    )


def _stacks_together(entries: list[Entry]) -> list[Entry]:
    """A stack's gradients get ready when the last of them does."""
    last: dict[str, int] = {}
    for entry in entries:
        last[entry.stack] = max(entry.order, last.get(entry.stack, entry.order))
    return [replace(entry, order=last[entry.stack]) if entry.stack else entry for entry in entries]


def _deal(entries: list[Entry], bucket_elements: int | None) -> Iterator[list[Entry]]:
    """The entries of each bucket, in the order of their offsets."""
    members: list[Entry] = []
    ordered = sorted(entries, key=_place)
    for entry, following in zip(ordered, [*ordered[1:], None], strict=True):
        members.append(entry)
        inside = entry.stack and following is not None and following.stack == entry.stack
        if bucket_elements is not None and not inside and sum(e.numel for e in members) >= bucket_elements:
            yield _by_group(members)
            members = []
    if members:
        yield _by_group(members)


def _place(entry: Entry) -> tuple[int, int, str]:
    return entry.order, entry.number, entry.name


def _by_group(members: list[Entry]) -> list[Entry]:
    return sorted(members, key=lambda e: (not e.group.decay, *e.group[1:], *_place(e)))


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step


class Range(NamedTuple):
    """Elements `start:stop` of a buffer that a rank holds, from `local` on in its own state."""

    start: int
    stop: int
    local: int


class Run(NamedTuple):
    """Elements of one group: `start:stop` of the buffer, `local:local + stop - start` of the rank's state."""

    group: Group
    start: int
    stop: int
    local: int


class Piece(NamedTuple):
    """Elements `start:stop` of a flat parameter, from `local` on in the rank's state."""

    name: str
    start: int
    stop: int
    local: int

    @property
    def place(self) -> slice:
        return slice(self.local, self.local + self.stop - self.start)


@dataclass(frozen=True)
class Shard:
    """What one rank holds of a buffer."""

    layout: BufferLayout
    rank: int

    @cached_property
    def ranges(self) -> tuple[Range, ...]:
        """In the order of offsets; ranges that touch are one."""
        ranges: list[Range] = []
        local = 0
        for bucket in self.layout.buckets:
            share = self.layout.share(bucket, self.rank)
            if ranges and ranges[-1].stop == share.start:
                ranges[-1] = ranges[-1]._replace(stop=share.stop)
            else:
                ranges.append(Range(share.start, share.stop, local))
            local += share.stop - share.start
        return tuple(ranges)

    @property
    def numel(self) -> int:
        return sum(r.stop - r.start for r in self.ranges)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        found = [
            Run(group, start, stop, local)
            for group, a, b in self.layout.segments
            for start, stop, local in self._held(a, b)
        ]
        return tuple(found)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """Of every parameter that it holds some of, in the order of offsets."""
        found = [
            Piece(name, start - a, stop - a, local)
            for name, a, b in self.layout.slots
            for start, stop, local in self._held(a, b)
        ]
        return tuple(found)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """Views of what it holds of a whole buffer, in the order of its own state."""
        return [flat[r.start : r.stop] for r in self.ranges]

    def _held(self, start: int, stop: int) -> Iterator[Range]:
        for r in self.ranges:
            a, b = max(start, r.start), min(stop, r.stop)
            if a < b:
                yield Range(a, b, r.local + a - r.start)


def piece_boxes(piece: Piece, spec: ParamSpec) -> list[tuple[Box, slice]]:
    """A piece as boxes of the global tensor, each with its place in the rank's state. Padding is left out."""
    stop = min(piece.stop, math.prod(spec.box_shape))
    found, offset = [], piece.local
    for box in range_boxes(piece.start, stop, spec.box_shape):
        size = math.prod(b - a for a, b in box)
        placed = tuple((a + start, b + start) for (a, b), (start, _) in zip(box, spec.box, strict=True))
        found.append((placed, slice(offset, offset + size)))
        offset += size
    return found
