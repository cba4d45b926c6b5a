"""Quantization kernels against the reference, byte for byte. tests/kernels runs some in an emulator."""

from pathlib import Path

import pytest
import torch
from megafp8.kernels import quantize as kernels
from safetensors.torch import load_file

from megafp8.fp8 import reference
from megafp8.fp8.formats import E4M3, OperandSpec, Scale, Tile
from tests.gpu.quantize_cases import (
    DEVICE,
    EMULATING,
    INPUTS,
    SPECS,
    assert_same,
    expected,
    holes,
    normal,
    raw,
)

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.safetensors"))
SHAPES = [(256, 384), (128, 1024)] if not EMULATING else [(128, 256)]
RAGGED = [(1, 1), (7, 40), (129, 272), (300, 303), (4, 712)] if not EMULATING else [(7, 40), (130, 67)]
ORIENTATIONS = [(True, False), (True, True)] if EMULATING else [(True, False), (False, True), (True, True)]


def check(x, spec, rowwise=True, colwise=True, what="", **kwargs):
    got = kernels.quantize(x, spec, rowwise, colwise, **kwargs)
    assert_same(got[0], (want := expected(x, spec, rowwise, colwise, **kwargs))[0], f"{what} rowwise")
    assert_same(got[1], want[1], f"{what} colwise")


@pytest.mark.parametrize("file", GOLDEN, ids=lambda path: path.stem)
def test_golden_vectors(file):
    vectors = load_file(file)
    x = vectors["input"].to(DEVICE)
    formats = {"e4m3": SPECS["tensorwise"].format, "e5m2": SPECS["tensorwise_e5m2"].format}
    checked = 0
    quantized = {}
    for key, want in vectors.items():
        if key == "input":
            continue
        name, *orientation, part = key.split(".")
        recipe, *words = name.split("_")
        tile = Tile("tensor") if recipe == "tensorwise" else Tile(words[-1], 32 if recipe == "mxfp8" else 128)
        scale = Scale.E8M0 if recipe == "mxfp8" else Scale(words[1])
        spec = OperandSpec(E4M3 if recipe == "mxfp8" else formats[words[0]], tile, scale)
        if name not in quantized:
            quantized[name] = kernels.quantize(x, spec, True, True)
        row, col = quantized[name]
        stored = col if orientation == ["colwise"] else row
        got = stored[0] if part == "data" else stored[1]
        assert torch.equal(raw(got.cpu()), raw(want)), key
        checked += 1
    assert checked == 32


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_bytes_of_every_recipe_orientation_and_kind_of_input(make, spec):
    for shape in SHAPES:
        x = make(*shape).to(DEVICE)
        for rowwise, colwise in ORIENTATIONS:
            check(x, spec, rowwise, colwise, f"{shape}")


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("shape", RAGGED, ids=str)
def test_ragged_shapes(shape, spec):
    for rowwise, colwise in ORIENTATIONS:
        check(holes(*shape).to(DEVICE), spec, rowwise, colwise)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_dtypes(dtype):
    for name in ("blockwise", "mxfp8", "mxfp8_2d", "tensorwise"):
        check(normal(128, 160, dtype).to(DEVICE), SPECS[name], what=name)


@pytest.mark.parametrize("name", ["blockwise", "blockwise_fp32", "mxfp8", "blockwise_2d", "mxfp8_2d", "tensorwise"])
def test_strided_inputs_give_what_their_contiguous_copies_give(name):
    """CASES 41."""
    base = normal(*((160, 192) if not EMULATING else (96, 128))).to(DEVICE)
    before = base.clone()
    views = {
        "transposed": base.t(),
        "every second column": base[:, ::2],
        "every second row": base[::2],
        "offset": base[3:, 5:],
        "expanded": base[:1].expand(130, -1),
        "expanded column": base[:, :1].expand(-1, 130),
        "transposed part": base[:90, 7:].t(),
    }
    for what, x in views.items():
        for rowwise, colwise in ((True, False), (False, True)):
            got = kernels.quantize(x, SPECS[name], rowwise, colwise)
            want = expected(x.contiguous(), SPECS[name], rowwise, colwise)
            assert_same(got[0], want[0], f"{what} rowwise")
            assert_same(got[1], want[1], f"{what} colwise")
    assert torch.equal(base, before)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("shape", [(0, 256), (256, 0), (0, 0)], ids=str)
def test_empty_tensors(shape, spec):
    x = torch.empty(shape, dtype=torch.bfloat16, device=DEVICE)
    check(x, spec)
    check(x, spec, colwise=False)


