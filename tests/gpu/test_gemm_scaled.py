"""MXFP8 GEMM kernels against float64 products of what the reference dequantizes. Padding and outputs hold NaN.

`native` goes through `tl.dot_scaled`, which needs block-scaled tensor cores; emulation runs on any GPU with TMA.
"""

import pytest
import torch
from megafp8.kernels import gemm_scaled

from megafp8.fp8 import reference
from megafp8.fp8.formats import Tile
from tests.gpu.gemm_cases import (
    BF16_ERROR,
    DEVICE,
    E4M3,
    E5M2,
    FP32_ERROR,
    INTERPRETING,
    NAN_BYTE,
    assert_close,
    generator,
    operand,
    poisoned,
)

BLACKWELL = not INTERPRETING and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 10
NATIVE = pytest.mark.parametrize("native", [False, True] if INTERPRETING or BLACKWELL else [False])
E8M0 = torch.float8_e8m0fnu
SHAPES = [(130, 136, 320), (1, 8, 32), (96, 72, 100)] + [(300, 264, 896), (128, 100, 208)] * (not INTERPRETING)
SIZES = [([1, 0, 37, 130], 8), ([0, 0], 16)] + [([256, 128, 384], 0), ([129, 300, 0, 77], 100)] * (not INTERPRETING)


def codes(rows: int, columns: int, seed: int = 1, major: str = "rows") -> torch.Tensor:
    """Codes from 2^-10 to 2^10, padded with NaN's, contiguous along rows or along columns."""
    shape = (columns, rows + 4) if major == "rows" else (rows, columns + 4)
    buffer = torch.full(shape, 255, dtype=torch.uint8)
    buffer[:, :-4] = torch.randint(117, 138, (shape[0], shape[1] - 4), generator=generator(seed)).to(torch.uint8)
    view = buffer.to(DEVICE)[:, :-4]
    return (view.t() if major == "rows" else view).view(E8M0)


def blocks(length: int) -> int:
    return -(-length // 32)


def values(data: torch.Tensor, scale_inv: torch.Tensor, kind: str = "1d") -> torch.Tensor:
    return reference.dequantize(data.cpu(), scale_inv.cpu(), Tile(kind, 32)).double().to(DEVICE)


@NATIVE
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_dense(M, N, K, native):
    """Activations by weights of 32 x 32 tiles, with a bias; and wgrad, written and added, of another format."""
    a, b = operand(M, K), operand(N, K, seed=1)
    rows, squares = codes(M, blocks(K)), codes(blocks(N), blocks(K), 2, "columns")
    want = values(a, rows) @ values(b, squares, "2d").t()
    bias = torch.randn(N, generator=generator(3)).to(DEVICE) * want.std(correction=0).float()
    got = gemm_scaled.gemm_mxfp8(a, b, rows, squares, bias=bias, out=poisoned(M, N), native=native)
    assert_close(got, want + bias.double(), BF16_ERROR, "BF16")
    columns, e5m2 = codes(N, blocks(K), 4), operand(M, K, E5M2, seed=2)
    want = values(e5m2, rows) @ values(b, columns).t()
    got = gemm_scaled.gemm_mxfp8(e5m2, b, rows, columns, out=poisoned(M, N, dtype=torch.float32), native=native)
    assert_close(got, want, FP32_ERROR, "FP32")
    added = gemm_scaled.gemm_mxfp8(e5m2, b, rows, columns, out=got.clone(), accumulate=True, native=native)
    assert torch.equal(added, 2 * got)


@NATIVE
def test_codes_at_the_ends_of_their_range(native):
    """Code 0 is 2^-127, a subnormal (decoded, its least elements are rounded); 255 makes its row NaN, and no other."""
    a, b = operand(3, 64), operand(8, 64, seed=1)
    smallest = torch.tensor([[0, 0], [3, 3], [127, 255]], dtype=torch.uint8, device=DEVICE).view(E8M0)
    largest = torch.tensor([[247, 240]], dtype=torch.uint8, device=DEVICE).repeat(8, 1).view(E8M0)
    b.view(torch.uint8)[:] = (b.float() * 0.25).to(E4M3).view(torch.uint8)  # 2^120 times up to 8 doesn't overflow
    got = gemm_scaled.gemm_mxfp8(a, b, smallest, largest, out_dtype=torch.float32, native=native)
    want = values(a, smallest) @ values(b, largest).t()
    assert_close(got[0], want[0], FP32_ERROR if native else 3e-3)
    assert_close(got[1], want[1], FP32_ERROR)
    assert got[2].isnan().all()


@NATIVE
@pytest.mark.parametrize(("sizes", "extra"), SIZES)
def test_experts(sizes, extra, native):
    """CASES 11, 12, 13: empty and odd groups, NaN past the last, tiles that restart at each group's first token."""
    G, used, N, K = len(sizes), sum(sizes), 72, 160
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32).to(DEVICE)
    a, b = operand(used + extra, K), operand(G * N, K, seed=1).contiguous().view(G, N, K)
    a.view(torch.uint8)[used:] = NAN_BYTE
    rows, squares = codes(used + extra, blocks(K)), codes(G * blocks(N), blocks(K), 2, "columns")
    squares = squares.unflatten(0, (G, blocks(N)))
    out = torch.full((used + extra, N), -7, dtype=torch.bfloat16, device=DEVICE)
    gemm_scaled.grouped_gemm_mxfp8(a, b, rows, squares, ends, out=out, native=native)
    assert (out[used:] == -7).all()

    dy, x = operand(72, used + extra), operand(40, used + extra, seed=1)
    dy.view(torch.uint8)[:, used:] = x.view(torch.uint8)[:, used:] = NAN_BYTE
    tiles = [blocks(size) for size in sizes]
    codes_dy, codes_x = codes(72, sum(tiles) + 2, 5, "columns"), codes(40, sum(tiles) + 2, 6)
    codes_dy.view(torch.uint8)[:, sum(tiles) :] = 255
    operands = dy, x, codes_dy, codes_x, ends
    written = gemm_scaled.grouped_wgrad_mxfp8(*operands, native=native)
    added = gemm_scaled.grouped_wgrad_mxfp8(*operands, out=written.clone(), accumulate=True, native=native)
    assert torch.equal(added, 2 * written)
    start = tile = 0
    for g, size in enumerate(sizes):
        some, own = slice(start, start + size), slice(tile, tile + tiles[g])
        assert_close(out[some], values(a[some], rows[some]) @ values(b[g], squares[g], "2d").t(), BF16_ERROR, f"{g}")
        want = values(dy[:, some], codes_dy[:, own]) @ values(x[:, some], codes_x[:, own]).t()
        assert_close(written[g], want, FP32_ERROR, f"wgrad {g}")
        start, tile = start + size, tile + tiles[g]


