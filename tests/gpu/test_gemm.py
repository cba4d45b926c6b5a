"""Dense FP8 GEMM kernels against float64 products of the dequantized operands. Padding and outputs hold NaN."""

import pytest
import torch
import torch.nn.functional as F
from megafp8.kernels import gemm, gemm_launch

from tests.gpu.gemm_cases import (
    BACKENDS,
    BF16_ERROR,
    DEVICE,
    E4M3,
    E5M2,
    FP32_ERROR,
    FP32_ERROR_POSITIVE,
    HOPPER,
    INTERPRETING,
    assert_close,
    blocks,
    dequantized,
    error,
    magnitudes,
    operand,
    poisoned,
    row_scales,
    square_scales,
)

SHAPES = [(256, 384, 512), (130, 200, 320), (1, 8, 128), (300, 264, 896), (128, 100, 208), (96, 72, 100), (64, 136, 64)]
if INTERPRETING:
    SHAPES = [(130, 136, 320), (1, 8, 128), (96, 72, 100)]
CONFIGS = {"small": gemm_launch.SMALL, "large": gemm_launch.LARGE, "adding": gemm_launch.ADDING}


@pytest.fixture(params=[(b, c) for b in BACKENDS for c in (CONFIGS if b == "gluon" else ["only"])], ids=str)
def backend(request, monkeypatch):
    """Each backend, the Gluon kernel with each of its configurations whatever the shape."""
    name, config = request.param
    if name == "gluon":
        chosen = gemm_launch.hopper_config
        monkeypatch.setattr(gemm_launch, "hopper_config",
                            lambda p, n: chosen(p, n) if p.fast else CONFIGS[config])  # fmt: skip
    return name


@pytest.mark.parametrize("a_dtype", [E4M3, E5M2])
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_tensorwise(M, N, K, a_dtype, backend):
    a, b = operand(M, K, a_dtype), operand(N, K, seed=1)
    scale_a, scale_b = torch.tensor([0.37], device=DEVICE), torch.tensor(2.5, device=DEVICE)
    want = a.double() @ b.double().t() * (scale_a * scale_b).double()
    got = gemm.gemm_tensorwise(a, b, scale_a, scale_b, out=poisoned(M, N), backend=backend)
    assert_close(got, want, BF16_ERROR, "BF16")
    got = gemm.gemm_tensorwise(a, b, scale_a, scale_b, out_dtype=torch.float32, backend=backend)
    assert_close(got, want, FP32_ERROR, "FP32")
    got = gemm.gemm_tensorwise(a, b, scale_a, scale_b, fast_accum=True, backend=backend)
    assert_close(got, want, 3e-3, "fast accumulation")


@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_1d2d(M, N, K, backend):
    a, b = operand(M, K), operand(N, K, seed=1)
    scale_a, scale_b = row_scales(M, blocks(K)), square_scales(blocks(N), blocks(K))
    want = dequantized(a, scale_a) @ dequantized(b, scale_b, True).t()
    got = gemm.gemm_1d2d(a, b, scale_a, scale_b, out=poisoned(M, N), backend=backend)
    assert_close(got, want, BF16_ERROR)
    bias = torch.randn(N, device=DEVICE).bfloat16()
    transposed = scale_b.t().contiguous().t()
    got = gemm.gemm_1d2d(a, b, scale_a.contiguous(), transposed, bias=bias, backend=backend)
    assert_close(got, want + bias.double(), BF16_ERROR, "bias, scales of other strides")


@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_1d1d_writes_and_accumulates(M, N, K, backend):
    """CASES 46: what is in the buffer is added to in FP32, or overwritten."""
    a, b = operand(M, K), operand(N, K, seed=1)
    scale_a, scale_b = row_scales(M, blocks(K)), row_scales(N, blocks(K), seed=2)
    want = dequantized(a, scale_a) @ dequantized(b, scale_b).t()
    got = gemm.gemm_1d1d(a, b, scale_a, scale_b, out=poisoned(M, N, dtype=torch.float32), backend=backend)
    assert_close(got, want, FP32_ERROR, "written")
    before = torch.randn(M, N, device=DEVICE) * want.std(correction=0).float()
    got = gemm.gemm_1d1d(a, b, scale_a, scale_b, out=before.clone(), accumulate=True, backend=backend)
    assert_close(got, want + before.double(), FP32_ERROR, "accumulated")
    bias = torch.randn(N, device=DEVICE) * want.std(correction=0).float()
    got = gemm.gemm_1d1d(a, b, scale_a, scale_b, bias=bias, out=before.clone(), accumulate=True, backend=backend)
    assert_close(got, want + before.double() + bias.double(), FP32_ERROR, "accumulated with a bias")


