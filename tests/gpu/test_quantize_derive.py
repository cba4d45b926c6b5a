"""Copies made from bytes, and experts' rows, against the reference, byte for byte."""

import pytest
import torch
from megafp8.kernels import quantize_derive as kernels

from megafp8.fp8 import reference
from megafp8.fp8.formats import E4M3, OperandSpec, Scale, Tile
from tests.gpu.quantize_cases import (
    DEVICE,
    EMULATING,
    ONE_D,
    SPECS,
    assert_same,
    expected,
    holes,
    normal,
    raw,
    wide,
)

DERIVABLE = {name: spec for name, spec in ONE_D.items() if spec.scale is not Scale.FP32}
SHAPES = [(256, 384), (300, 304), (129, 40)] if not EMULATING else [(130, 176)]
COUNTS = [[128, 0, 256, 1], [0, 0, 7], [16, 160, 48, 0, 32], [300], [33, 95, 1, 128, 127, 129]]
if EMULATING:
    COUNTS = [[130, 0, 7], [16, 32]]


def offsets_of(counts, dtype=torch.int64):
    return torch.tensor([0, *counts], dtype=dtype).cumsum(0).to(dtype).to(DEVICE)


@pytest.mark.parametrize("spec", DERIVABLE.values(), ids=DERIVABLE)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("make", [holes, wide])
def test_colwise_copy_from_rowwise_bytes(make, shape, spec):
    (data, scale_inv), _ = expected(make(*shape), spec, colwise=False)
    want = reference.derive_colwise(data, scale_inv, spec)
    assert_same(kernels.derive_colwise(data.to(DEVICE), scale_inv.to(DEVICE), spec), want)


def test_deriving_under_fp32_scales_is_refused():
    data, scale_inv = expected(holes(128, 128), SPECS["blockwise_fp32"], colwise=False)[0]
    with pytest.raises(ValueError, match="power-of-two"):
        kernels.derive_colwise(data.to(DEVICE), scale_inv.to(DEVICE), SPECS["blockwise_fp32"])


