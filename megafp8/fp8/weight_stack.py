"""WeightStack: the weights of like linears, such as a layer's experts, as one operand `[G, N, K]`.

Each weight keeps its owner (`Weight`), its version and its name; a stack derives FP8 copies of all of them together, at
most once a version. Where the stored bytes lie at one distance from each other, as in the optimizer's flat buffers,
a stack of them is a view; elsewhere it is a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megafp8.fp8 import expert_scales, gemm
from megafp8.fp8.backend import transpose_each
from megafp8.fp8.param import Weight
from megafp8.fp8.recipe import Recipe
from megafp8.fp8.storage import QuantizedStorage, gemm_layout


def stacked(tensors: Sequence[Tensor]) -> Tensor | None:
    """`[G, ...]`, a view of contiguous tensors of one shape that lie at one distance in one storage; else None."""
    first = tensors[0].detach()
    if len(tensors) == 1:
        return first[None] if first.is_contiguous() else None
    step = tensors[1].storage_offset() - first.storage_offset()
    place, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for number, tensor in enumerate(tensors):
        alike = tensor.shape == first.shape and tensor.dtype == first.dtype and tensor.is_contiguous()
        there = tensor.storage_offset() == place + number * step
        if not (alike and there) or tensor.untyped_storage().data_ptr() != storage:
            return None
    if step < first.numel():
        return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))


def stack_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """`torch.stack` of FP8 or scales; few operators know 8-bit floats."""
    if tensors[0].element_size() > 1:
        return torch.stack(list(tensors))
    return torch.stack([t.view(torch.uint8) for t in tensors]).view(tensors[0].dtype)


def _groups(values: Tensor) -> expert_scales.Groups:
    """Where weights `[G, N, K]` lie as `[G N, K]`."""
    count, rows = values.shape[:2]
    ends = torch.arange(rows, (count + 1) * rows, rows, dtype=torch.int32, device=values.device)
    return expert_scales.Groups(ends, count * rows, alignment=rows)


class WeightStack:
    """weights: of one recipe, shape and dtype, in order."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = tuple(weights)
        self.params = [weight.param for weight in weights]
        self.recipe: Recipe | None = weights[0].recipe
        self.keep_transposed = all(weight.keep_transposed for weight in weights)
        self._key: tuple | None = None
        self._scales: Tensor | None = None
        self._copies: dict[str, QuantizedStorage] = {}
        self._amax: tuple[tuple, Tensor] | None = None
        self._buffers: tuple[list[Tensor], Tensor | None] = [], None
        self._view: tuple[list[int], Tensor | None] = [], None

    def values(self, dtype: torch.dtype) -> Tensor:
        """High-precision `[G, N, K]`."""
        self._await()
        places = [param.data_ptr() for param in self.params]
        if self._view[0] != places:  # where weights lie changes rarely, and is dear to compare
            self._view = places, stacked(self.params)
        view = self._view[1]
        return (torch.stack([p.detach() for p in self.params]) if view is None else view).to(dtype)

    def gradients(self, buffers: list[Tensor]) -> Tensor | None:
        """`stacked` buffers of the weights' gradients: the same ones step after step, which is found out once."""
        known, together = self._buffers
        if len(known) != len(buffers) or any(a is not b for a, b in zip(known, buffers, strict=True)):
            together = stacked(buffers)
            self._buffers = buffers, together
        return together

    def versions(self) -> list[int]:
        """PyTorch's count of writes to each weight."""
        return [param._version for param in self.params]

    def _versions(self) -> tuple[list[int], ...]:
        """What changes whenever stored bytes do: announced versions, writes, addresses. Waits for bytes on their way.

        For hundreds of experts, many times a step: so in few lines of Python for each.
        """
        self._await()
        announced = [weight.version for weight in self.weights]
        return announced, self.versions(), [param.data_ptr() for param in self.params]

    def _await(self) -> None:
        for weight in self.weights:
            if weight.arrival is not None:
                weight.version_key()

    def amax(self) -> Tensor:
        """FP32 [G]: the weights' amaxes (tensor tiles), once a version."""
        key = self._versions()
        if self._amax is None or self._amax[0] != key:
            self._amax = key, self._measure()
        return self._amax[1]

    def _measure(self) -> Tensor:
        if self.weights[0].primary is not None:
            return torch.cat([weight.primary.amax.view(1) for weight in self.weights])
        values = self.values(self.params[0].dtype)
        return expert_scales.amax(self.recipe.quantizer("weight"), values.flatten(0, 1), _groups(values))

    def operand(self, gemm_name: str, scales: Tensor | None = None) -> QuantizedStorage:
        """The FP8 operand of "grouped_fprop" or "grouped_dgrad", derived at most once a version.

        scales: delayed scaling's, FP32 [G], of which there is one object a step; None takes them from the weights.
        """
        key = self._versions()
        if key != self._key or scales is not self._scales:
            self._key, self._scales, self._copies = key, scales, {}
        orientation = gemm.needs(self.recipe, "weight", self.params[0].device)[gemm_name]
        if orientation in self._copies:
            return self._copies[orientation]
        storage = self._derive(orientation)
        if self.keep_transposed or orientation == "rowwise" or not storage.tile.symmetric:
            self._copies[orientation] = storage
        return storage

    def _derive(self, orientation: str) -> QuantizedStorage:
        quantizer = self.recipe.quantizer("weight")
        tile = quantizer.spec.tile
        if orientation == "colwise" and tile.symmetric:
            row = self.operand("fprop", self._scales)
            scales = row.scale_inv if tile.kind == "tensor" else row.scale_inv.transpose(1, 2).contiguous()
            return QuantizedStorage(transpose_each(row.data), scales, tile, row.scale, "colwise")
        if self.weights[0].primary is not None:
            return self._of_primary(orientation)
        values = self.values(self.params[0].dtype)
        if tile.kind == "tensor":
            amax = self.amax() if self._scales is None else expert_scales.amax_for(quantizer, self._scales)
            row = expert_scales.quantize(quantizer, values.flatten(0, 1), _groups(values), given=amax).rowwise
            return replace(row, data=row.data.unflatten(0, values.shape[:2]))
        whole_tiles = tile.kind == "1d" or values.shape[1] % tile.block == 0
        if orientation == "rowwise" and whole_tiles and values.is_contiguous():
            row = quantizer.quantize(values.flatten(0, 1)).rowwise  # no tile lies in two weights
            data, scales = (t.unflatten(0, (len(self.weights), -1)) for t in (row.data, row.scale_inv))
            return QuantizedStorage(data, scales, tile, row.scale, orientation)
        rowwise = orientation == "rowwise"
        parts = [quantizer.quantize(value, rowwise, not rowwise) for value in values]
        return self._together([part.rowwise or part.colwise for part in parts])

    def _of_primary(self, orientation: str) -> QuantizedStorage:
        """Of FP8 primary weights: the stored bytes, which the colwise copy transposes."""
        data = [weight.primary.data[orientation] for weight in self.weights]
        scales = stack_bytes([weight.primary.scale_inv[orientation] for weight in self.weights])
        scales = scales.flatten() if self.recipe.quantizer("weight").spec.tile.kind == "tensor" else scales
        view = stacked(data)
        together = stack_bytes(data) if view is None else view
        if orientation == "colwise":
            together = transpose_each(together)
        spec = self.recipe.quantizer("weight").spec
        return QuantizedStorage(together, scales, spec.tile, spec.scale, orientation)

    @staticmethod
    def _together(parts: list[QuantizedStorage]) -> QuantizedStorage:
        first = parts[0]
        scales = stack_bytes([gemm_layout(part.scale_inv, part.tile) for part in parts])
        data = stack_bytes([part.data for part in parts])
        return QuantizedStorage(data, scales, first.tile, first.scale, first.orientation)

    @property
    def nbytes(self) -> int:
        """Bytes of the derived copies held now; views of stored bytes are none."""
        of_primary = self.weights[0].primary is not None
        copies = (copy for name, copy in self._copies.items() if not (of_primary and name == "rowwise"))
        return sum(copy.nbytes for copy in copies)