@pytest.mark.parametrize("K", [64, 128, 192, 320, 640, 896, 1152])
def test_k_tails_with_magnitudes_per_block(K, backend):
    """CASES 43: the scale of every K block counts, the last one's too, however long the block."""
    M, N = 96, 128
    a, b = operand(M, K), operand(N, K, seed=1)
    scale_a, scale_b = row_scales(M, blocks(K)), row_scales(N, blocks(K), seed=2)
    scale_a[:, -1] *= 1e3  # so that a wrong last block shows
    got = gemm.gemm_1d1d(a, b, scale_a, scale_b, backend=backend)
    assert_close(got, dequantized(a, scale_a) @ dequantized(b, scale_b).t(), FP32_ERROR)
    square = square_scales(1, blocks(K))
    got = gemm.gemm_1d2d(a, b, scale_a, square, out_dtype=torch.float32, backend=backend)
    assert_close(got, dequantized(a, scale_a) @ dequantized(b, square, True).t(), FP32_ERROR)


@pytest.mark.skipif(INTERPRETING, reason="the interpreter does not round as tensor cores do")
@pytest.mark.parametrize("positive", [False, True])
def test_error_is_flat_in_k(positive, backend):
    tolerance = FP32_ERROR_POSITIVE if positive else FP32_ERROR
    one = torch.ones(1, device=DEVICE)
    for K in (64, 192, 1000, 4096, 16384):
        a, b = operand(256, K, positive=positive), operand(256, K, seed=1, positive=positive)
        got = gemm.gemm_tensorwise(a, b, one, one, out_dtype=torch.float32, backend=backend)
        assert_close(got, a.double() @ b.double().t(), tolerance, f"tensorwise, K {K}")
        scale_a, scale_b = row_scales(256, blocks(K)), row_scales(256, blocks(K), seed=2)
        got = gemm.gemm_1d1d(a, b, scale_a, scale_b, backend=backend)
        assert_close(got, dequantized(a, scale_a) @ dequantized(b, scale_b).t(), tolerance, f"1D1D, K {K}")