@NATIVE
def test_groups_at_multiples_of_a_padding(native):
    sizes, G = [5, 32, 70], 3
    starts = [0, 32, 64]
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32).to(DEVICE)
    dy, x = operand(40, 160), operand(48, 160, seed=1)
    tiles = [0, 1, 2, 5]
    codes_dy, codes_x = codes(40, 5, 5), codes(48, 5, 6)
    got = gemm_scaled.grouped_wgrad_mxfp8(dy, x, codes_dy, codes_x, ends, padding=32, native=native)
    for g in range(G):
        some, own = slice(starts[g], starts[g] + sizes[g]), slice(tiles[g], tiles[g + 1])
        want = values(dy[:, some], codes_dy[:, own]) @ values(x[:, some], codes_x[:, own]).t()
        assert_close(got[g], want, FP32_ERROR, f"{g}")


@NATIVE
@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_blockwise_rewritten_gives_the_blockwise_product(kind, native):
    """128-wide tiles under power-of-two scales as four that share a code."""
    M, N, K = 70, 40, 300
    a, b, tile = operand(M, K), operand(N, K, seed=1), Tile(kind, 128)
    exponents = [torch.randint(-6, 7, tile.scale_shape(n, K), generator=generator(n)) for n in (M, N)]
    scales = [torch.exp2(e.float()) for e in exponents]
    pairs = [reference.blockwise_as_mxfp8(x.cpu(), s, tile) for x, s in zip((a, b), scales, strict=True)]
    got = gemm_scaled.gemm_mxfp8(a, b, *(pair[1].to(DEVICE) for pair in pairs), native=native)
    x, y = (reference.dequantize(data.cpu(), s, tile).double() for data, s in zip((a, b), scales, strict=True))
    assert_close(got.cpu(), x @ y.t(), BF16_ERROR)


def test_what_does_not_fit_is_refused():
    a, b = operand(64, 64), operand(64, 64, seed=1)
    with pytest.raises(ValueError, match=r"scale_inv_b must be E8M0 \(64, 2\) or \(2, 2\), not .*\(64, 3\)"):
        gemm_scaled.gemm_mxfp8(a, b, codes(64, 2), codes(64, 3))
    with pytest.raises(ValueError, match="scale_inv_a must be E8M0"):
        gemm_scaled.gemm_mxfp8(a, b, torch.ones(64, 2, device=DEVICE), codes(64, 2))
