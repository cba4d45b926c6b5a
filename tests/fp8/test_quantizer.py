"""Quantizers against an independent oracle, and the rows of CASES that concern them."""

import ml_dtypes
import numpy as np
import pytest
import torch

from megafp8.fp8 import Quantizer, get_recipe, reference
from megafp8.fp8.formats import (
    E4M3,
    E5M2,
    OperandSpec,
    Scale,
    Tile,
    e8m0_decode,
    e8m0_from_amax,
    e8m0_multiplier,
    scale_from_amax,
)
from tests.fp8 import oracle

TILES = {"tensor": Tile("tensor"), "1d": Tile("1d", 128), "2d": Tile("2d", 128)}
SPECS = {
    f"{fmt.name}-{scale.value}-{kind}": OperandSpec(fmt, tile, scale)
    for fmt in (E4M3, E5M2)
    for scale in (Scale.FP32, Scale.POW2)
    for kind, tile in TILES.items()
} | {f"mxfp8-{kind}": OperandSpec(E4M3, Tile(kind, 32), Scale.E8M0) for kind in ("1d", "2d")}
ALL_SPECS = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)


def raw(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.element_size() == 1 else tensor.contiguous()


def same(a, b):
    """Equality of two storages: bytes, scales, shapes."""
    return torch.equal(raw(a.data), raw(b.data)) and torch.equal(raw(a.scale_inv), raw(b.scale_inv))


def inputs(kind, rows, cols, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rows * 1000 + cols)
    x = torch.randn(rows, cols, generator=generator)
    if kind == "wide":
        x = x * 2.0 ** torch.randint(-120, 120, (rows, cols), generator=generator)
    elif kind == "zeros":
        x[: rows // 2] = 0
        x[:, : cols // 2] = -0.0
    elif kind == "subnormal":
        x = x * 2.0**-130
    elif kind == "nonfinite":
        pick = torch.rand(rows, cols, generator=generator)
        x[pick < 0.02] = float("nan")
        x[(pick > 0.02) & (pick < 0.03)] = float("inf")
        x[(pick > 0.03) & (pick < 0.04)] = float("-inf")
        x[0] = float("nan")
    return x.to(dtype)


def against_oracle(spec, x):
    quantized = Quantizer(spec).quantize(x, rowwise=True, colwise=True)
    for orientation in ("rowwise", "colwise"):
        storage = getattr(quantized, orientation)
        tile = "tensor" if spec.tile.kind == "tensor" else spec.tile.shape(0, 0)
        data, scale_inv = oracle.quantize(x, spec.format.name, tile, spec.scale.value, orientation, spec.amax_epsilon)
        assert torch.equal(raw(storage.data), data), orientation
        assert torch.equal(raw(storage.scale_inv), scale_inv), orientation


@pytest.mark.parametrize("kind", ["normal", "wide", "zeros", "subnormal", "nonfinite"])
@ALL_SPECS
def test_matches_oracle(spec, kind):
    dtype = {"normal": torch.bfloat16, "zeros": torch.float16}.get(kind, torch.float32)
    against_oracle(spec, inputs(kind, 150, 173, dtype))


@pytest.mark.parametrize("shape", [(0, 96), (96, 0), (1, 1), (1, 300), (300, 1), (129, 33)])
@ALL_SPECS
def test_small_and_empty_shapes(spec, shape):
    """CASES 11, 90: no rows, one row, one column, ragged edges."""
    against_oracle(spec, inputs("normal", *shape, torch.bfloat16))


@ALL_SPECS
def test_float64_input_is_rounded_to_fp32_first(spec):
    x = inputs("normal", 40, 50).double() + 1e-9
    assert same(Quantizer(spec).quantize(x).rowwise, Quantizer(spec).quantize(x.float()).rowwise)


def test_amax_epsilon():
    spec = OperandSpec(E4M3, Tile("1d", 128), Scale.FP32, amax_epsilon=1e-3)
    against_oracle(spec, inputs("zeros", 20, 260) * 1e-4)


@ALL_SPECS
def test_cases_07_zero_tiles_are_zero_and_touch_no_neighbour(spec):
    """CASES 07: a zeroed row or block has zero bytes, a finite nonzero scale, and changes no other block."""
    quantizer = Quantizer(spec)
    x = inputs("normal", 256, 256, torch.bfloat16)
    zeroed = x.clone()
    zeroed[:128, :128] = 0
    for orientation in ("rowwise", "colwise"):
        one = getattr(quantizer.quantize(x, colwise=True), orientation)
        other = getattr(quantizer.quantize(zeroed, colwise=True), orientation)
        assert not raw(other.data)[:128, :128].any()
        scale = e8m0_decode(other.scale_inv) if spec.scale is Scale.E8M0 else other.scale_inv
        assert bool((scale.isfinite() & (scale != 0)).all())
        if spec.tile.kind != "tensor":
            assert torch.equal(raw(one.data)[128:], raw(other.data)[128:])
            assert torch.equal(raw(one.data)[:128, 128:], raw(other.data)[:128, 128:])
    nothing = quantizer.quantize(torch.zeros(40, 50), colwise=True)
    assert not nothing.dequantize().any()
    assert not raw(nothing.colwise.data).any()


def test_cases_09_e8m0_rounds_up():
    """CASES 09: exact powers of two keep their exponent, all else rounds up; nothing is clipped."""
    up = lambda v: float(np.nextafter(np.float32(v), np.float32(np.inf)))  # noqa: E731
    amax = torch.tensor([1.0, 1.75, up(1.75), 1.9, 2.0, 448.0, up(448.0)])
    code = e8m0_from_amax(amax)
    assert code.view(torch.uint8).tolist() == [119, 119, 120, 120, 120, 127, 128]
    assert bool((amax / e8m0_decode(code) <= 448.0).all())
    x = torch.zeros(7, 32)
    x[:, 5] = amax
    quantized = get_recipe("mxfp8").quantizer("input").quantize(x, colwise=True)
    assert quantized.rowwise.scale_inv.view(torch.uint8).flatten().tolist() == [119, 119, 120, 120, 120, 127, 128]
    column = get_recipe("mxfp8").quantizer("input").quantize(x.t().contiguous(), rowwise=False, colwise=True)
    assert column.colwise.scale_inv.view(torch.uint8).flatten().tolist() == [119, 119, 120, 120, 120, 127, 128]


def test_e8m0_codes_over_the_whole_range():
    amax = torch.tensor([0.0, 2.0**-149, 448 * 2.0**-127, 448 * 2.0**-126, 448 * 2.0**-126 * 1.01, 3.4e38])
    random = torch.randint(0, 0x7F800000, (5000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    amax = torch.cat([amax, random.view(torch.float32)])
    expected = [oracle.e8m0_code(np.float32(a)) for a in amax.tolist()]
    assert e8m0_from_amax(amax).view(torch.uint8).tolist() == expected


def test_e8m0_decodes_every_byte():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(e8m0_decode(codes.view(torch.float8_e8m0fnu)).numpy(), expected, equal_nan=True)
    multiplier = e8m0_multiplier(codes[:255].view(torch.float8_e8m0fnu)).double()
    assert torch.equal(multiplier, 2.0 ** (127 - codes[:255].double()))


def test_cases_38_power_of_two_scales_round_down():
    """CASES 38: rounding to nearest gives 256, 2, 2, 1 and clips."""
    amax = torch.tensor([2.0, 256.0, 300.0, 449.0])
    assert scale_from_amax(amax, 448.0, True).tolist() == [128.0, 1.0, 1.0, 0.5]
    exponent = torch.arange(-100, 101, dtype=torch.float64)
    amax = (448 * 2.0**exponent).float()
    assert torch.equal(scale_from_amax(amax, 448.0, True).double(), 2.0**-exponent)


def test_cases_39_scale_arithmetic_is_fp32():
    """CASES 39: in BF16, 448 / 4.28125 would be 104.5."""
    x = torch.zeros(4, 64, dtype=torch.bfloat16)
    x[1, 2] = -4.28125
    scale, _ = get_recipe("tensorwise").quantizer("input").scales(get_recipe("tensorwise").quantizer("input").amax(x))
    assert scale.dtype == torch.float32
    assert abs(scale.item() - 104.642334) < 1e-5


def test_division_is_correctly_rounded():
    """`448.0 / amax` is a reciprocal and a product, which differs in some of these."""
    amax = torch.rand(20000, generator=torch.Generator().manual_seed(1)) + 0.1
    expected = np.float32(448) / amax.numpy()
    assert np.array_equal(scale_from_amax(amax, 448.0, False).numpy(), expected)


def test_scale_is_capped_where_its_inverse_would_be_subnormal():
    scale = scale_from_amax(torch.tensor([2.0**-149, 2.0**-120, 0.0]), 57344.0, False)
    assert scale.tolist() == [2.0**126, 2.0**126, 1.0]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
@pytest.mark.parametrize("shape", [(256, 33), (128, 128), (33, 256), (1, 128), (128, 1)])
def test_cases_41_expanded_whole_tiles(recipe, shape):
    """One row, or one column, seen many times: products of such tensors have strides of their own."""
    torch.manual_seed(0)
    for x in (torch.randn(1, shape[1]).expand(shape), torch.randn(shape[0], 1).expand(shape)):
        for role in ("input", "weight"):
            quantizer = get_recipe(recipe).quantizer(role)
            ours, whole = (quantizer.quantize(y, colwise=True) for y in (x, x.contiguous()))
            assert same(ours.rowwise, whole.rowwise)
            assert same(ours.colwise, whole.colwise)


@ALL_SPECS
def test_cases_41_strides_do_not_matter(spec):
    """CASES 41: transposed, strided, offset and expanded inputs; the input is not modified."""
    base = inputs("nonfinite", 140, 136, torch.bfloat16)
    before = base.clone()
    quantizer = Quantizer(spec)
    views = [base.t(), base[:, ::2], base[3:], base[5:77, 7:100], base[:1].expand(50, 136), base.flip(0)]
    for view in views:
        got = quantizer.quantize(view, colwise=True)
        expected = quantizer.quantize(view.contiguous(), colwise=True)
        assert same(got.rowwise, expected.rowwise)
        assert same(got.colwise, expected.colwise)
        assert got.rowwise.data.is_contiguous()
        assert got.colwise.data.is_contiguous()
    assert torch.equal(base.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.tile.symmetric])
def test_cases_34_amax_reduced_over_ranks(spec):
    """CASES 34: shards quantized with the reduced amax are the parts of the whole tensor's bytes."""
    quantizer = Quantizer(spec)
    x = inputs("normal", 256, 300, torch.bfloat16)
    x[128:] *= 1000
    whole = quantizer.quantize(x, colwise=True)
    amax = quantizer.amax(x)
    for i in range(2):
        rows = slice(128 * i, 128 * (i + 1))
        block = (
            amax if spec.tile.kind == "tensor" else amax[rows.start // spec.tile.block : rows.stop // spec.tile.block]
        )
        part = quantizer.quantize(x[rows], colwise=True, amax=block)
        assert torch.equal(raw(part.rowwise.data), raw(whole.rowwise.data)[rows])
        assert torch.equal(raw(part.colwise.data), raw(whole.colwise.data)[:, rows])


def test_column_tiles_that_straddle_ranks_share_their_amax():
    quantizer = get_recipe("blockwise").quantizer("input")
    x = inputs("normal", 128, 200, torch.bfloat16)
    x[64:] *= 100
    amax = torch.maximum(quantizer.amax(x[:64], "colwise"), quantizer.amax(x[64:], "colwise"))
    whole = quantizer.quantize(x, colwise=True)
    parts = [quantizer.quantize(p, colwise=True, amax_colwise=amax) for p in x.split(64)]
    assert torch.equal(torch.cat([raw(p.colwise.data) for p in parts], 1), raw(whole.colwise.data))
    assert torch.equal(torch.cat([raw(p.rowwise.data) for p in parts]), raw(whole.rowwise.data))


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_given_scale_saturates_and_keeps_nonfinite(fmt):
    """Delayed: a stale scale saturates finite values to fmax; NaN and Inf stay 0x7F (CASES 34: never hidden)."""
    x = torch.tensor([[1.0, -1e30, 1e30, 3e38, float("inf"), float("-inf"), float("nan"), 0.0]])
    quantized = Quantizer(OperandSpec(fmt, Tile("tensor"), Scale.FP32)).quantize(x, scale=torch.tensor([2.0]))
    values = quantized.rowwise.data.float()[0]
    assert values[:4].tolist() == [2.0, -fmt.fmax, fmt.fmax, fmt.fmax]
    assert raw(quantized.rowwise.data)[0, 4:].tolist() == [0x7F, 0x7F, 0x7F, 0]
    assert quantized.rowwise.scale_inv.tolist() == [0.5]


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_cast_and_decode_of_every_byte(name):
    """Every byte survives a round trip, and decodes as ml_dtypes does (the E4M3 decoder has a fast path)."""
    fmt = {"e4m3": E4M3, "e5m2": E5M2}[name]
    every = torch.arange(256, dtype=torch.uint8)
    expected = torch.from_numpy(every.numpy().view(oracle.DTYPES[name][0]).astype(np.float32))
    finite = expected.isfinite()
    for codes, values in ((every, expected), (every[finite], expected[finite])):
        decoded = reference.dequantize(codes.view(fmt.dtype)[None], torch.ones(1), Tile("tensor"))[0]
        assert torch.equal(decoded.nan_to_num(1e9), values.nan_to_num(1e9))
    again = Quantizer(OperandSpec(fmt, Tile("tensor"), Scale.FP32)).quantize(
        expected[finite][None], scale=torch.ones(1)
    )
    assert torch.equal(raw(again.rowwise.data)[0], every[finite])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@ALL_SPECS
def test_dequantize_is_the_product_and_colwise_agrees(spec, dtype):
    x = inputs("wide", 140, 150) if spec.tile.kind != "tensor" else inputs("normal", 140, 150)
    quantized = Quantizer(spec).quantize(x, colwise=True)
    for storage, values in ((quantized.rowwise, x), (quantized.colwise, x.t())):
        scale = e8m0_decode(storage.scale_inv) if spec.scale is Scale.E8M0 else storage.scale_inv
        if spec.tile.kind != "tensor":
            rows, cols = spec.tile.shape(*storage.data.shape)
            scale = scale.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[: values.shape[0], : values.shape[1]]
        assert torch.equal(storage.dequantize(dtype), (storage.data.float() * scale).to(dtype))
    only = Quantizer(spec).quantize(x, rowwise=False, colwise=True)
    assert only.rowwise is None
    assert only.shape == (140, 150)
    assert torch.equal(only.dequantize(), quantized.colwise.dequantize().t())


@pytest.mark.parametrize("rows", [1, 7, 128, 130])
def test_scales_are_laid_out_for_gemms(rows):
    """1D scales M-major, 2D K-major, padded to 16 bytes; indices as documented."""
    x = inputs("normal", rows, 300)
    blockwise = get_recipe("blockwise")
    one = blockwise.quantizer("input").quantize(x).rowwise.scale_inv
    assert one.shape == (rows, 3)
    assert one.stride(0) == 1
    assert one.stride(1) % 4 == 0
    two = blockwise.quantizer("weight").quantize(x).rowwise.scale_inv
    assert two.shape == (-(-rows // 128), 3)
    assert two.stride(1) == 1
    assert two.stride(0) % 4 == 0


@pytest.mark.parametrize("name", ["blockwise", "mxfp8"])
def test_derived_colwise_keeps_the_error(name):
    quantizer = get_recipe(name).quantizer("input")
    x = inputs("normal", 300, 200, torch.bfloat16)
    direct = quantizer.quantize(x, colwise=True)
    derived = quantizer.derive_colwise(direct.rowwise)
    expected = quantizer.quantize(direct.rowwise.dequantize(), rowwise=False, colwise=True).colwise
    assert same(derived, expected)
    differing = (raw(derived.data) != raw(direct.colwise.data)).float().mean()
    assert 0 < differing < 0.15
    error = lambda s: ((s.dequantize().t() - x.float()).norm() / x.float().norm()).item()  # noqa: E731
    assert error(derived) < 1.1 * error(direct.colwise)


def test_derived_colwise_needs_power_of_two_scales():
    quantizer = get_recipe("blockwise", power_of_two_scales=False).quantizer("input")
    with pytest.raises(ValueError, match="power_of_two_scales=True"):
        quantizer.derive_colwise(quantizer.quantize(inputs("normal", 8, 8)).rowwise)


@pytest.mark.parametrize("kind", ["normal", "wide", "zeros"])
@pytest.mark.parametrize("role", ["input", "weight"])
def test_blockwise_rewritten_as_mxfp8_is_the_same_numbers(role, kind):
    storage = get_recipe("blockwise").quantizer(role).quantize(inputs(kind, 150, 300)).rowwise
    data, codes = reference.blockwise_as_mxfp8(storage.data, storage.scale_inv, storage.tile)
    assert codes.shape == (150, 10)
    assert torch.equal(reference.dequantize(data, codes, Tile("1d", 32)), storage.dequantize())


@pytest.mark.parametrize("spec", [s for s in SPECS.values() if s.tile.kind != "2d"])
def test_grouped_tiles_restart_at_each_expert(spec):
    """Colwise tiles, and tensorwise scales, restart at each expert's first row; experts without tokens too."""
    counts = [1, 0, 37, 130, 128]
    x = inputs("normal", sum(counts), 70, torch.bfloat16)
    quantizer = Quantizer(spec)
    grouped = quantizer.quantize_grouped(x, counts)
    tiles = len(counts) if spec.tile.kind == "tensor" else sum(-(-c // spec.tile.block) for c in counts)
    expected_shape = (tiles,) if spec.tile.kind == "tensor" else (70, tiles)
    assert tuple(grouped.colwise.scale_inv.shape) == expected_shape
    for part, row, col in zip(x.split(counts), grouped.rowwise.experts(), grouped.colwise.experts(), strict=True):
        alone = quantizer.quantize(part, colwise=True)
        assert same(row, alone.rowwise)
        assert same(col, alone.colwise)
    assert torch.equal(
        grouped.colwise.dequantize()[:, 1:38], quantizer.quantize(x[1:38], colwise=True).colwise.dequantize()
    )


def test_bad_inputs_are_refused():
    quantizer = get_recipe("blockwise").quantizer("input")
    for bad in (torch.zeros(3), torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="2-D floating point"):
            quantizer.quantize(bad)
    with pytest.raises(ValueError, match="rowwise=True"):
        quantizer.quantize(torch.zeros(2, 2), rowwise=False)
    with pytest.raises(ValueError, match="amax="):
        quantizer.quantize(torch.zeros(2, 2), scale=torch.ones(1))


@pytest.mark.parametrize("kind", ["normal", "nonfinite"])
@pytest.mark.parametrize("shape", [(600, 173), (513, 33), (256, 4096)])
@ALL_SPECS
def test_working_in_chunks_changes_nothing(spec, shape, kind, monkeypatch):
    """Large operands are worked on a few rows at a time on CPUs: bytes, scales, amaxes and values are the same."""
    x, quantizer = inputs(kind, *shape, torch.bfloat16), Quantizer(spec)

    def results():
        amaxes = quantizer.amax(x), quantizer.amax(x, "colwise")
        both = quantizer.quantize(x, colwise=True)
        given = quantizer.quantize(x, colwise=True, amax=2 * amaxes[0], amax_colwise=2 * amaxes[1])
        storages = [both.rowwise, both.colwise, given.rowwise, given.colwise]
        if spec.tile.kind == "tensor":
            storages.append(quantizer.quantize(x, scale=torch.tensor([3.0])).rowwise)
        return *amaxes, *(t for s in storages for t in (raw(s.data), raw(s.scale_inv), s.dequantize().nan_to_num(7.0)))

    monkeypatch.setattr(reference, "_CHUNK", 1 << 40)
    whole = results()
    monkeypatch.setattr(reference, "_CHUNK", 2048)
    assert all(torch.equal(a, b) for a, b in zip(whole, results(), strict=True))