@pytest.mark.skipif(not HOPPER, reason="compares with cuBLASLt's blockwise GEMMs, which Hopper has")
@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("K", [2048, 16384])
def test_error_is_not_above_cublaslt(K, positive, backend):
    """Frobenius, FP32 results: never more than 1.2 times cuBLASLt's on the same operands."""
    M = N = 1024
    a, b = operand(M, K, positive=positive).contiguous(), operand(N, K, seed=1, positive=positive).contiguous()
    scale_a, scale_b = row_scales(M, K // 128), row_scales(N, K // 128, seed=2)
    squares, one = square_scales(N // 128, K // 128), torch.ones(1, device=DEVICE)
    row, square, tensor = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128, F.ScalingType.TensorWise
    fp32 = {"out_dtype": torch.float32, "backend": backend}
    cases = {
        "1D1D": (gemm.gemm_1d1d(a, b, scale_a, scale_b, **fp32), (scale_a, row, scale_b, row),
                 dequantized(a, scale_a) @ dequantized(b, scale_b).t()),
        "1D2D": (gemm.gemm_1d2d(a, b, scale_a, squares, **fp32), (scale_a, row, squares.t(), square),
                 dequantized(a, scale_a) @ dequantized(b, squares, True).t()),
        "tensorwise": (gemm.gemm_tensorwise(a, b, one, one, **fp32), (one, tensor, one, tensor),
                       a.double() @ b.double().t()),
    }  # fmt: skip
    for kind, (got, scales, want) in cases.items():
        rival = F.scaled_mm(a, b.t(), *scales, output_dtype=torch.float32)
        assert error(got, want) <= 1.2 * error(rival, want), kind


@pytest.mark.skipif(not HOPPER, reason="the Gluon kernel's configurations")
@pytest.mark.parametrize(("M", "N", "K"), [(256, 384, 512), (300, 264, 896), (96, 72, 100)])
@pytest.mark.parametrize("positive", [False, True])
def test_every_configuration_adds_the_same_bits(M, N, K, positive, monkeypatch):
    """Registers, a stage of the ring, and TMA's addition in L2 round alike; so does what is written and added later."""
    a, b = operand(M, K, E5M2, positive=positive), operand(N, K, seed=1, positive=positive)
    scale_a, scale_b = row_scales(M, blocks(K)), row_scales(N, blocks(K), seed=2)
    one, before = torch.tensor([0.37], device=DEVICE), torch.randn(M, N, device=DEVICE)
    sums = {}
    for name, config in CONFIGS.items():
        monkeypatch.setattr(gemm_launch, "hopper_config", lambda p, n, config=config: config)
        for added in (True, False):
            out = [before.clone() if added else poisoned(M, N, dtype=torch.float32) for _ in range(2)]
            gemm.gemm_1d1d(a, b, scale_a, scale_b, out=out[0], accumulate=added)
            gemm.gemm_tensorwise(a, b, one, one, out=out[1], accumulate=added)
            sums[name, added] = out if added else [before + x for x in out]
    for key, (block, tensor) in sums.items():
        assert torch.equal(block, sums["small", True][0]), f"1D1D, {key}"
        assert torch.equal(tensor, sums["small", True][1]), f"tensorwise, {key}"


def test_same_bits_every_time(backend):
    a, b = operand(300, 1152), operand(264, 1152, seed=1)
    scale_a, scale_b = row_scales(300, 9), row_scales(264, 9, seed=2)
    first = gemm.gemm_1d1d(a, b, scale_a, scale_b, backend=backend)
    assert torch.equal(first, gemm.gemm_1d1d(a, b, scale_a, scale_b, backend=backend))


@pytest.mark.parametrize("kind", ["tensorwise", "1D2D"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_part_of_the_rows_is_multiplied_as_the_whole(kind, name):
    """Whatever tiles the kernel chooses: chunks that overlap with communication must not change a bit."""
    M, N, K, part = (4400, 4096, 640, 300) if not INTERPRETING else (200, 128, 256, 72)
    a, b, one = operand(M, K), operand(N, K, seed=1), torch.ones(1, device=DEVICE)
    rows, squares = row_scales(M, blocks(K)), square_scales(blocks(N), blocks(K))

    def product(some):
        if kind == "tensorwise":
            return gemm.gemm_tensorwise(a[some], b, one, one, backend=name)
        return gemm.gemm_1d2d(a[some], b, rows[some], squares, backend=name)

    assert torch.equal(product(slice(None))[M - part :], product(slice(M - part, M)))


def test_nan_and_inf_reach_the_result(backend):
    a, b = operand(64, 256), operand(128, 256, seed=1)
    a[3, 200] = float("nan")
    one = torch.ones(1, device=DEVICE)
    got = gemm.gemm_tensorwise(a, b, one, one, backend=backend)
    assert got[3].isnan().all()
    assert not torch.cat([got[:3], got[4:]]).isnan().any()


def test_empty_problems(backend):
    one = torch.ones(1, device=DEVICE)
    for M, N, K in ((0, 8, 128), (8, 0, 128), (8, 8, 0)):
        a, b = (torch.zeros(n, K, device=DEVICE).to(E4M3) for n in (M, N))
        got = gemm.gemm_tensorwise(a, b, one, one, backend=backend)
        assert got.shape == (M, N)
        assert not got.any()


def test_unaligned_views_are_right(backend):
    """Bases that TMA cannot address, as slices of packed buffers have."""
    storage = operand(70, 400).contiguous()
    a = storage[1:67, 3:259]
    b = operand(72, 256, seed=1)
    scale_a, scale_b = magnitudes(66, 2), magnitudes(1, 9)[:, 3:5]
    got = gemm.gemm_1d2d(a, b, scale_a, scale_b, backend=backend)
    assert_close(got, dequantized(a, scale_a) @ dequantized(b, scale_b, True).t(), BF16_ERROR)
