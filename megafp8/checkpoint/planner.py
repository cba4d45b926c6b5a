"""Planners of `torch.distributed.checkpoint` (DCP): which rank writes which box of which tensor, and who reads what.

They plan `StateItem`s as DCP's own planners plan DTensors, and add what those leave to the user: what several ranks
hold is written once, with the bytes spread evenly; a tensor with a hole is refused, on both ways (DCP's loads leave the
hole as it was); a load says which names, shapes and dtypes don't fit before anything is read.

Plans travel between ranks as JSON (`Row`), where `dcp.save` would pickle them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megafp8.checkpoint.boxes import pieces, slices_within, volume
from megafp8.checkpoint.ranks import Held, share_out
from megafp8.checkpoint.tensor_file import DTYPE_NAMES, DTYPES, DamagedFileError
from megafp8.params import Box, StateItem, name_of

LOSSLESS = {
    torch.bfloat16: {torch.float32, torch.float64},
    torch.float16: {torch.float32, torch.float64},
    torch.float32: {torch.float64},
    torch.float64: set(),
}
"""Casts of a stored dtype that keep every value."""


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """A box as DCP says it: offsets and sizes."""
    starts, sizes = [a for a, _ in box], [b - a for a, b in box]
    return ChunkStorageMetadata(offsets=torch.Size(starts), sizes=torch.Size(sizes))


def box_of(chunk: ChunkStorageMetadata) -> Box:
    return tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))


def written_box(item: WriteItem) -> Box:
    """The box that a tensor's write item stores. Other objects, which DCP would pickle, are refused: ValueError."""
    if item.tensor_data is None:
        raise ValueError(f"'{item.index.fqn}' is no tensor: only tensors are stored, nothing is pickled; leave it out")
    return box_of(item.tensor_data.chunk)


class Row(NamedTuple):
    """A write item as light as it travels and is shared out: a job has hundreds of thousands of them."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box

    @property
    def nbytes(self) -> int:
        return volume(self.box) * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        return [self.name, DTYPE_NAMES[self.dtype], self.shape, self.box]

    @staticmethod
    def from_json(row: list[Any]) -> Row:
        name, dtype, shape, box = row
        return Row(name, DTYPES[dtype], tuple(shape), tuple(map(tuple, box)))

    def write_item(self) -> WriteItem:
        chunk = chunk_of(self.box)
        data = TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size(self.shape))
        return WriteItem(MetadataIndex(self.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def row_of(item: WriteItem) -> Row:
    box = written_box(item)
    return Row(item.index.fqn, item.tensor_data.properties.dtype, tuple(item.tensor_data.size), box)


def rows_of(items: Mapping[str, StateItem]) -> dict[str, Row]:
    """What a rank could write, by key. Replicas and empty parts stay out."""
    return {
        key: Row(name_of(key), item.tensor.dtype, tuple(item.shape), item.box)
        for key, item in items.items()
        if not item.replica and (item.tensor.numel() > 0 or 0 in item.shape)
    }


def shared_out(ranks: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """What each rank writes of what it holds, in its order: every box once. Pure, so all ranks come to the same.

    Raises ValueError for tensors of which the ranks disagree, or hold a part alone.
    """
    shares = share_out([[Held(row.name, row.box, row.nbytes) for row in rows] for rows in ranks])
    written = [[r for r in rows if (r.name, r.box) in share] for rows, share in zip(ranks, shares, strict=True)]
    first: dict[str, Row] = {}
    held: dict[str, int] = {}
    for row in (row for rows in written for row in rows):
        other = first.setdefault(row.name, row)
        if (other.dtype, other.shape) != (row.dtype, row.shape):
            raise ValueError(f"ranks disagree on the dtype or the shape of '{row.name}'")
        held[row.name] = held.get(row.name, 0) + volume(row.box)
    for name, count in held.items():
        if count != math.prod(first[name].shape):
            raise ValueError(f"the ranks hold {count} elements of '{name}', which has {math.prod(first[name].shape)}")
    return written


class BoxSavePlanner(SavePlanner):
    """Plans the saving of `StateItem`s under their global names; see DCP's `SavePlanner` for the order of calls."""

    def set_up_planner(
        self, state_dict: Mapping[str, StateItem], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """state_dict: key (`params.part_key`) -> what this rank holds."""
        rows = rows_of(state_dict)
        self._plan = SavePlan([row.write_item() for row in rows.values()])
        self.assign(self._plan, [state_dict[key].tensor for key in rows])

    def create_local_plan(self) -> SavePlan:
        return self._plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        written = shared_out([[row_of(item) for item in plan.items] for plan in all_plans])
        plans = [
            replace(plan, items=[r.write_item() for r in rows]) for plan, rows in zip(all_plans, written, strict=True)
        ]
        tensors: dict[str, TensorStorageMetadata] = {}
        for item in (item for plan in plans for item in plan.items):
            data = item.tensor_data
            stored = tensors.setdefault(item.index.fqn, TensorStorageMetadata(data.properties, data.size, []))
            stored.chunks.append(data.chunk)
        return plans, Metadata(tensors)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def assign(self, plan: SavePlan, tensors: Sequence[Tensor]) -> None:
        """Says where the data of a plan's items is, in their order."""
        self._tensors = dict(zip((item.index for item in plan.items), tensors, strict=True))

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index]


