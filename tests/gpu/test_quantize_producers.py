"""Fused producers under tensor tiles, with row weights, from FP8 bytes: bytes are the quantizer's of their own result,
which is within one BF16 ulp of FP64."""

import pytest
import torch
import torch.nn.functional as F
from megafp8.kernels import norm_quantize, swiglu_quantize

from megafp8.fp8 import reference
from megafp8.fp8.formats import Tile
from tests.gpu.quantize_cases import DEVICE, EMULATING, SPECS, assert_same, expected, normal
from tests.gpu.test_quantize_fused import gates, rms_norm, ulps

TENSORS = ["tensorwise", "tensorwise_e5m2", "tensorwise_pow2"]
NORM_SHAPES = [(256, 4096), (130, 304)] if not EMULATING else [(12, 512)]
SWIGLU_SHAPES = [(256, 256), (7, 160), (300, 384)] if not EMULATING else [(130, 128)]


def scalar(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float32, device=DEVICE)


def amax_of(y: torch.Tensor) -> float:
    return y.float().abs().max().item()


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("shape", NORM_SHAPES, ids=str)
def test_norm_under_tensor_tiles(shape, name):
    spec, x = SPECS[name], (normal(*shape) * 3).to(DEVICE)
    weight = (normal(1, shape[1], seed=2)[0] * 0.1 + 1).to(DEVICE)
    out = scalar(0.0)
    both = norm_quantize.rms_norm_quantize(x, weight, spec, colwise=True, high_precision=True, amax_out=out)
    assert ulps(both.y, rms_norm(x.cpu(), weight.cpu(), 1e-5, 0.0)) <= 1.0
    assert out.item() == amax_of(both.y)
    want = expected(both.y, spec)
    assert_same(both.rowwise, want[0], "rowwise")
    assert_same(both.colwise, want[1], "colwise")
    row = norm_quantize.rms_norm_quantize(x, weight, spec)
    assert_same(row.rowwise, want[0], "rowwise alone")
    assert torch.equal(row.rstd, both.rstd)
    rstd, amax = norm_quantize.rms_norm_amax(x, weight)
    assert torch.equal(rstd, both.rstd)
    assert torch.equal(amax, out)
    shared = norm_quantize.rms_norm_quantize(x, weight, spec, colwise=True, amax=amax * 2, rstd=rstd)
    want_shared = expected(both.y, spec, amax=amax * 2)
    assert_same(shared.rowwise, want_shared[0], "shared amax, rowwise")
    assert_same(shared.colwise, want_shared[1], "shared amax, colwise")
    later = norm_quantize.norm_columns_quantize(x, weight, rstd, spec, amax=amax)
    assert_same(later, want[1], "colwise later")


def test_norm_with_a_given_scale_raises_the_history():
    x, spec = normal(130, 256).to(DEVICE), SPECS["tensorwise"]
    weight = torch.ones(256, dtype=torch.bfloat16, device=DEVICE)
    scale, history = scalar(60.0), scalar(0.0)
    for colwise in (False, True):
        made = norm_quantize.rms_norm_quantize(
            x, weight, spec, colwise=colwise, high_precision=True, scale=scale, amax_out=history.zero_()
        )
        want = expected(made.y, spec, True, colwise, scale=scale)
        assert_same(made.rowwise, want[0])
        assert_same(made.colwise, want[1])
        assert history.item() == amax_of(made.y)
        norm_quantize.rms_norm_quantize(x, weight, spec, colwise=colwise, scale=scale, amax_out=history.fill_(1e9))
        assert history.item() == torch.tensor(1e9).item()
    with pytest.raises(ValueError, match="amax or the scale"):
        norm_quantize.norm_columns_quantize(x, weight, made.rstd, spec)


@pytest.mark.parametrize("row", [0, -1])
def test_first_passes_walk_over_all_tiles(row):
    """More tiles than programs; the largest value is in the first row, or in the last."""
    shape = (50, 304) if EMULATING else (2100, 1304)
    x, dy = gates(*shape).to(DEVICE), normal(*shape).to(DEVICE)
    x[row] *= 8
    y = swiglu_quantize.swiglu_quantize(x, SPECS["blockwise"], high_precision=True).y
    assert swiglu_quantize.swiglu_amax(x).item() == amax_of(y) == amax_of(y[row])
    dx = swiglu_quantize.swiglu_grad_quantize(dy, x, SPECS["blockwise"], high_precision=True).dx
    assert swiglu_quantize.swiglu_grad_amax(dy, x).item() == amax_of(dx) == amax_of(dx[row])


@pytest.mark.parametrize("name", [*TENSORS, "blockwise", "mxfp8"])
@pytest.mark.parametrize("shape", SWIGLU_SHAPES, ids=str)
def test_swiglu_with_row_weights(shape, name):
    spec, x, weights = SPECS[name], gates(*shape).to(DEVICE), torch.rand(shape[0], device=DEVICE)
    made = swiglu_quantize.swiglu_quantize(x, spec, weights=weights, colwise=True, high_precision=True)
    gate, up = x.cpu().double().chunk(2, dim=1)
    assert ulps(made.y, F.silu(gate) * up * weights.cpu().double()[:, None]) <= 1.0
    want = expected(made.y, spec)
    assert_same(made.rowwise, want[0], "rowwise")
    assert_same(made.colwise, want[1], "colwise")
    assert_same(swiglu_quantize.swiglu_quantize(x, spec, weights=weights).rowwise, want[0], "rowwise alone")
    if spec.tile.kind == "tensor":
        amax = swiglu_quantize.swiglu_amax(x, weights=weights)
        assert amax.item() == amax_of(made.y)
        shared = swiglu_quantize.swiglu_quantize(x, spec, weights=weights, amax=amax * 3)
        assert_same(shared.rowwise, expected(made.y, spec, amax=amax * 3)[0], "shared amax")
        history = scalar(0.0)
        given = swiglu_quantize.swiglu_quantize(x, spec, weights=weights, scale=scalar(2.0), amax_out=history)
        assert_same(given.rowwise, expected(made.y, spec, scale=scalar(2.0))[0], "given scale")
        assert torch.equal(history, amax)


