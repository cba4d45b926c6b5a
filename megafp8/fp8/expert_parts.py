"""Each expert's part of grouped operands: for products one after the other, where no kernel runs them all."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megafp8.fp8.storage import QuantizedStorage, gemm_layout


def tokens_of(storage: QuantizedStorage, ends: Tensor, dim: int) -> Iterator[QuantizedStorage]:
    """Each expert's tokens, which lie along `dim`. Waits for the device."""
    start = tile = 0
    for index, end in enumerate(ends.tolist()):
        data = storage.data.narrow(dim, start, end - start)
        if storage.tile.kind == "tensor":
            scale_inv = storage.scale_inv[index : index + 1]
        elif dim == 0:
            scale_inv = storage.scale_inv[start:end]
        else:
            tiles = -(-(end - start) // storage.tile.block)
            scale_inv = storage.scale_inv.narrow(dim, tile, tiles)
            tile += tiles
        scale_inv = gemm_layout(scale_inv, storage.tile)
        yield QuantizedStorage(data, scale_inv, storage.tile, storage.scale, storage.orientation)
        start = end


def weights_of(weight: QuantizedStorage) -> Iterator[QuantizedStorage]:
    """Each expert's weight."""
    for index in range(weight.data.shape[0]):
        scale_inv = weight.scale_inv[index : index + 1] if weight.tile.kind == "tensor" else weight.scale_inv[index]
        scale_inv = gemm_layout(scale_inv, weight.tile)
        yield QuantizedStorage(weight.data[index], scale_inv, weight.tile, weight.scale, weight.orientation)
