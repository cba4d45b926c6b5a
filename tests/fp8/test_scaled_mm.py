"""Operands as cuBLASLt takes them: PyTorch's meta implementation checks shapes, strides, alignment anywhere."""

from dataclasses import replace

import pytest
import torch

from megafp8.fp8 import get_recipe, scaled_mm
from megafp8.fp8.formats import E4M3, OperandSpec, Scale, Tile
from megafp8.fp8.quantizer import Quantizer


def on_meta(storage):
    """The same operand, laid out alike, without data."""

    def meta(x):
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    return replace(storage, data=meta(storage.data), scale_inv=meta(storage.scale_inv))


@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("weight_tile", [None, "1d"])
@pytest.mark.parametrize("shape", [(128, 256, 512), (1, 7, 33), (37, 712, 896), (4092, 712, 130)])
def test_cases_90_any_shape_is_padded_to_what_is_taken(name, weight_tile, shape):
    """CASES 90: 1 token, 7 and 4092 rows, 712-wide weights."""
    recipe = get_recipe(name, weight_tile=weight_tile if name == "blockwise" else None)
    m, n, k = shape
    x = recipe.quantizer("input").quantize(torch.zeros(m, k), colwise=True)
    w = recipe.quantizer("weight").quantize(torch.zeros(n, k), colwise=True)
    dy = recipe.quantizer("grad_output").quantize(torch.zeros(m, n), colwise=True)
    products = [
        (x.rowwise, w.rowwise, torch.bfloat16, (m, n)),
        (dy.rowwise, w.colwise, torch.bfloat16, (m, k)),
        (dy.colwise, x.colwise, torch.float32, (n, k)),
    ]
    for a, b, dtype, expected in products:
        y = scaled_mm.matmul(on_meta(a), on_meta(b), None, dtype)
        assert tuple(y.shape) == expected
        assert y.dtype == dtype


@pytest.mark.parametrize("name", ["tensorwise", "blockwise"])
@pytest.mark.parametrize("role", ["input", "weight"])
def test_padding_changes_no_number(name, role):
    x = torch.randn(37, 200, generator=torch.Generator().manual_seed(0))
    quantized = get_recipe(name).quantizer(role).quantize(x, colwise=True)
    for storage in (quantized.rowwise, quantized.colwise):
        rows, cols = storage.data.shape
        padded = scaled_mm._padded(storage)
        values = padded.dequantize()
        assert torch.equal(values[:rows, :cols], storage.dequantize())
        assert values.shape[0] % 16 == values.shape[1] % 16 == 0
        assert not values[rows:].any()
        assert not values[:, cols:].any()


def test_what_is_refused_says_why():
    e5m2 = get_recipe("blockwise", fp8_format="hybrid").quantizer("grad_output").quantize(torch.zeros(16, 128)).rowwise
    e4m3 = get_recipe("blockwise").quantizer("weight").quantize(torch.zeros(16, 128)).rowwise
    assert "both operands are E5M2" in scaled_mm.refuses(e5m2, e5m2)
    assert "E4M3 only" in scaled_mm.refuses(e5m2, e4m3)
    assert "2D x 2D" in scaled_mm.refuses(e4m3, e4m3)
    fine = Quantizer(OperandSpec(E4M3, Tile("1d", 64), Scale.FP32)).quantize(torch.zeros(16, 128)).rowwise
    assert "tiles of 128, not 64" in scaled_mm.refuses(fine, e4m3)
    assert (
        scaled_mm.refuses(get_recipe("blockwise").quantizer("input").quantize(torch.zeros(4, 128)).rowwise, e4m3)
        is None
    )


@pytest.mark.parametrize("weight_tile", [None, "1d"])
@pytest.mark.parametrize("shape", [(128, 256, 512), (1, 7, 33), (37, 712, 896)])
def test_mxfp8_operands_are_padded_to_what_is_taken(weight_tile, shape):
    """Block-scaled GEMMs: PyTorch's checks of shapes and of swizzled scales, on any machine."""
    m, n, k = shape
    recipe = get_recipe("mxfp8", weight_tile=weight_tile)
    x = recipe.quantizer("input").quantize(torch.zeros(m, k)).rowwise
    w = recipe.quantizer("weight").quantize(torch.zeros(n, k)).rowwise
    assert scaled_mm.refuses(x, w, native_mxfp8=True) is None
    for bias in (None, torch.zeros(n, dtype=torch.bfloat16, device="meta")):
        y = scaled_mm.matmul(on_meta(x), on_meta(w), bias, torch.bfloat16)
        assert tuple(y.shape) == (m, n)
        assert y.dtype == torch.bfloat16


def test_swizzled_scales_lie_where_tensor_cores_look():
    """Row r, column c of a 128 x 4 block at `r % 32 * 16 + r // 32 * 4 + c`; blocks along the columns follow."""
    rows, cols = 130, 6
    scale_inv = torch.randint(1, 255, (rows, cols), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    flat = scaled_mm.swizzled(scale_inv.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert flat.numel() == 256 * 8
    for r, c in ((0, 0), (1, 2), (31, 3), (32, 0), (127, 5), (128, 4), (129, 1)):
        block = (r // 128) * 2 + c // 4
        assert flat[block * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4] == scale_inv[r, c]
    assert flat.count_nonzero() == rows * cols
