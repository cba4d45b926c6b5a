"""Grouped GEMMs of experts: the reference backend against float64, and the high-precision twins."""

import pytest
import torch

from megafp8.fp8 import gemm, get_recipe, grouped_matmul
from megafp8.fp8.storage import QuantizedStorage

RECIPES = {
    "tensorwise": get_recipe("tensorwise"),
    "blockwise": get_recipe("blockwise"),
    "mxfp8": get_recipe("mxfp8"),
}
COUNTS = {"ragged": [1, 0, 37, 130], "none": [0, 0, 0], "padded": [128, 0, 256]}
N, K, EXTRA = 70, 200, 9
CASES = pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def with_extra(storage, dim):
    """The operand in a longer buffer, whose tokens past the last expert are NaN."""
    shape = list(storage.data.shape)
    shape[dim] = EXTRA
    data = torch.cat([storage.data.view(torch.uint8), torch.full(shape, 0x7F, dtype=torch.uint8)], dim)
    scale_inv = storage.scale_inv
    if storage.tile.kind != "tensor":
        shape = list(scale_inv.shape)
        shape[dim] = EXTRA if dim == 0 else 1
        raw = scale_inv.view(torch.uint8) if scale_inv.dtype == torch.float8_e8m0fnu else scale_inv
        poison = torch.full(shape, 255 if raw.dtype == torch.uint8 else float("nan"), dtype=raw.dtype)
        scale_inv = torch.cat([raw, poison], dim).view(scale_inv.dtype)
    return QuantizedStorage(data.view(storage.data.dtype), scale_inv, storage.tile, storage.scale, storage.orientation)


def stacked(parts):
    """Experts' weights as one operand, each expert in a buffer with a gap after it."""
    data = torch.stack([torch.cat([p.data.view(torch.uint8).flatten(), torch.full((16,), 0x7F).byte()]) for p in parts])
    data = data[:, :-16].unflatten(1, parts[0].data.shape).view(parts[0].data.dtype)
    raw = [p.scale_inv.view(torch.uint8) if p.scale_inv.dtype == torch.float8_e8m0fnu else p.scale_inv for p in parts]
    scale_inv = torch.cat(raw) if parts[0].tile.kind == "tensor" else torch.stack(raw)
    scale_inv = scale_inv.view(parts[0].scale_inv.dtype)
    return QuantizedStorage(data, scale_inv, parts[0].tile, parts[0].scale, parts[0].orientation)


def operands(recipe, counts):
    tokens = sum(counts)
    x = recipe.quantizer("input").quantize_grouped(random(tokens, K, seed=1), counts)
    dy = recipe.quantizer("grad_output").quantize_grouped(random(tokens, N, seed=2), counts)
    w = [recipe.quantizer("weight").quantize(random(N, K, seed=3 + g), colwise=True) for g in range(len(counts))]
    return x, dy, w


