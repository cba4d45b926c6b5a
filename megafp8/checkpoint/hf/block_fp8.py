"""Block-FP8 files, as DeepSeek-V3 introduced them: E4M3 bytes and one FP32 scale a 128 x 128 block.

    <name>.weight            float8_e4m3fn [N, K]
    <name>.weight_scale_inv  float32 [ceil(N / 128), ceil(K / 128)];   value = byte * scale_inv

These are megafp8's own blockwise weights, so a run's bytes can be written as they are, where each block of a file's
tensor lies within one tile of ours: `carry_over` says where that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megafp8.checkpoint.hf.rules import Entry
from megafp8.checkpoint.hf.values import Values
from megafp8.config.model import ModelConfig

SCALE_SUFFIX = "weight_scale_inv"
BLOCK = 128


@dataclass(frozen=True)
class BlockFP8:
    """The `quantization_config` of a model. block: rows and columns that share a scale; skipped: modules kept."""

    block: tuple[int, int] = (BLOCK, BLOCK)
    skipped: tuple[str, ...] = ()

    @staticmethod
    def of(hf: Values) -> BlockFP8 | None:
        """None for a model in high precision. Raises ValueError for another kind of quantization."""
        section = hf.section("quantization_config")
        if not section.content:
            return None
        section.require("quant_method", "fp8")
        section.require("fmt", "e4m3", default="e4m3")
        block = section.content.get("weight_block_size")
        if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
            raise ValueError(f"{section.where}: 'weight_block_size' {block}: only FP8 with scales a block is read here")
        return BlockFP8(tuple(block), tuple(section.content.get("modules_to_not_convert") or ()))

    def to_json(self) -> dict[str, Any]:
        content = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
        kept = {"modules_to_not_convert": list(self.skipped)} if self.skipped else {}
        return content | {"weight_block_size": list(self.block)} | kept


def grid(shape: tuple[int, ...], block: tuple[int, int] = (BLOCK, BLOCK)) -> tuple[int, ...]:
    """Shape of the scales of a weight [N, K]; edge blocks may be smaller."""
    return tuple(-(-n // b) for n, b in zip(shape, block, strict=True))


def expand(scale_inv: Tensor, shape: tuple[int, int], block: tuple[int, int] = (BLOCK, BLOCK)) -> Tensor:
    """Scales [ceil(N / b0), ceil(K / b1)] as one an element, [N, K]."""
    rows = scale_inv.repeat_interleave(block[0], 0)[: shape[0]]
    return rows.repeat_interleave(block[1], 1)[:, : shape[1]]


def dequantize(data: Tensor, scale_inv: Tensor, block: tuple[int, int] = (BLOCK, BLOCK)) -> Tensor:
    """FP32 values of an FP8 weight [N, K], block row by block row, so that no second FP32 copy is made."""
    out = torch.empty(data.shape, dtype=torch.float32)
    for i, start in enumerate(range(0, data.shape[0], block[0])):
        rows = slice(start, start + block[0])
        scale = scale_inv[i].float().repeat_interleave(block[1])[: data.shape[1]]
        torch.mul(data[rows].float(), scale, out=out[rows])
    return out


def carry_over(entry: Entry, data: Tensor, scale_inv: Tensor, model: ModelConfig) -> list[tuple[Tensor, Tensor] | None]:
    """(bytes, scale_inv) of each of an entry's parts, taken from ours as they are.

    data: E4M3 in our shape [..., K]; scale_inv: FP32, of the 128 x 128 tiles over its rows as they lie in memory.
    None for a part of which a block holds rows of more than one of our tiles: it must be quantized anew.
    """
    rows = data.reshape(-1, data.shape[-1]).shape[0]
    tiles = (torch.arange(rows) // BLOCK).reshape(*data.shape[:-1], 1)
    parts = entry.split(data.view(torch.uint8), model)
    return [
        None if (source := _one_tile_a_block(lies_in.flatten())) is None
        else (part.view(data.dtype), scale_inv[source].contiguous())
        for part, lies_in in zip(parts, entry.split(tiles, model), strict=True)
    ]  # fmt: skip


def _one_tile_a_block(tiles: Tensor) -> Tensor | None:
    """The tile [blocks] that the rows of each block lie in, None where they lie in several. tiles: int64 [rows]."""
    first = tiles[::BLOCK]
    return first if torch.equal(expand(first[:, None], (len(tiles), 1)).flatten(), tiles) else None
