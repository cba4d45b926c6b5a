"""Weights quantized in pieces: the bytes and scales of the whole weight, wherever it is cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megafp8.fp8 import get_recipe
from megafp8.fp8.formats import decode_scale, reciprocal
from megafp8.fp8.param import Weight
from megafp8.fp8.primary import PrimaryBytes, ScaleLayouts, orientations, piece_amax, quantize_piece, scale_shape
from megafp8.fp8.storage import gemm_layout

RECIPES = {
    "tensorwise": get_recipe("tensorwise"),
    "pow2": get_recipe("tensorwise", power_of_two_scales=True),
    "blockwise": get_recipe("blockwise"),
    "blockwise fp32": get_recipe("blockwise", power_of_two_scales=False),
    "blockwise 1d": get_recipe("blockwise", weight_tile="1d", input_tile="1d"),
    "mxfp8": get_recipe("mxfp8"),
    "mxfp8 1d": get_recipe("mxfp8", weight_tile="1d"),
    "e5m2 weights": get_recipe("tensorwise", weight_format="e5m2", grad_format="e4m3"),
}


def in_pieces(weight: torch.Tensor, recipe, cuts: list[int], scale=None) -> PrimaryBytes:
    """The weight put together from pieces; every buffer is poisoned."""
    quantizer, shape, flat = recipe.quantizer("weight"), tuple(weight.shape), weight.reshape(-1)
    kinds = orientations(quantizer)
    amaxes = {o: torch.zeros(scale_shape(quantizer, shape, o)) for o in kinds}
    stored = {o: torch.full((flat.numel(),), 0xEE, dtype=torch.uint8) for o in kinds}
    bounds = [0, *sorted(cuts), flat.numel()]
    pieces = list(zip(bounds, bounds[1:], strict=False))
    data = {o: bytes_.view(quantizer.spec.format.dtype).view(shape) for o, bytes_ in stored.items()}
    primary = PrimaryBytes(quantizer, data)
    for start, stop in reversed(pieces):
        for o in kinds:
            piece_amax(quantizer, flat[start:stop], start, shape, o, amaxes[o])
    if scale is None:
        scales = {o: quantizer.scales(amax) for o, amax in amaxes.items()}
    else:
        scales = {o: (scale.view(1), reciprocal(scale.view(1))) for o in kinds}
    multipliers = {o: pair[0] for o, pair in scales.items()}
    primary.set_scales(amaxes, {o: pair[1] for o, pair in scales.items()}, scale)
    for start, stop in pieces:
        for o in kinds:
            quantize_piece(quantizer.spec, flat[start:stop], start, shape, o, multipliers[o], stored[o][start:stop])
    return primary


def same(primary: PrimaryBytes, weight: torch.Tensor, recipe, scale=None) -> None:
    whole = recipe.quantizer("weight").quantize(weight, rowwise=True, colwise=True, scale=scale)
    for orientation in ("rowwise", "colwise"):
        ours, theirs = primary.storage(orientation), getattr(whole, orientation)
        assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8)), orientation
        assert torch.equal(decode_scale(ours.scale_inv), decode_scale(theirs.scale_inv)), orientation
        assert ours.scale_inv.shape == theirs.scale_inv.shape
        assert (ours.tile, ours.scale, ours.orientation) == (theirs.tile, theirs.scale, theirs.orientation)


@settings(max_examples=8, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", RECIPES)
def test_pieces_have_the_bytes_of_the_whole(name, data):
    """CASES 06: cuts through rows, tiles and tensors; zeros, NaN and Inf; amaxes on either side of a cut."""
    rows, columns = data.draw(st.sampled_from([(130, 200), (384, 512), (5, 7), (1, 300), (33, 1)]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    weight = torch.randn(rows, columns, generator=generator) * 10.0 ** torch.randn(rows, 1, generator=generator)
    weight = weight.bfloat16()
    weight[: rows // 3] = 0
    if data.draw(st.booleans()):
        strange = torch.tensor([torch.nan, torch.inf, -torch.inf])
        weight.view(-1)[torch.randint(weight.numel(), (3,), generator=generator)] = strange.bfloat16()
    cuts = data.draw(st.lists(st.integers(0, weight.numel()), max_size=4))
    same(in_pieces(weight, RECIPES[name], cuts), weight, RECIPES[name])


def test_a_history_gives_the_scale_and_amaxes_are_still_taken():
    recipe, scale = get_recipe("delayed"), torch.tensor([37.5])
    weight = torch.randn(40, 50).bfloat16()
    primary = in_pieces(weight, recipe, [700, 1111], scale)
    same(primary, weight, recipe, scale)
    assert primary.amax == weight.abs().max()


def primary_weight(recipe):
    param = nn.Parameter(torch.randn(64, 128, dtype=torch.bfloat16))
    value = param.detach().clone()
    weight = Weight(param, recipe)
    weight.hold_fp8_only(in_pieces(value, recipe, [100, 5000]))
    weight.publish()
    return weight, value


@pytest.mark.parametrize("name", RECIPES)
def test_operands_are_those_of_a_high_precision_weight(name):
    weight, value = primary_weight(RECIPES[name])
    other = Weight(nn.Parameter(value), RECIPES[name])
    for gemm in ("fprop", "dgrad", "dgrad", "fprop"):
        ours, theirs = weight.operand(gemm), other.operand(gemm)
        assert torch.equal(ours.data.view(torch.uint8), theirs.data.view(torch.uint8))
        assert torch.equal(ours.dequantize(), theirs.dequantize())


def test_no_high_precision_copy_is_left():
    """Reading the parameter gives NaN, writing to it is an error; it holds two bytes."""
    weight, _ = primary_weight(RECIPES["blockwise"])
    assert weight.param.shape == (64, 128)
    assert weight.param.untyped_storage().nbytes() == 2
    assert weight.param.isnan().all()
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        weight.param.add_(1)
    with pytest.raises(AssertionError, match="masters"):
        weight.write_shard(torch.zeros(64, 128))
    rowwise = weight.operand("fprop")
    assert rowwise.data.data_ptr() == weight.primary.data["rowwise"].data_ptr()
    assert weight.nbytes == 0
    weight.operand("dgrad")
    assert weight.nbytes == 64 * 128 + weight.operand("dgrad").scale_inv.nbytes


def test_another_scale_than_that_of_the_bytes_is_an_error():
    weight, _ = primary_weight(RECIPES["tensorwise"])
    with pytest.raises(RuntimeError, match="another scale"):
        weight.operand("fprop", torch.ones(1))


class Launches(TorchDispatchMode):
    """Counts operations that are no views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.names.append(func.overloadpacket.__name__)
        return out