@pytest.mark.parametrize("name", ["blockwise", "blockwise_e5m2", "blockwise_2d", "mxfp8", "mxfp8_2d", "tensorwise"])
def test_zeros_stay_zeros_and_touch_no_neighbour(name):
    """CASES 07: an all-zero tensor, row or block has zero bytes and finite scales; others stay as they are."""
    spec = SPECS[name]
    row, col = kernels.quantize(torch.zeros(128, 256, dtype=torch.bfloat16, device=DEVICE), spec, True, True)
    for data, scale_inv in (row, col):
        assert not data.view(torch.uint8).any()
        scales = torch.tensor(1.0) if scale_inv.dtype != torch.float32 else scale_inv
        assert bool((scales.isfinite() & (scales > 0)).all())
    x = normal(128, 256)
    zeroed = x.clone()
    zeroed[:, 128:] = 0
    before, after = (kernels.quantize(t.to(DEVICE), spec)[0] for t in (x, zeroed))
    if spec.tile.kind != "tensor":
        assert torch.equal(raw(before[0][:, :128]), raw(after[0][:, :128]))


def test_mxfp8_codes_round_up():
    """CASES 09."""
    up = torch.nextafter(torch.tensor([1.75, 448.0]), torch.tensor(1e9))
    amaxes = torch.tensor([1.0, 1.75, up[0], 1.9, 2.0, 448.0, up[1]])
    x = torch.zeros(7, 32)
    x[:, 5] = -amaxes
    row, _ = kernels.quantize(x.to(DEVICE), SPECS["mxfp8"])
    assert row[1].view(torch.uint8).flatten().tolist() == [119, 119, 120, 120, 120, 127, 128]
    _, col = kernels.quantize(x.t().contiguous().to(DEVICE), SPECS["mxfp8"], False, True)
    assert torch.equal(col[1].view(torch.uint8).flatten(), row[1].view(torch.uint8).flatten())


@pytest.mark.parametrize("name", ["blockwise", "tensorwise_pow2"])
def test_power_of_two_scales_round_down(name):
    """CASES 38, and exact for 448 * 2^k."""
    pairs = [(2.0, 128.0), (256.0, 1.0), (300.0, 1.0), (449.0, 0.5)]
    pairs += [(448.0 * 2.0**k, 2.0**-k) for k in (-100, 0, 100)]
    for amax, scale in pairs:
        x = torch.full((1, 16), -amax, device=DEVICE)
        assert 1 / kernels.quantize(x, SPECS[name])[0][1].item() == scale


def test_scale_boundaries_of_every_significand():
    """Powers of two are made from bits: every amax around 1.75 * 2^k and 2^k, and 100 000 random ones."""
    edges = torch.tensor([1.0, 1.75], dtype=torch.float32).view(torch.int32)[:, None] + torch.arange(-3, 4)
    random = torch.randint(1, 0x7F800000, (100_000 if not EMULATING else 500,), dtype=torch.int32)
    exponents = torch.arange(-126, 127, 9, dtype=torch.int32)[:, None] << 23
    bits = torch.cat([(edges.flatten() + exponents).flatten(), random, torch.arange(1, 9), torch.tensor([0x7F7FFFFF])])
    x = bits.to(torch.int32).view(torch.float32)[:, None]
    for name in ("blockwise", "blockwise_e5m2", "blockwise_fp32", "mxfp8"):
        check(x.to(DEVICE), SPECS[name], colwise=False, what=name)


def test_fp32_scale_of_a_bf16_amax():
    """CASES 39: scale arithmetic is FP32."""
    x = torch.zeros(1, 128, dtype=torch.bfloat16, device=DEVICE)
    x[0, 3] = 4.28125
    row, _ = kernels.quantize(x, SPECS["tensorwise"])
    assert torch.div(torch.ones(1), row[1].cpu()).item() == pytest.approx(104.642334, abs=1e-5)
    check(x, SPECS["tensorwise"])


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_amax_and_quantization_under_a_given_amax(spec):
    """What tiles shared by ranks need: amaxes out, reduced amaxes in."""
    x = holes(200, 300).to(DEVICE)
    amaxes = {}
    for orientation in ("rowwise", "colwise"):
        got = amaxes[orientation] = kernels.amax(x, spec.tile, orientation)
        want = reference.amax(x.cpu(), spec.tile, orientation)
        assert got.shape == want.shape
        assert torch.equal(got.cpu(), want)
    check(x, spec, amax=amaxes["rowwise"] * 3, amax_colwise=amaxes["colwise"] * 3)
    contiguous = {"amax": amaxes["rowwise"].contiguous() * 0.7, "amax_colwise": amaxes["colwise"].contiguous() * 0.7}
    check(x, spec, **contiguous)  # smaller than the tile's own: finite values saturate