@pytest.mark.parametrize("name", [*TENSORS, "blockwise"])
@pytest.mark.parametrize("shape", SWIGLU_SHAPES, ids=str)
def test_swiglu_gradient_with_row_weights(shape, name):
    spec, x, weights = SPECS[name], gates(*shape), torch.rand(shape[0])
    dy = normal(*shape, seed=3)
    gate, up, w = (t.clone().requires_grad_() for t in (*x.double().chunk(2, dim=1), weights.double()))
    (F.silu(gate) * up * w[:, None]).backward(dy.double())
    exact = torch.cat((gate.grad, up.grad), dim=1)
    args, options = (dy.to(DEVICE), x.to(DEVICE), spec), {"weights": weights.to(DEVICE), "y_spec": spec}
    forward = swiglu_quantize.swiglu_quantize(x.to(DEVICE), spec, weights=options["weights"], colwise=True)
    if spec.tile.kind == "tensor":
        options["y_amax"] = swiglu_quantize.swiglu_amax(x.to(DEVICE), weights=options["weights"])
    result = swiglu_quantize.swiglu_grad_quantize(*args, **options, high_precision=True)
    assert ulps(result.dx, exact) <= 1.0
    torch.testing.assert_close(result.dweights.cpu().double(), w.grad, rtol=1e-4, atol=1e-4 * w.grad.abs().max().item())
    want = expected(result.dx, spec)
    assert_same(result.rowwise, want[0], "rowwise")
    assert_same(result.colwise, want[1], "colwise")
    assert_same(result.y_colwise, tuple(t.cpu() for t in forward.colwise), "recomputed output")
    again = swiglu_quantize.swiglu_grad_quantize(*args, **options)
    assert again.dx is None
    assert_same(again.colwise, want[1], "bytes alone")
    # The two calls may take different configurations, which add a row's products in another order.
    torch.testing.assert_close(again.dweights, result.dweights, rtol=1e-5, atol=1e-5)
    if spec.tile.kind == "tensor":
        amax = swiglu_quantize.swiglu_grad_amax(args[0], args[1], weights=options["weights"])
        assert amax.item() == amax_of(result.dx)
        history = scalar(0.0)
        given = swiglu_quantize.swiglu_grad_quantize(*args, **options, scale=scalar(0.5), amax_out=history)
        want = expected(result.dx, spec, scale=scalar(0.5))
        assert_same(given.rowwise, want[0], "given scale, rowwise")
        assert_same(given.colwise, want[1], "given scale, colwise")
        assert torch.equal(history, amax)


@pytest.mark.parametrize("name", ["blockwise", "blockwise_fp32", "mxfp8"])
@pytest.mark.parametrize("shape", SWIGLU_SHAPES, ids=str)
def test_swiglu_of_bytes_is_that_of_their_values(shape, name):
    stored = SPECS[name]
    data, scale_inv = expected(gates(*shape), stored, colwise=False)[0]
    values = reference.dequantize(data, scale_inv, Tile("1d", stored.tile.block), torch.bfloat16).to(DEVICE)
    x, spec, dy = (data.to(DEVICE), scale_inv.to(DEVICE)), SPECS["blockwise"], normal(*shape, seed=3).to(DEVICE)
    weights = torch.rand(shape[0], device=DEVICE)
    options = {"colwise": True, "high_precision": True, "weights": weights}
    got, want = (swiglu_quantize.swiglu_quantize(t, spec, **options) for t in (x, values))
    assert torch.equal(got.y, want.y)
    assert_same(got.rowwise, tuple(t.cpu() for t in want.rowwise), "rowwise")
    assert_same(got.colwise, tuple(t.cpu() for t in want.colwise), "colwise")
    options["y_spec"] = spec
    got, want = (swiglu_quantize.swiglu_grad_quantize(dy, t, spec, **options) for t in (x, values))
    assert torch.equal(got.dx, want.dx)
    assert torch.equal(got.dweights, want.dweights)
    for part in ("rowwise", "colwise", "y_colwise"):
        assert_same(getattr(got, part), tuple(t.cpu() for t in getattr(want, part)), part)


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("shape", SWIGLU_SHAPES, ids=str)
def test_swiglu_keeps_its_input_as_bytes(shape, name):
    x, spec = gates(*shape), SPECS["blockwise"]
    x[0, 0], x[1, 1] = float("inf"), float("nan")
    for colwise in (False, True):
        made = swiglu_quantize.swiglu_quantize(x.to(DEVICE), spec, colwise=colwise, x_spec=SPECS[name])
        assert_same(made.x_rowwise, expected(x, SPECS[name], True, False)[0], "kept input")
        plain = swiglu_quantize.swiglu_quantize(x.to(DEVICE), spec, colwise=colwise)
        assert plain.x_rowwise is None
        assert_same(made.rowwise, tuple(t.cpu() for t in plain.rowwise), "rowwise")
    with pytest.raises(ValueError, match="high precision"):
        swiglu_quantize.swiglu_quantize(made.x_rowwise, spec, x_spec=spec)
