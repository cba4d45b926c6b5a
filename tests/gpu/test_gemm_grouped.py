"""Grouped FP8 GEMM kernels against a loop over groups in float64. Rows past the last group hold NaN."""

import pytest
import torch
from megafp8.kernels import gemm_launch, gemm_regroup, grouped_gemm

from tests.gpu.gemm_cases import (
    BACKENDS,
    BF16_ERROR,
    DEVICE,
    E4M3,
    FP32_ERROR,
    INTERPRETING,
    NAN_BYTE,
    assert_close,
    dequantized,
    magnitudes,
    operand,
    row_scales,
    square_scales,
)

# (group sizes, rows past the last group)
SIZES = [([1, 0, 37, 130], 40), ([0, 0, 0], 16), ([256, 128, 384], 0), ([129, 300, 0, 77, 5, 260], 100)]
if INTERPRETING:
    SIZES = [([1, 0, 37, 130], 8), ([0, 0], 16)]
CONFIGS = {"small": gemm_launch.SMALL, "large": gemm_launch.LARGE, "adding": gemm_launch.ADDING}


@pytest.fixture(params=[(b, c) for b in BACKENDS for c in (CONFIGS if b == "gluon" else ["only"])], ids=str)
def backend(request, monkeypatch):
    """Each backend, the Gluon kernel with each of its configurations whatever the shape."""
    name, config = request.param
    if name == "gluon":
        monkeypatch.setattr(gemm_launch, "hopper_config", lambda p, n: CONFIGS[config])
    return name


def ends_of(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32).to(DEVICE)


@pytest.mark.parametrize("scaling", ["1d2d", "tensorwise"])
@pytest.mark.parametrize(("sizes", "extra"), SIZES)
def test_grouped_over_rows(sizes, extra, scaling, backend):
    """CASES 12: rows past the last end neither matter nor change; CASES 11, 13: empty and odd groups."""
    G, used, N, K = len(sizes), sum(sizes), 200, 320
    a, b = operand(used + extra, K), operand(G * N, K, seed=1).contiguous().view(G, N, K)
    a.view(torch.uint8)[used:] = NAN_BYTE
    scale_rows = row_scales(used + extra, 3)
    scale_rows[used:] = float("nan")
    squares = square_scales(G * 2, 3).view(G, 2, 3)
    per_group_a, per_group_b = magnitudes(G, seed=3), magnitudes(G, seed=4)
    out = torch.full((used + extra, N), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    out[used:] = -7
    if scaling == "1d2d":
        grouped_gemm.grouped_gemm_1d2d(a, b, scale_rows, squares, ends_of(sizes), out=out, backend=backend)
    else:
        grouped_gemm.grouped_gemm_tensorwise(a, b, per_group_a, per_group_b, ends_of(sizes), out=out, backend=backend)
    first = 0
    for g, size in enumerate(sizes):
        rows = slice(first, first + size)
        if scaling == "1d2d":
            want = dequantized(a[rows], scale_rows[rows]) @ dequantized(b[g], squares[g], True).t()
        else:
            want = a[rows].double() @ b[g].double().t() * (per_group_a[g] * per_group_b[g]).double()
        assert_close(out[rows], want, BF16_ERROR, f"group {g}")
        first += size
    assert (out[used:] == -7).all()


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("padding", [1, 16, 128])
@pytest.mark.parametrize(("sizes", "extra"), SIZES)
def test_wgrad(sizes, extra, padding, accumulate, backend):
    """CASES 11, 12, 13, 46: empty groups give zeros or leave the buffer; NaN outside of groups does not matter."""
    G, M, N = len(sizes), 136, 72
    starts, width = [], 0
    for size in sizes:
        starts.append(width)
        width += -(-size // padding) * padding
    a, b = operand(M, width + extra), operand(N, width + extra, seed=1)
    outside = torch.ones(width + extra, dtype=torch.bool, device=DEVICE)
    for start, size in zip(starts, sizes, strict=True):
        outside[start : start + size] = False
    a.view(torch.uint8)[:, outside] = NAN_BYTE
    b.view(torch.uint8)[:, outside] = NAN_BYTE
    tiles = [-(-size // 128) for size in sizes]
    scale_a, scale_b = row_scales(M, sum(tiles) + 2), row_scales(N, sum(tiles) + 2, seed=2)
    scale_a[:, sum(tiles) :] = scale_b[:, sum(tiles) :] = float("nan")
    per_group_a, per_group_b = magnitudes(G, seed=3), magnitudes(G, seed=4)
    before = torch.randn(G, M, N, device=DEVICE) * 100
    blockwise, tensorwise = (before.clone() if accumulate else before * float("nan") for _ in range(2))
    options = {"accumulate": accumulate, "padding": padding, "backend": backend}
    grouped_gemm.grouped_wgrad_1d1d(a, b, scale_a, scale_b, ends_of(sizes), out=blockwise, **options)
    grouped_gemm.grouped_wgrad_tensorwise(a, b, per_group_a, per_group_b, ends_of(sizes), out=tensorwise, **options)
    tile = 0
    for g, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        columns, scales = slice(start, start + size), slice(tile, tile + tiles[g])
        base = before[g].double() if accumulate else torch.zeros(M, N, dtype=torch.float64, device=DEVICE)
        product = dequantized(a[:, columns], scale_a[:, scales]) @ dequantized(b[:, columns], scale_b[:, scales]).t()
        assert_close(blockwise[g], base + product, FP32_ERROR, f"1D1D, group {g}")
        product = a[:, columns].double() @ b[:, columns].double().t() * (per_group_a[g] * per_group_b[g]).double()
        assert_close(tensorwise[g], base + product, FP32_ERROR, f"tensorwise, group {g}")
        if size == 0:
            assert torch.equal(blockwise[g], base.float())
        tile += tiles[g]


@pytest.mark.parametrize(("padding", "new_padding"), [(1, 16), (1, 128), (8, 16), (16, 4)])
def test_regroup_moves_bytes(padding, new_padding):
    sizes = [1, 0, 37, 130, 5]
    starts, width = [], 0
    for size in sizes:
        starts.append(width)
        width += -(-size // padding) * padding
    x = torch.randint(0, 256, (13, -(-width // 4) * 4 + 8), dtype=torch.uint8, device=DEVICE)
    moved = gemm_regroup.regroup(x.view(E4M3), ends_of(sizes), padding, new_padding).view(torch.uint8)
    new_start = 0
    for start, size in zip(starts, sizes, strict=True):
        assert torch.equal(moved[:, new_start : new_start + size], x[:, start : start + size])
        new_start += -(-size // new_padding) * new_padding
