"""Rows copied and summed by index: the kernels, emulated, against the plain functions; compiled for Hopper."""

import pytest
import torch
from megafp8.kernels import permute, quantize_derive

from megafp8.core.moe.permutation import Permutation, spread, sums
from megafp8.fp8 import get_recipe
from megafp8.fp8.grouped_rows import RowSpec, pack, take_rows, unpack
from tests.kernels import testing

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the GPU that is here")


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_equal_the_plain_functions(dtype, drops):
    generator = torch.Generator().manual_seed(0)
    experts = torch.stack([torch.randperm(6, generator=generator)[:3] for _ in range(5)])
    if drops:
        experts[::2, 1] = 6
    order = Permutation.of(experts, 6, drops=drops, alignment=4)
    x = torch.randn(5, 304, generator=generator).to(dtype)
    with testing.emulated_launches():
        rows = permute.spread(x, order.tokens)
    assert torch.equal(rows, spread(x, order.tokens, order.empty))
    y = torch.where((order.choices < 0)[:, None], torch.nan, rows * 3)
    with testing.emulated_launches():
        out = permute.sums(y, order.rows, order.kept)
    torch.testing.assert_close(out, sums(y, order.rows, order.kept), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("width", [99, 132])
def test_bytes_are_copied(width):
    x = torch.randint(256, (5, width), dtype=torch.uint8)
    index = torch.tensor([4, 0, 0, -1, 2])
    with testing.emulated_launches():
        rows = permute.spread(x, index)
    assert torch.equal(rows, x[index].masked_fill((index < 0)[:, None], 0))


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
@pytest.mark.parametrize("width", [96, 384])
def test_packed_rows_are_read_where_they_lie(name, width):
    """What an FP8 dispatch received: rows apart from each other, their scales between."""
    quantizer = get_recipe(name).quantizer("input")
    index = torch.randint(-10, 40, (64,), generator=torch.Generator().manual_seed(0))
    rows = unpack(quantizer, pack(quantizer.quantize(torch.randn(40, width).bfloat16()).rowwise), width)
    assert not rows.data.is_contiguous()
    stored, spec = (rows.data, rows.scale_inv), quantizer.spec
    with testing.emulated_launches():
        made = quantize_derive.quantize_grouped(stored, None, spec, True, True, index=index, derived=True)
        copied = permute.spread(rows.data.view(torch.uint8), torch.arange(40))
    expected = take_rows(rows, index, RowSpec(quantizer, True, 128), torch.bfloat16)
    for (data, _), storage in zip(made, (expected.rowwise, expected.colwise), strict=True):
        assert torch.equal(data.view(torch.uint8), storage.data.view(torch.uint8))
    assert torch.equal(copied, rows.data.view(torch.uint8))


def test_compiled_for_hopper():
    x, index = torch.empty(64, 7168, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
    with testing.captured_launches() as launches:
        permute.spread(x, index)
        permute.sums(x, index.view(8, 8), torch.ones(8, 8, dtype=torch.bool))
        permute.sums(x, index.view(8, 8), None)
    for launch in launches:
        used = testing.resources(testing.compile_launch(launch))
        assert used.spills == 0
        assert any(op.startswith("STG.E.128") for op in used.instructions), launch.kernel.__name__
