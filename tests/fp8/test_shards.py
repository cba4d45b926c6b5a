"""Rows of ranks cut and put together again: whatever integers are copied, bytes are where they belong."""

from __future__ import annotations

import pytest
import torch

from megafp8.fp8 import shards

FP8 = torch.float8_e4m3fn


def random_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 8, 12, 16, 40])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_colwise_shards_lie_side_by_side(rows, ranks):
    gathered = random_bytes(ranks * 5, rows)
    whole = shards._side_by_side(gathered.view(FP8), ranks)
    assert whole.dtype == FP8
    assert whole.is_contiguous()
    assert torch.equal(whole.view(torch.uint8), torch.cat(gathered.chunk(ranks), 1))


@pytest.mark.parametrize("width", [1, 2, 3, 4, 12, 16])
@pytest.mark.parametrize("dtype", [FP8, torch.bfloat16])
def test_equal_pieces_are_those_taken_one_by_one(width, dtype):
    ranks, count, rows = 2, 3, 4
    x = random_bytes(ranks * count * rows, width * dtype.itemsize).view(dtype)
    moved = torch.cat([random_bytes(1, width * dtype.itemsize).view(dtype), x]) if dtype is torch.bfloat16 else x
    for source in (x, moved[len(moved) - len(x) :]):  # the second begins behind a row of any width
        pieces = shards._cut_rows(source, count, ranks)
        for number, piece in enumerate(pieces):
            part = slice(number * rows, (number + 1) * rows)
            expected = shards.take_bytes(source, part, ranks) if dtype is FP8 else shards.take(source, part, ranks)
            assert piece.dtype == dtype
            assert torch.equal(piece.view(torch.uint8), expected.contiguous().view(torch.uint8))
