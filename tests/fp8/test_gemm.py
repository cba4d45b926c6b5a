"""GEMMs against FP64 of the dequantized operands, and which orientations they want on which device."""

import logging

import pytest
import torch

from megafp8.fp8 import gemm, get_recipe, reference, scaled_mm
from megafp8.fp8.formats import Tile
from megafp8.fp8.storage import QuantizedStorage

RECIPES = {
    "tensorwise": get_recipe("tensorwise"),
    "blockwise": get_recipe("blockwise"),
    "blockwise-fp32": get_recipe("blockwise", power_of_two_scales=False),
    "blockwise-hybrid": get_recipe("blockwise", fp8_format="hybrid"),
    "blockwise-1d": get_recipe("blockwise", weight_tile="1d"),
    "mxfp8": get_recipe("mxfp8"),
    "mxfp8-1d": get_recipe("mxfp8", weight_tile="1d"),
}
ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


def random(rows, cols, positive=False, blocks=False, seed=0):
    generator = torch.Generator().manual_seed(seed * 7919 + rows * 1000 + cols)
    x = torch.randn(rows, cols, generator=generator)
    if positive:
        x = x.abs()
    if blocks:  # magnitudes 1e-3 to 1e3 a block of K
        x *= (10 ** (torch.rand(-(-cols // 128), generator=generator) * 6 - 3)).repeat_interleave(128)[:cols]
    return x.bfloat16()


def error(y, expected):
    return ((y.double() - expected).norm() / expected.norm()).item()


def operands(recipe, m=37, n=70, k=200):
    quantized = {
        "x": recipe.quantizer("input").quantize(random(m, k, seed=1), colwise=True),
        "w": recipe.quantizer("weight").quantize(random(n, k, seed=2), colwise=True),
        "dy": recipe.quantizer("grad_output").quantize(random(m, n, seed=3), colwise=True),
    }
    return [quantized[name] for name in ("x", "w", "dy")]


def fp64(quantized, orientation):
    return getattr(quantized, orientation).dequantize(torch.float64)


@ALL_RECIPES
@pytest.mark.parametrize("shape", [(37, 70, 200), (1, 1, 1), (7, 300, 128), (130, 33, 385)])
def test_three_gemms(recipe, shape):
    """CASES 43, 90: tails in M, N and K, one row, one column."""
    x, w, dy = operands(recipe, *shape)
    y = gemm.fprop(x.rowwise, w.rowwise, out_dtype=torch.float32)
    assert error(y, fp64(x, "rowwise") @ fp64(w, "rowwise").t()) < 1e-6
    dx = gemm.dgrad(dy.rowwise, w.colwise, out_dtype=torch.float32)
    assert error(dx, fp64(dy, "rowwise") @ fp64(w, "colwise").t()) < 1e-6
    dw = gemm.wgrad(dy.colwise, x.colwise)
    assert error(dw, fp64(dy, "colwise") @ fp64(x, "colwise").t()) < 1e-6
    assert dw.dtype == torch.float32


@pytest.mark.parametrize("name", ["blockwise", "blockwise-fp32", "mxfp8"])
@pytest.mark.parametrize("k", [64, 128, 192, 320, 640, 896, 1152])
def test_cases_43_every_k_block_has_its_own_scale(name, k):
    """CASES 43: K that is no multiple of a block; magnitudes from 1e-3 to 1e3 a block."""
    recipe = RECIPES[name]
    x = recipe.quantizer("input").quantize(random(40, k, blocks=True))
    w = recipe.quantizer("weight").quantize(random(48, k, blocks=True, seed=4))
    expected = fp64(x, "rowwise") @ fp64(w, "rowwise").t()
    assert error(reference.matmul(x.rowwise, w.rowwise), expected) < 1e-6
    assert error(reference.matmul_promoted(x.rowwise, w.rowwise), expected) < 1e-6


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8"])
def test_error_is_flat_in_k(name, positive):
    recipe = RECIPES[name]
    x = recipe.quantizer("input").quantize(random(16, 16384, positive))
    w = recipe.quantizer("weight").quantize(random(24, 16384, positive, seed=5))
    assert error(reference.matmul(x.rowwise, w.rowwise), fp64(x, "rowwise") @ fp64(w, "rowwise").t()) < 1e-6


def test_output_is_rounded_once_with_its_bias():
    x, w, _ = operands(RECIPES["blockwise"])
    bias = random(1, 70, seed=6)[0]
    expected = (fp64(x, "rowwise") @ fp64(w, "rowwise").t() + bias.double()).bfloat16()
    y = gemm.fprop(x.rowwise, w.rowwise, bias)
    assert y.dtype == torch.bfloat16
    assert (y != expected).float().mean() < 0.01  # FP32 sums on the edge between two BF16 numbers
    assert error(y, expected.double()) < 1e-4


def test_cases_46_wgrad_is_added_in_fp32():
    """CASES 46: 256 then 1 make 257 (256 in BF16); a filled buffer is added to, never overwritten."""
    recipe = RECIPES["blockwise"]
    buffer = torch.full((3, 2), 0.25)
    for value in (256.0, 1.0):
        dy = recipe.quantizer("grad_output").quantize(torch.full((1, 3), value), colwise=True)
        x = recipe.quantizer("input").quantize(torch.ones(1, 2), colwise=True)
        assert gemm.wgrad(dy.colwise, x.colwise, out=buffer) is buffer
    assert torch.equal(buffer, torch.full((3, 2), 257.25))


@ALL_RECIPES
def test_fused_accumulation_equals_adding_the_products(recipe):
    """CASES 46: four microbatches, bit for bit."""
    fused = torch.zeros(70, 200)
    added = torch.zeros(70, 200)
    for m in (5, 37, 64, 1):
        x, _, dy = operands(recipe, m)
        gemm.wgrad(dy.colwise, x.colwise, out=fused)
        added += gemm.wgrad(dy.colwise, x.colwise)
    assert torch.equal(fused, added)


@ALL_RECIPES
def test_empty_operands(recipe):
    """CASES 11: no tokens give an empty output and a zero wgrad of weight shape; the buffer keeps what it had."""
    x, w, dy = operands(recipe, m=0)
    assert gemm.fprop(x.rowwise, w.rowwise).shape == (0, 70)
    assert gemm.dgrad(dy.rowwise, w.colwise).shape == (0, 200)
    buffer = torch.ones(70, 200)
    gemm.wgrad(dy.colwise, x.colwise, out=buffer)
    assert torch.equal(buffer, torch.ones(70, 200))


@ALL_RECIPES
def test_nonfinite_elements_reach_the_result(recipe):
    values = random(4, 200)
    values[1, 3] = float("-inf")
    x = recipe.quantizer("input").quantize(values)
    w = recipe.quantizer("weight").quantize(random(6, 200, seed=7))
    y = gemm.fprop(x.rowwise, w.rowwise)
    assert y[1].isnan().all()
    assert y[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("role", ["input", "weight"])
def test_blockwise_through_the_mxfp8_gemm(role):
    """Hardware with block-scaled tensor cores runs blockwise as MXFP8: the same numbers, the same product."""
    x, w, dy = operands(RECIPES["blockwise"])
    a, b = (x.rowwise, w.rowwise) if role == "input" else (dy.colwise, x.colwise)

    def rewritten(s):
        data, codes = reference.blockwise_as_mxfp8(s.data, s.scale_inv, s.tile)
        return QuantizedStorage(data, codes, Tile("1d", 32), RECIPES["mxfp8"].scale, s.orientation)

    assert torch.equal(reference.matmul(rewritten(a), rewritten(b)), reference.matmul(a, b))


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("any_layout", [False, True])
def test_needs_follow_the_capability(name, any_layout, monkeypatch):
    """Tensorwise keeps no transpose where the hardware takes any layout; tiles run along K everywhere."""
    monkeypatch.setattr(gemm, "capability", lambda device: gemm.Capability(any_layout=any_layout))
    needs = {role: gemm.needs(RECIPES[name], role, torch.device("cuda", 0)) for role in gemm._ALONG_K}
    transposes = not (any_layout and name == "tensorwise")
    col = "colwise" if transposes else "rowwise"
    assert needs == {
        "input": {"fprop": "rowwise", "wgrad": col},
        "weight": {"fprop": "rowwise", "dgrad": col},
        "grad_output": {"dgrad": "rowwise", "wgrad": col},
    }


def test_any_layout_products_equal_the_k_major_ones():
    x, w, dy = operands(RECIPES["tensorwise"])
    assert torch.equal(gemm.dgrad(dy.rowwise, w.rowwise), gemm.dgrad(dy.rowwise, w.colwise))
    assert torch.equal(gemm.wgrad(dy.rowwise, x.rowwise), gemm.wgrad(dy.colwise, x.colwise))


def test_tiles_along_the_wrong_dimension_are_never_multiplied():
    x, w, dy = operands(RECIPES["blockwise"])
    with pytest.raises(AssertionError, match="colwise copy is missing"):
        gemm.wgrad(dy.rowwise, x.rowwise)


def test_the_cpu_stands_for_hopper():
    assert gemm.needs(RECIPES["tensorwise"], "input", torch.device("cpu")) == {"fprop": "rowwise", "wgrad": "colwise"}


def test_backends_refuse_with_the_reason():
    x, w, _ = operands(RECIPES["blockwise"])
    with pytest.raises(ValueError, match="no FP8 tensor cores: use 'auto'"):
        gemm.fprop(x.rowwise, w.rowwise, backend="cublaslt")
    with pytest.raises(ValueError, match="auto, triton, cublaslt, reference"):
        gemm.fprop(x.rowwise, w.rowwise, backend="cutlass")
    mx, mw, _ = operands(RECIPES["mxfp8"])
    assert "MXFP8" in scaled_mm.refuses(mx.rowwise, mw.rowwise)


def test_mxfp8_says_once_that_it_is_emulated(caplog):
    gemm._say_emulated.cache_clear()
    x, w, _ = operands(RECIPES["mxfp8"])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            gemm.fprop(x.rowwise, w.rowwise)
    assert [r.message for r in caplog.records if "emulated" in r.message] == [caplog.records[0].message]


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("magnitude", [0.0, 2.0**-125, 1.0, 2.0**118])
def test_bf16_products_stand_in_only_where_they_are_exact(name, magnitude, monkeypatch):
    """Rows of zeros (an MXFP8 scale of 2^-127), and values that BF16 would round, flush or overflow."""
    recipe = RECIPES[name]
    values = random(48, 256).float()
    values[:8] = 0
    values[8:16] *= magnitude
    x = recipe.quantizer("input").quantize(values)
    w = recipe.quantizer("weight").quantize(random(32, 256, seed=8))
    exact = reference._exact_bf16(x.rowwise)
    assert (exact is not None) == (magnitude in (0.0, 1.0))
    if exact is not None:
        assert torch.equal(exact.float(), x.dequantize())
    monkeypatch.setattr(reference, "_fast_bf16", lambda: True)
    expected = fp64(x, "rowwise") @ fp64(w, "rowwise").t()
    y = gemm.fprop(x.rowwise, w.rowwise).double()
    for rows in (slice(0, 16), slice(16, 48)):
        assert (y[rows] - expected[rows]).norm() <= 3e-3 * expected[rows].norm()