def ends_of(counts):
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def error(y, expected):
    return ((y.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


@ALL_RECIPES
@CASES
def test_cases_12_fprop_and_dgrad_of_experts(recipe, counts):
    """CASES 11, 12, 13: experts of any size; NaN past the last one."""
    x, dy, w = operands(recipe, counts)
    ends, used = ends_of(counts), sum(counts)
    y = gemm.grouped_fprop(with_extra(x.rowwise, 0), stacked([q.rowwise for q in w]), ends, torch.float32)
    dx = gemm.grouped_dgrad(with_extra(dy.rowwise, 0), stacked([q.colwise for q in w]), ends, torch.float32)
    assert y.shape == (used + EXTRA, N)
    assert dx.shape == (used + EXTRA, K)
    start = 0
    for g, end in enumerate(ends.tolist()):
        weight = w[g].rowwise.dequantize(torch.float64)
        expected = x.rowwise.dequantize(torch.float64)[start:end] @ weight.t()
        assert error(y[start:end], expected) < 1e-6
        assert error(dx[start:end], dy.rowwise.dequantize(torch.float64)[start:end] @ weight) < 1e-6
        start = end


@ALL_RECIPES
@CASES
def test_cases_11_wgrad_of_experts(recipe, counts):
    """CASES 11, 46: an expert without tokens gets zeros, or leaves its buffer; buffers may lie apart."""
    x, dy, _ = operands(recipe, counts)
    ends = ends_of(counts)
    dy_col, x_col = with_extra(dy.colwise, 1), with_extra(x.colwise, 1)
    written = gemm.grouped_wgrad(dy_col, x_col, ends)
    apart = torch.full((len(counts), N * K + 5), 0.5)
    out = apart[:, :-5].unflatten(1, (N, K))
    assert gemm.grouped_wgrad(dy_col, x_col, ends, out=out) is out
    dy64, x64 = dy.colwise.dequantize(torch.float64), x.colwise.dequantize(torch.float64)
    start = 0
    for g, end in enumerate(ends.tolist()):
        expected = dy64[:, start:end] @ x64[:, start:end].t()
        assert error(written[g], expected) < 1e-6
        assert torch.equal(out[g], written[g] + 0.5)
        start = end
    assert (apart[:, -5:] == 0.5).all()


def test_the_tiles_of_an_expert_are_its_own():
    """A scale taken from the tile before is seen: magnitudes differ by expert."""
    recipe, counts = RECIPES["blockwise"], [5, 130]
    dy, x = random(135, N, seed=1), random(135, K, seed=2)
    x[5:] *= 1000
    q_dy = recipe.quantizer("grad_output").quantize_grouped(dy, counts).colwise
    q_x = recipe.quantizer("input").quantize_grouped(x, counts).colwise
    dw = gemm.grouped_wgrad(q_dy, q_x, ends_of(counts))
    assert error(dw[0], dy[:5].double().t() @ x[:5].double()) < 0.06
    assert error(dw[1], dy[5:].double().t() @ x[5:].double()) < 0.06


@CASES
def test_high_precision_twins(counts):
    ends, used = ends_of(counts), sum(counts)
    x, dy = random(used + EXTRA, K, seed=1).float(), random(used + EXTRA, N, seed=2).float()
    x[used:] = dy[used:] = float("nan")
    weight = random(len(counts), N * K + 3, seed=3).float()[:, :-3].unflatten(1, (N, K))
    y, dx = grouped_matmul.fprop(x, weight, ends), grouped_matmul.dgrad(dy, weight, ends)
    out = torch.ones(len(counts), N, K)
    assert grouped_matmul.wgrad(dy, x, ends, out) is out
    start = 0
    for g, end in enumerate(ends.tolist()):
        rows = slice(start, end)
        assert error(y[rows], x[rows].double() @ weight[g].double().t()) < 1e-6
        assert error(dx[rows], dy[rows].double() @ weight[g].double()) < 1e-6
        assert error(out[g], 1 + dy[rows].double().t() @ x[rows].double()) < 1e-6
        start = end
    assert torch.equal(grouped_matmul.wgrad(dy, x, ends), grouped_matmul.wgrad(dy, x, ends, torch.zeros_like(out)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_high_precision_without_rows(dtype, monkeypatch):
    """CASES 11: a rank that no token goes to asks no library, and keeps what is in its gradients."""
    monkeypatch.setattr(torch, "_grouped_mm", None)
    monkeypatch.setattr(grouped_matmul, "_rows", None)  # it would wait for the device
    ends, x, dy = ends_of([0, 0, 0]), torch.empty(0, K, dtype=dtype), torch.empty(0, N, dtype=dtype)
    weight, out = torch.randn(3, N, K).to(dtype), torch.ones(3, N, K)
    for made, width in ((grouped_matmul.fprop(x, weight, ends), N), (grouped_matmul.dgrad(dy, weight, ends), K)):
        assert made.shape == (0, width)
        assert made.dtype == dtype
    assert (grouped_matmul.wgrad(dy, x, ends, out) == 1).all()
    assert (grouped_matmul.wgrad(dy, x, ends, out, adds=False) == 0).all()
    assert (grouped_matmul.wgrad(dy, x, ends) == 0).all()