@pytest.mark.parametrize("shapes", [[(3, 2), (1, 1), (8, 4), (5, 7)], [(4, 8), (32, 112)]], ids=["padded", "whole"])
def test_scales_of_many_weights_are_moved_for_gemms_together(shapes):
    offsets = [100 * i if i < 2 else 4000 * i for i in range(len(shapes))]
    packed, tile = torch.rand(20000) + 1, RECIPES["blockwise"].quantizer("weight").spec.tile
    layouts = ScaleLayouts({str(i): pair for i, pair in enumerate(zip(offsets, shapes, strict=True))}, packed.device)
    expected = {}
    for i, (offset, shape) in enumerate(zip(offsets, shapes, strict=True)):
        scales = packed[offset : offset + shape[0] * shape[1]].view(shape)
        expected |= {(str(i), "rowwise"): (scales, shape[1] % 4 == 0), (str(i), "colwise"): (scales.t(), False)}
    with Launches() as launches:
        find = layouts.arrange(packed)
        assert launches.names == []  # nobody has asked
        found = {place: find(*place) for place in expected}
    assert launches.names == ["index_select"] + ["masked_fill_"] * (shapes[0] == (3, 2))
    for place, (scales, stays) in expected.items():
        if stays:
            assert found[place] is None
            continue
        wanted = gemm_layout(scales, tile)
        assert torch.equal(found[place], wanted)
        assert found[place].stride() == wanted.stride()
        assert gemm_layout(found[place], tile) is found[place]
        whole = found[place].as_strided((scales.shape[0], wanted.stride(0)), wanted.stride())
        assert whole.sum() == pytest.approx(scales.sum().item(), rel=1e-5)  # padded with zeros
        assert found[place].storage_offset() % 4 == 0
