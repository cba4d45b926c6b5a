"""A rank's shards of the optimizer's state: flat tensors, and their places in the global tensors for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megafp8.optimizer.layout import Piece, Shard, piece_boxes
from megafp8.params import ParamSpec, StateItem, part_key


class ShardState:
    """One FP32 value an element of this rank's shards: masters, or a moment; zero at first.

    flats: one flat tensor a buffer. views: global name -> view in the parameter's local shape, of the parameters that
    this rank holds whole.
    """

    def __init__(self, shards: Sequence[Shard], shapes: Mapping[str, tuple[int, ...]], device: torch.device):
        self.shards = tuple(shards)
        self.flats = [torch.zeros(shard.numel, dtype=torch.float32, device=device) for shard in self.shards]
        self.views: dict[str, Tensor] = {}
        for piece, values in self.pieces():
            if piece.start == 0 and values.numel() == torch.Size(shapes[piece.name]).numel():
                self.views[piece.name] = values.view(shapes[piece.name])
        for name, shape in shapes.items():
            if 0 in shape:
                self.views[name] = torch.zeros(shape, dtype=torch.float32, device=device)

    def pieces(self) -> Iterator[tuple[Piece, Tensor]]:
        """Every parameter that this rank holds some of, with its values, flat."""
        for shard, flat in zip(self.shards, self.flats, strict=True):
            for piece in shard.pieces:
                yield piece, flat[piece.place]

    def parts(self) -> list[list[Tensor]]:
        """The values in the pieces that `GradBuffers.parts` has."""
        return [[flat[r.local : r.local + r.stop - r.start] for r in s.ranges] for s, flat in self._zip()]

    def zero(self) -> None:
        for flat in self.flats:
            flat.zero_()

    def state(
        self, prefix: str, specs: Mapping[str, ParamSpec], replicas: frozenset[str] = frozenset()
    ) -> dict[str, StateItem]:
        """What this rank holds, as views, without vocabulary padding: a shard of a matrix is up to three boxes.

        A parameter of which it holds nothing has an empty box, so that the names are those of all ranks (but for
        scalars, of which no box is empty). replicas: names of those that an earlier pipeline stage saves.
        """
        boxes = {name: [] for name in specs}
        for shard, flat in self._zip():
            for piece in (p for p in shard.pieces if p.name in specs):
                boxes[piece.name] += [(box, flat[place]) for box, place in piece_boxes(piece, specs[piece.name])]
        items = {}
        for name, spec in specs.items():
            found = boxes[name]
            if not found and spec.shape:
                found = [(((0, 0),) * len(spec.shape), self.flats[0].new_zeros(0))]
            for number, (box, values) in enumerate(found):
                shape = tuple(b - a for a, b in box)
                items[part_key(prefix + name, number)] = StateItem(
                    values.view(shape), spec.shape, box, name in replicas
                )
        return items

    def _zip(self):
        return zip(self.shards, self.flats, strict=True)
