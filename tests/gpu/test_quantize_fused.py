"""Fused producers: values within one BF16 ulp of FP64, bytes equal to the quantizer's bytes of those values."""

import pytest
import torch
import torch.nn.functional as F
from megafp8.kernels import norm_quantize, quantize, swiglu_quantize

from tests.gpu.quantize_cases import (
    DEVICE,
    EMULATING,
    ONE_D,
    SPECS,
    assert_same,
    expected,
    normal,
    raw,
)

NORM_SHAPES = [(256, 4096), (128, 7168), (384, 128), (5, 712), (130, 304), (2, 20480)]
SWIGLU_SHAPES = [(256, 256), (7, 160), (300, 384), (129, 1)]
if EMULATING:
    NORM_SHAPES, SWIGLU_SHAPES = [(12, 512), (5, 712)], [(128, 128), (7, 160)]


def ulps(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Largest error in units of BF16's last place of the exact value (2^-133 at least); NaN counts as infinite."""
    exponent = torch.frexp(exact.double())[1].clamp(min=-125)
    error = (got.cpu().double() - exact).abs() / 2.0 ** (exponent - 8).double()
    return error.nan_to_num(nan=float("inf")).max().item() if got.numel() else 0.0


def gates(rows: int, columns: int) -> torch.Tensor:
    """fc1 outputs whose gates reach far enough for exp to underflow in FP32."""
    x = normal(rows, 2 * columns, torch.float32)
    x[:, :columns] *= 10.0 ** torch.linspace(-3, 1.7, columns)
    x[:, columns:] *= 10.0 ** torch.linspace(2, -2, columns)
    return x.bfloat16()


def rms_norm(x, weight, eps, offset):
    x = x.double()
    return x * (x.square().mean(1, keepdim=True) + eps).rsqrt() * (weight.double() + offset)


@pytest.mark.parametrize("spec", ONE_D.values(), ids=ONE_D)
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm(shape, spec, offset):
    x, weight = normal(*shape) * 3, normal(1, shape[1], seed=2)[0] * 0.1 + 1 - offset
    args = x.to(DEVICE), weight.to(DEVICE), spec
    options = {"eps": 1e-5, "weight_offset": offset}
    both = norm_quantize.rms_norm_quantize(*args, **options, rowwise=True, colwise=True, high_precision=True)
    exact = rms_norm(x, weight, 1e-5, offset)
    assert ulps(both.y, exact) <= 1.0
    rstd = (x.double().square().mean(1) + 1e-5).rsqrt()
    torch.testing.assert_close(both.rstd.cpu().double(), rstd, rtol=1e-6, atol=0)
    want = expected(both.y, spec)
    assert_same(both.rowwise, want[0], "rowwise")
    assert_same(both.colwise, want[1], "colwise")
    # The rowwise copy alone, and the colwise copy later from what was saved, are the same bits.
    row = norm_quantize.rms_norm_quantize(*args, **options)
    assert row.y is None
    assert row.colwise is None
    assert_same(row.rowwise, want[0], "rowwise alone")
    assert torch.equal(row.rstd, both.rstd)
    later = norm_quantize.norm_columns_quantize(*args[:2], row.rstd, spec, weight_offset=offset)
    assert_same(later, want[1], "colwise later")


def test_norm_of_nonfinite_rows_reaches_the_bytes():
    x = normal(8, 256)
    x[3, 5], x[6, 7] = float("inf"), float("nan")
    result = norm_quantize.rms_norm_quantize(x.to(DEVICE), torch.ones(256, device=DEVICE), SPECS["blockwise"])
    bad = (result.rowwise[0].view(torch.uint8) == 0x7F).any(1)
    assert bad.tolist() == [row in (3, 6) for row in range(8)]


def test_norm_of_no_tokens_and_of_strided_rows():
    weight = normal(1, 256)[0].to(DEVICE)
    empty = norm_quantize.rms_norm_quantize(
        torch.empty(0, 256, dtype=torch.bfloat16, device=DEVICE), weight, SPECS["blockwise"], colwise=True
    )
    assert empty.rowwise[0].shape == (0, 256)
    assert empty.colwise[0].shape == (256, 0)
    wide = normal(64, 512).to(DEVICE)
    strided = norm_quantize.rms_norm_quantize(wide[:, :256], weight, SPECS["blockwise"], colwise=True)
    packed = norm_quantize.rms_norm_quantize(wide[:, :256].contiguous(), weight, SPECS["blockwise"], colwise=True)
    for got, want in ((strided.rowwise, packed.rowwise), (strided.colwise, packed.colwise)):
        assert_same(got, tuple(t.cpu() for t in want))


@pytest.mark.parametrize("spec", ONE_D.values(), ids=ONE_D)
@pytest.mark.parametrize("shape", SWIGLU_SHAPES, ids=str)
def test_swiglu(shape, spec):
    x = gates(*shape)
    gate, up = x.double().chunk(2, dim=1)
    both = swiglu_quantize.swiglu_quantize(x.to(DEVICE), spec, colwise=True, high_precision=True)
    assert ulps(both.y, F.silu(gate) * up) <= 1.0
    want = expected(both.y, spec)
    assert_same(both.rowwise, want[0], "rowwise")
    assert_same(both.colwise, want[1], "colwise")
    row = swiglu_quantize.swiglu_quantize(x.to(DEVICE), spec)
    assert row.y is None
    assert_same(row.rowwise, want[0], "rowwise alone")


@pytest.mark.parametrize("spec", ONE_D.values(), ids=ONE_D)
@pytest.mark.parametrize("shape", SWIGLU_SHAPES, ids=str)
def test_swiglu_grad(shape, spec):
    x = gates(*shape)
    dy = normal(*shape, seed=3)
    gate, up = (t.clone().requires_grad_() for t in x.double().chunk(2, dim=1))
    (F.silu(gate) * up).backward(dy.double())
    exact = torch.cat((gate.grad, up.grad), dim=1)
    y_spec = SPECS["mxfp8" if spec.tile.block == 128 else "blockwise"]
    args = dy.to(DEVICE), x.to(DEVICE), spec
    result = swiglu_quantize.swiglu_grad_quantize(*args, y_spec=y_spec, high_precision=True)
    assert ulps(result.dx, exact) <= 1.0
    want = expected(result.dx, spec)
    assert_same(result.rowwise, want[0], "rowwise")
    assert_same(result.colwise, want[1], "colwise")
    forward = swiglu_quantize.swiglu_quantize(x.to(DEVICE), y_spec, rowwise=False, colwise=True)
    assert_same(result.y_colwise, tuple(t.cpu() for t in forward.colwise), "recomputed output")
    bytes_only = swiglu_quantize.swiglu_grad_quantize(*args, colwise=False)
    assert bytes_only.dx is None
    assert bytes_only.y_colwise is None
    assert_same(bytes_only.rowwise, want[0], "rowwise alone")


def test_unfit_arguments_are_named():
    x = normal(8, 256).to(DEVICE)
    with pytest.raises(ValueError, match="1D tiles"):
        swiglu_quantize.swiglu_quantize(x, SPECS["blockwise_2d"])
    with pytest.raises(ValueError, match="tensor tiles"):
        swiglu_quantize.swiglu_quantize(x, SPECS["blockwise"], scale=x[0, :1].float())
    with pytest.raises(ValueError, match="y_amax or y_scale"):
        swiglu_quantize.swiglu_grad_quantize(x[:, :128], x, SPECS["blockwise"], y_spec=SPECS["tensorwise"])
    with pytest.raises(ValueError, match="BF16"):
        swiglu_quantize.swiglu_quantize(x.float(), SPECS["blockwise"])
    with pytest.raises(ValueError, match="dy must be"):
        swiglu_quantize.swiglu_grad_quantize(x, x, SPECS["blockwise"])
    with pytest.raises(ValueError, match="weight"):
        norm_quantize.rms_norm_quantize(x, x[0, :8], SPECS["blockwise"])


def test_fused_bytes_equal_the_quantization_kernels_bytes():
    x = gates(256 if not EMULATING else 128, 128).to(DEVICE)
    fused = swiglu_quantize.swiglu_quantize(x, SPECS["blockwise"], colwise=True, high_precision=True)
    row, col = quantize.quantize(fused.y, SPECS["blockwise"], True, True)
    assert torch.equal(raw(fused.rowwise[0]), raw(row[0]))
    assert torch.equal(raw(fused.colwise[0]), raw(col[0]))
