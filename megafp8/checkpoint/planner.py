"""Planners of `torch.distributed.checkpoint` (DCP): which rank writes which box of which tensor, and who reads what.

They plan `StateItem`s as DCP's own planners plan DTensors, and add what those leave to the user: what several ranks
hold is written once, with the bytes spread evenly; a tensor with a hole is refused, on both ways (DCP's loads leave the
hole as it was); a load says which names, shapes and dtypes don't fit before anything is read.

Plans travel between ranks as JSON (`plan_to_json`), where `dcp.save` would pickle them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

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


def write_item(name: str, dtype: torch.dtype, shape: Sequence[int], box: Box) -> WriteItem:
    chunk = chunk_of(box)
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def plan_to_json(plan: SavePlan) -> list[Any]:
    """What `plan_from_json` needs to make the plan again on another rank."""
    datas = [(item.index.fqn, item.tensor_data, written_box(item)) for item in plan.items]
    return [[name, DTYPE_NAMES[data.properties.dtype], list(data.size), box] for name, data, box in datas]


def plan_from_json(rows: list[Any]) -> SavePlan:
    return SavePlan(
        [write_item(name, DTYPES[dtype], shape, tuple(map(tuple, box))) for name, dtype, shape, box in rows]
    )


class BoxSavePlanner(SavePlanner):
    """Plans the saving of `StateItem`s under their global names; see DCP's `SavePlanner` for the order of calls."""

    def set_up_planner(
        self, state_dict: Mapping[str, StateItem], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """state_dict: key (`params.part_key`) -> what this rank holds. Replicas and empty parts stay out."""
        kept = {key: item for key, item in state_dict.items() if not item.replica and not _is_nothing(item)}
        self._tensors: dict[MetadataIndex, Tensor] = {}
        self._items: list[WriteItem] = []
        for key, item in kept.items():
            self._items.append(write_item(name_of(key), item.tensor.dtype, item.shape, item.box))
            self._tensors[self._items[-1].index] = item.tensor

    def create_local_plan(self) -> SavePlan:
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Shares the parts out. Pure: ranks that are given the same plans come to the same ones."""
        held = [[Held(i.index.fqn, written_box(i), _nbytes(i)) for i in plan.items] for plan in all_plans]
        shares = share_out(held)
        plans = [
            replace(plan, items=[i for i in plan.items if (i.index.fqn, written_box(i)) in share])
            for plan, share in zip(all_plans, shares, strict=True)
        ]
        return plans, _metadata_of(plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index]

    def stage(self, plan: SavePlan, copy: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Puts copies in the place of the tensors that `plan` writes, and lets go of the others."""
        wanted = [item.index for item in plan.items]
        self._tensors = dict(zip(wanted, copy([self._tensors[index] for index in wanted]), strict=True))

    def release(self) -> None:
        """Lets go of all tensors."""
        self._tensors = {}


def _is_nothing(item: StateItem) -> bool:
    """Whether a rank holds no element of a tensor that has some."""
    return item.tensor.numel() == 0 and 0 not in item.shape


def _nbytes(item: WriteItem) -> int:
    return volume(written_box(item)) * item.tensor_data.properties.dtype.itemsize


def _metadata_of(plans: Sequence[SavePlan]) -> Metadata:
    """What the checkpoint will hold. Raises ValueError for tensors of which the ranks disagree, or hold only a part."""
    tensors: dict[str, TensorStorageMetadata] = {}
    for item in (item for plan in plans for item in plan.items):
        name, data = item.index.fqn, item.tensor_data
        tensor = tensors.setdefault(name, TensorStorageMetadata(data.properties, data.size, []))
        if (tensor.properties.dtype, tensor.size) != (data.properties.dtype, data.size):
            raise ValueError(f"ranks disagree on the dtype or the shape of '{name}'")
        tensor.chunks.append(data.chunk)
    for name, tensor in tensors.items():
        held = sum(chunk.sizes.numel() for chunk in tensor.chunks)
        if held != tensor.size.numel():
            raise ValueError(f"the ranks hold {held} elements of '{name}', which has {tensor.size.numel()}")
    return Metadata(tensors)


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