@pytest.mark.parametrize("scale", [0.5, 3.0, 1e6, 2.0**126])
@pytest.mark.parametrize("name", ["tensorwise", "tensorwise_e5m2"])
def test_given_scale_saturates_and_records_the_amax(name, scale):
    x = holes(130, 256).to(DEVICE)
    given = torch.tensor([scale], device=DEVICE)
    check(x, SPECS[name], scale=given)
    amax = x[x.isfinite()].abs().max().float()
    history = torch.zeros(1, device=DEVICE)
    kernels.quantize(x, SPECS[name], scale=given, amax_out=history)
    assert history.item() == amax.item()
    history.fill_(1e9)  # another microbatch had a larger one
    kernels.quantize(x, SPECS[name], True, True, scale=given, amax_out=history)
    assert history.item() == torch.tensor(1e9).item()


def test_current_scaling_reports_its_amax():
    x = holes(130, 256).to(DEVICE)
    out = torch.full((1,), 7e9, device=DEVICE)
    kernels.quantize(x, SPECS["tensorwise"], amax_out=out)
    assert out.item() == x[x.isfinite()].abs().max().item()


@pytest.mark.parametrize("name", ["blockwise", "blockwise_2d", "mxfp8_2d", "tensorwise"])
def test_device_flag_turns_a_weight_update_off(name):
    x = normal(128, 256).to(DEVICE)
    out = kernels.quantize(x, SPECS[name], True, True)
    kept = [raw(t).clone() for pair in out for t in pair]
    flag = torch.ones(1, dtype=torch.int32, device=DEVICE)
    kernels.quantize(3 * x, SPECS[name], True, True, noop=flag, out=out)
    assert all(torch.equal(raw(t), k) for t, k in zip((t for pair in out for t in pair), kept, strict=True))
    kernels.quantize(3 * x, SPECS[name], True, True, noop=flag.zero_(), out=out)
    want = expected(3 * x, SPECS[name])
    assert_same(out[0], want[0])
    assert_same(out[1], want[1])


def test_outputs_are_written_completely_and_nothing_beside_them():
    """Poisoned buffers, with room around the data."""
    x = normal(130, 144).to(DEVICE)
    spec = SPECS["blockwise"]
    out = kernels.quantize(x, spec, True, True)
    for pair in out:
        pair[0].view(torch.uint8).fill_(0x5A)
        pair[1].fill_(-7.0)
    guard = torch.full((130 * 144 + 64,), 0x5A, dtype=torch.uint8, device=DEVICE)
    inside = guard[32:-32].view(130, 144).view(torch.float8_e4m3fn)
    kernels.quantize(x, spec, True, True, out=((inside, out[0][1]), out[1]))
    want = expected(x, spec)
    assert_same((inside, out[0][1]), want[0])
    assert_same(out[1], want[1])
    assert bool((guard[:32] == 0x5A).all() and (guard[-32:] == 0x5A).all())


def test_scales_lie_as_gemms_want_them():
    x = normal(130, 300).to(DEVICE)
    row, col = kernels.quantize(x, SPECS["blockwise"], True, True)
    assert row[1].stride() == (1, 132)
    assert col[1].stride() == (1, 300)
    row, col = kernels.quantize(x, SPECS["blockwise_2d"], True, True)
    assert row[1].stride() == (4, 1)
    assert col[1].stride() == (4, 1)


def test_users_mistakes_are_named():
    with pytest.raises(ValueError, match="2-D"):
        kernels.quantize(torch.zeros(4, device=DEVICE), SPECS["blockwise"])
    with pytest.raises(ValueError, match="rowwise"):
        kernels.quantize(torch.zeros(4, 4, device=DEVICE), SPECS["blockwise"], False, False)
    with pytest.raises(ValueError, match="no kernel"):
        kernels.quantize(torch.zeros(4, 4, device=DEVICE), OperandSpec(E4M3, Tile("1d", 48), Scale.FP32))


@pytest.mark.skipif(EMULATING, reason="needs 20 GB")
@pytest.mark.parametrize("name", ["blockwise", "blockwise_2d", "mxfp8", "tensorwise"])
def test_more_than_2_to_the_31_elements(name):
    rows, columns = 2**31 // 16384 + 256, 16384
    x = torch.randn(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    x[-1, -1] = 99.0
    row, col = kernels.quantize(x, SPECS[name], True, True)
    tail = x[-256:]
    amax = {"amax": x.abs().amax().float().view(1).cpu()} if name == "tensorwise" else {}
    want = expected(tail, SPECS[name], **amax)
    scales = row[1] if name == "tensorwise" else row[1][-want[0][1].shape[0] :]
    assert_same((row[0][-256:], scales), want[0])
    scales = col[1] if name == "tensorwise" else col[1][:, -want[1][1].shape[1] :]
    assert_same((col[0][:, -256:], scales), want[1])