class BoxLoadPlanner(LoadPlanner):
    """Plans the filling of `StateItem`s from any layout; see DCP's `LoadPlanner` for the order of calls.

    Args:
        where: the checkpoint, for messages.
        sources: name -> another name of the checkpoint to take the values from.
        allow_narrowing: also load floating-point tensors into a dtype that rounds them.

    Names that the checkpoint lacks are left alone: whether they may be lacking was asked before.
    """

    def __init__(self, where: Any, *, sources: Mapping[str, str] | None = None, allow_narrowing: bool = False):
        self._where, self._sources, self._allow_narrowing = where, dict(sources or {}), allow_narrowing

    def set_up_planner(
        self, state_dict: Mapping[str, StateItem], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self._wanted, self._stored = state_dict, metadata.state_dict_metadata

    def create_local_plan(self) -> LoadPlan:
        """Raises ValueError for a shape or dtype that doesn't fit, DamagedFileError for a tensor with a hole."""
        found = [key for key in self._wanted if self._source(key) in self._stored]
        return LoadPlan([read for key in found for read in self._reads(key)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The destination, a view into the item's tensor."""
        ends = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return self._wanted[read_item.dest_index.fqn].tensor[tuple(slice(o, o + n) for o, n in ends)]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError("a checkpoint holds tensors alone")

    @property
    def filled(self) -> dict[str, Tensor]:
        """What the plan fills, by key."""
        return {key: item.tensor for key, item in self._wanted.items() if self._source(key) in self._stored}

    def _source(self, key: str) -> str:
        name = name_of(key)
        return self._sources.get(name, name)

    def _reads(self, key: str) -> list[ReadItem]:
        name, item = self._source(key), self._wanted[key]
        stored = self._stored[name]
        if tuple(stored.size) != tuple(item.shape):
            raise ValueError(
                f"'{name}' has the shape {list(stored.size)} in {self._where}, this run's is {list(item.shape)}: "
                "the model's flags must be those of the checkpoint"
            )
        self._check_dtype(name, stored.properties.dtype, item.tensor.dtype)
        boxes = [box_of(chunk) for chunk in stored.chunks]
        try:
            found = pieces(item.box, boxes)
        except ValueError as error:
            raise DamagedFileError(f"{self._where}: '{name}' is incomplete: {error}") from None
        return [_read_item(key, item.box, name, number, boxes[number], common) for number, common in found]

    def _check_dtype(self, name: str, stored: torch.dtype, wanted: torch.dtype) -> None:
        if stored == wanted or wanted in LOSSLESS.get(stored, ()):
            return
        if stored in LOSSLESS and wanted in LOSSLESS:
            if self._allow_narrowing:
                return
            raise ValueError(
                f"'{name}' is {stored} in {self._where} and would be rounded to {wanted} in this run; "
                "--load-narrowing allows that"
            )
        raise ValueError(f"'{name}' is {stored} in {self._where}, this run's is {wanted}")


def _read_item(key: str, target: Box, name: str, number: int, stored: Box, common: Box) -> ReadItem:
    """Reads `common` from part `number` of a stored tensor into the item `key`, whose box is `target`."""
    start = [[s.start for s in slices_within(common, outer)] for outer in (target, stored)]
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=MetadataIndex(key, chunk_of(target).offsets),
        dest_offsets=torch.Size(start[0]),
        storage_index=MetadataIndex(name, chunk_of(stored).offsets, number),
        storage_offsets=torch.Size(start[1]),
        lengths=chunk_of(common).sizes,
    )
