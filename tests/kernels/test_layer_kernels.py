"""The kernels around attention, and dequantization: compiled for Hopper, and run by the PTX emulator."""

import pytest
import torch
from megafp8.kernels import dequantize, norm_grad, rope

from megafp8.core.transformer.rope import _rotate
from megafp8.fp8 import reference
from megafp8.fp8.formats import E4M3, E5M2, OperandSpec, Scale, Tile
from megafp8.fp8.wgrad import put
from tests.gpu.quantize_cases import holes
from tests.kernels import testing

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the GPU that is here")

KINDS = {
    "1d": (Tile("1d", 128), E4M3),
    "1d of 32": (Tile("1d", 32), E5M2),
    "2d": (Tile("2d", 128), E4M3),
    "tensor": (Tile("tensor"), E5M2),
}


@pytest.mark.parametrize(("tile", "format"), KINDS.values(), ids=KINDS)
def test_dequantized_bytes(tile, format):
    (data, scale_inv), _ = reference.quantize(holes(10, 144), OperandSpec(format, tile, Scale.FP32))
    with testing.emulated_launches():
        got = dequantize.dequantize(data, scale_inv, tile, torch.bfloat16)
    want = reference.dequantize(data, scale_inv, tile, torch.bfloat16)
    assert torch.equal(got.nan_to_num(1e9), want.nan_to_num(1e9))


@pytest.mark.parametrize("kind", ["1d", "2d"])
def test_stacks_of_mxfp8_weights_that_lie_apart(kind):
    """Codes 0 and 255 among them."""
    tile, shape = Tile(kind, 32), (3, 40, 144)
    raw = torch.randint(256, (3, 50, 144), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    data = raw[:, :40].view(E4M3.dtype)
    codes = torch.randint(256, (3, *tile.scale_shape(*shape[1:])), dtype=torch.uint8)
    codes[:, 0, 0], codes[:, 0, 1] = 0, 255
    codes = codes.transpose(1, 2).contiguous().transpose(1, 2).view(torch.float8_e8m0fnu)
    with testing.emulated_launches():
        got = dequantize.dequantize(data, codes, tile, torch.bfloat16)
        rows = dequantize.dequantize(data[1], codes[1], tile)
        columns = dequantize.dequantize(data[1], codes[1], tile, torch.bfloat16, transposed=True)
    assert torch.equal(columns.t().nan_to_num(1e9), got[1].nan_to_num(1e9))
    want = [reference.dequantize(one, scales, tile) for one, scales in zip(data, codes, strict=True)]
    assert torch.equal(rows.nan_to_num(1e9), want[1].nan_to_num(1e9))
    for one, right in zip(got, want, strict=True):
        assert torch.equal(one.nan_to_num(1e9), right.to(torch.bfloat16).nan_to_num(1e9))


@pytest.mark.parametrize(("groups", "n", "d"), [(2, 4, 64), (1, 1, 32)])
def test_heads_are_split_rotated_and_joined(groups, n, d):
    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(2, groups * (n + 2) * d, generator=generator).bfloat16()
    angles = torch.randn(2, d // 2, generator=generator)
    cos, sin = angles.cos(), angles.sin()
    with testing.emulated_launches():
        q, k, v = rope.split_heads(qkv, cos, sin, n)
        back = rope.join_heads(q, k, v, cos, sin)
    heads = qkv.view(2, groups, n + 2, d)
    torch.testing.assert_close(q, _rotate(heads[:, :, :n], cos, sin, False).reshape(q.shape), rtol=2**-8, atol=1e-6)
    torch.testing.assert_close(k, _rotate(heads[:, :, n], cos, sin, False).reshape(k.shape), rtol=2**-8, atol=1e-6)
    assert torch.equal(v, heads[:, :, n + 1])
    torch.testing.assert_close(back, qkv, rtol=2**-6, atol=2**-6)  # rotations are undone


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_gradient(offset):
    generator = torch.Generator().manual_seed(0)
    x, dy, beside = (torch.randn(5, 304, generator=generator).bfloat16() for _ in range(3))
    weight = torch.randn(304, generator=generator).bfloat16()
    exact = [t.double().requires_grad_() for t in (x, weight)]
    rstd = (exact[0].square().mean(1) + 1e-5).rsqrt()
    grads = torch.autograd.grad(exact[0] * rstd[:, None] * (exact[1] + offset), exact, dy.double())
    for other in (None, beside):
        with testing.emulated_launches():
            dx, parts = norm_grad.rms_norm_grad(dy, x, weight, rstd.float(), weight_offset=offset, beside=other)
            dw = norm_grad.sum_parts(parts, torch.bfloat16)
            sums = [norm_grad.sum_parts(parts, torch.bfloat16, torch.full((304,), 0.3), adds) for adds in (False, True)]
        if other is None:
            torch.testing.assert_close(dx.double(), grads[0], rtol=2**-8, atol=1e-4)
            alone = dx
        else:
            assert torch.equal(dx, alone + other)
        torch.testing.assert_close(dw.double(), grads[1], rtol=2**-8, atol=1e-4)
        for adds, found in zip((False, True), sums, strict=True):
            assert torch.equal(found, put(dw, torch.full((304,), 0.3), adds))


def test_compiled_for_hopper():
    """Memory is read and written 16 bytes at a time where sizes allow, and nothing spills."""
    spec = OperandSpec(E4M3, Tile("1d", 128), Scale.POW2)
    (data, scale_inv), _ = reference.quantize(torch.zeros(64, 1024), spec)
    qkv, cos = torch.empty(4, 6 * 128, dtype=torch.bfloat16), torch.empty(4, 64)
    with testing.captured_launches() as launches:
        dequantize.dequantize(data, scale_inv, spec.tile, torch.bfloat16)
        q, k, v = rope.split_heads(qkv, cos, cos, 4)
        rope.join_heads(q, k, v, cos, cos)
        wide = torch.empty(64, 8192, dtype=torch.bfloat16)
        _, parts = norm_grad.rms_norm_grad(wide, wide, wide[0], torch.empty(64), beside=wide)
        norm_grad.sum_parts(parts, torch.bfloat16, torch.empty(8192), True)
    assert len(launches) == 5
    for launch in launches:
        used = testing.resources(testing.compile_launch(launch))
        assert used.spills == 0
        if launch.kernel.__name__ != "sum_rows_kernel":
            assert any(op.startswith(("STG.E.128", "STG.E.64")) for op in used.instructions), launch.kernel.__name__