@pytest.mark.parametrize("spec", ONE_D.values(), ids=ONE_D)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_experts_tiles_restart_at_their_first_rows(counts, spec):
    """CASES 56's neighbourhood: counts of 0, of 1 and of no multiple of anything."""
    x = holes(sum(counts), 72, seed=len(counts))
    row, col = kernels.quantize_grouped(x.to(DEVICE), offsets_of(counts), spec)
    want_row, want_col = reference.quantize_grouped(x, counts, spec)
    tiles = want_col[1].shape[1]
    assert tiles == sum(-(-count // spec.tile.block) for count in counts) <= col[1].shape[1]
    assert_same(row, want_row, "rowwise")
    assert_same((col[0], col[1][:, :tiles]), want_col, "colwise")


@pytest.mark.parametrize("counts", [[128, 0, 256, 16], [16, 32]], ids=str)
def test_experts_aligned_rows(counts):
    spec, x = SPECS["blockwise"], holes(sum(counts), 128)
    _, col = kernels.quantize_grouped(x.to(DEVICE), offsets_of(counts, torch.int32), spec, rowwise=False, alignment=16)
    want = reference.quantize_grouped(x, counts, spec)[1]
    assert_same((col[0], col[1][:, : want[1].shape[1]]), want)


def test_rows_past_the_last_offset_are_left_alone():
    spec, x = SPECS["blockwise"], holes(130, 64)
    counts = [50, 30]
    row, col = kernels.quantize_grouped(x.to(DEVICE), offsets_of(counts), spec)
    want_row, want_col = reference.quantize_grouped(x[:80], counts, spec)
    assert_same((row[0][:80], row[1][:80]), want_row)
    assert_same((col[0][:, :80], col[1][:, :2]), want_col)


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_experts_colwise_copies_from_bytes(counts):
    spec, x = SPECS["blockwise"], holes(sum(counts), 72)
    (data, scale_inv), _ = expected(x, spec, colwise=False)
    got = kernels.derive_colwise(data.to(DEVICE), scale_inv.to(DEVICE), spec, offsets_of(counts))
    want = reference.quantize_grouped(reference.dequantize(data, scale_inv, spec.tile), counts, spec)[1]
    assert_same((got[0], got[1][:, : want[1].shape[1]]), want)


@pytest.mark.parametrize("shape", [*SHAPES, (0, 16), (1, 1)], ids=str)
def test_transpose(shape):
    data = torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    assert torch.equal(raw(kernels.transpose(data)), data.view(torch.uint8).t().contiguous())
    assert torch.equal(raw(kernels.transpose(data.t())), data.view(torch.uint8))
    stack = torch.randint(0, 256, (3, shape[0] + 16, shape[1]), dtype=torch.uint8, device=DEVICE)[:, : shape[0]]
    assert torch.equal(kernels.transpose(stack), stack.transpose(1, 2).contiguous())


@pytest.mark.parametrize("kind", ["1d", "2d"])
@pytest.mark.parametrize("shape", [*SHAPES, (0, 128)], ids=str)
def test_blockwise_rewritten_as_mxfp8(shape, kind):
    spec = OperandSpec(E4M3, Tile(kind, 128), Scale.POW2)
    data, scale_inv = expected(wide(*shape), spec, colwise=False)[0]
    want = reference.blockwise_as_mxfp8(data, scale_inv, spec.tile)
    got = kernels.blockwise_as_mxfp8(data.to(DEVICE), scale_inv.to(DEVICE), spec.tile)
    assert_same(got, want)
    dequantized = reference.dequantize(*(t.cpu() for t in got), Tile("1d", 32))
    assert torch.equal(dequantized, reference.dequantize(data, scale_inv, spec.tile))


def picked(x, index):
    """Rows of x by index; zeros where there is none."""
    valid = (index >= 0) & (index < x.shape[0])
    return torch.where(valid[:, None], x[index.clamp(0, x.shape[0] - 1)], torch.zeros((), dtype=x.dtype))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("spec", ONE_D.values(), ids=ONE_D)
def test_rows_picked_by_an_index(spec, dtype):
    x, counts = holes(60, 144), [70, 0, 26]
    index = torch.randint(-3, 63, (96,), generator=torch.Generator().manual_seed(0), dtype=dtype)
    rows = picked(x, index)
    args = x.to(DEVICE), offsets_of(counts), spec
    row, none = kernels.quantize_grouped(*args, True, False, index=index.to(DEVICE))
    want_row, want_col = reference.quantize_grouped(rows, counts, spec)
    tiles = want_col[1].shape[1]
    assert none is None
    assert_same(row, want_row, "rowwise alone")
    row, col = kernels.quantize_grouped(*args, index=index.to(DEVICE))
    assert_same(row, want_row, "rowwise")
    assert_same((col[0], col[1][:, :tiles]), want_col, "colwise")


@pytest.mark.parametrize("spec", DERIVABLE.values(), ids=DERIVABLE)
@pytest.mark.parametrize("counts", [[70, 0, 26], [96]], ids=str)
def test_dispatch_of_values_and_of_bytes_agree(counts, spec):
    """Rows quantized here, and rows that came as bytes: the same rowwise bytes, the same derived colwise ones."""
    x = wide(60, 144) if counts == [96] else holes(60, 144)
    index = torch.randint(-3, 63, (96,), generator=torch.Generator().manual_seed(1))
    offsets = offsets_of(counts)
    want_row, _ = reference.quantize_grouped(picked(x, index), counts, spec)
    dequantized = reference.dequantize(*want_row, spec.tile)
    want_col = reference.quantize_grouped(dequantized, counts, spec)[1]
    stored = tuple(t.to(DEVICE) for t in expected(x, spec, colwise=False)[0])
    for source in (x.to(DEVICE), stored):
        row, col = kernels.quantize_grouped(source, offsets, spec, index=index.to(DEVICE), derived=True)
        assert_same(row, want_row, "rowwise")
        assert_same((col[0], col[1][:, : want_col[1].shape[1]]), want_col, "colwise")


def test_mistakes_about_experts_rows_are_named():
    x, offsets = normal(8, 32).to(DEVICE), offsets_of([8])
    with pytest.raises(ValueError, match="1D tiles"):
        kernels.quantize_grouped(x, offsets, SPECS["tensorwise"])
    with pytest.raises(ValueError, match="rowwise"):
        kernels.quantize_grouped(x, offsets, SPECS["blockwise"], False, False)
    with pytest.raises(ValueError, match="power-of-two"):
        kernels.quantize_grouped(x, offsets, SPECS["blockwise_fp32"], derived=True)
