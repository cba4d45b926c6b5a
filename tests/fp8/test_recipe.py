"""Recipes: presets, overridden axes, and refusals that name the mend."""

import pytest
import torch

from megafp8.config.fp8 import RECIPES as TRAITS
from megafp8.fp8 import get_recipe
from megafp8.fp8.formats import E4M3, E5M2, Scale
from megafp8.fp8.recipe import RECIPES, ROLES

PRESETS = {
    "tensorwise": (E5M2, ("tensor", "tensor", "tensor"), 0, Scale.FP32),
    "blockwise": (E4M3, ("1d", "2d", "1d"), 128, Scale.POW2),
    "mxfp8": (E4M3, ("1d", "2d", "1d"), 32, Scale.E8M0),
    "delayed": (E5M2, ("tensor", "tensor", "tensor"), 0, Scale.FP32),
}


def test_every_recipe_has_its_preset_checked():
    assert set(PRESETS) == set(RECIPES)


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    gradient, tiles, block, scale = PRESETS[name]
    recipe = get_recipe(name, fp8_format=None, power_of_two_scales=None)
    for role, tile in zip(ROLES, tiles, strict=True):
        spec = recipe.quantizer(role).spec
        assert spec.tile.kind == tile
        assert spec.tile.block == block
        assert spec.scale is scale
        assert spec.format == (gradient if role == "grad_output" else E4M3)
        assert spec.amax_epsilon == 0
    assert recipe.uses_history == (name == "delayed") == TRAITS[name].history, "what flags think"
    assert TRAITS[name].block == (block or None)


@pytest.mark.parametrize(
    ("axes", "role", "attribute", "value"),
    [
        ({"name": "blockwise", "fp8_format": "hybrid"}, "grad_output", "format", E5M2),
        ({"name": "tensorwise", "fp8_format": "e4m3"}, "grad_output", "format", E4M3),
        ({"name": "tensorwise", "power_of_two_scales": True}, "input", "scale", Scale.POW2),
        ({"name": "blockwise", "power_of_two_scales": False}, "weight", "scale", Scale.FP32),
        ({"name": "blockwise", "grad_format": "e5m2"}, "grad_output", "format", E5M2),
        ({"name": "tensorwise", "grad_format": "e4m3"}, "grad_output", "format", E4M3),
        ({"name": "tensorwise", "fp8_format": "e4m3", "input_format": "e5m2"}, "input", "format", E5M2),
        ({"name": "blockwise", "amax_epsilon": 1e-12}, "weight", "amax_epsilon", 1e-12),
    ],
)
def test_axes_can_be_overridden(axes, role, attribute, value):
    assert getattr(get_recipe(**axes).quantizer(role).spec, attribute) == value


def test_weight_tiles_can_be_overridden():
    assert get_recipe("mxfp8", weight_tile="1d").quantizer("weight").spec.tile.shape(9, 9) == (1, 32)
    assert get_recipe("blockwise", weight_tile="1d", input_tile="2d").quantizer("input").spec.tile.shape(9, 9) == (
        128,
        128,
    )


@pytest.mark.parametrize(
    ("name", "axes", "mend"),
    [
        ("float8", {}, "blockwise"),
        ("blockwise", {"fp8_format": "e5m2"}, "'e4m3' or 'hybrid'"),
        ("mxfp8", {"fp8_format": "hybrid"}, "use 'e4m3'"),
        ("mxfp8", {"power_of_two_scales": False}, "recipe 'blockwise'"),
        ("mxfp8", {"amax_epsilon": 1e-6}, "leave it at 0"),
        ("mxfp8", {"input_tile": "tensor", "weight_tile": "tensor", "grad_tile": "tensor"}, "recipe 'tensorwise'"),
        ("blockwise", {"input_tile": "2d"}, "input_tile='1d'"),
        ("blockwise", {"grad_tile": "2d"}, "grad_tile='1d'"),
        ("blockwise", {"weight_tile": "1d", "input_tile": "2d", "grad_tile": "2d"}, "grad_tile='1d'"),
        ("blockwise", {"input_tile": "tensor"}, "all three or for none"),
        ("blockwise", {"input_format": "e3m4"}, "'e4m3' or 'e5m2'"),
        ("blockwise", {"weight_format": "e5m2", "fp8_format": "hybrid"}, "weight_format='e4m3'"),
        ("mxfp8", {"grad_format": "e5m2"}, "use 'e4m3'"),
        ("blockwise", {"weight_tile": "64"}, "'tensor', '1d' or '2d'"),
        ("blockwise", {"amax_epsilon": -1.0}, ">= 0"),
        ("blockwise", {"fast_accumulation": True}, "recipe 'tensorwise' or 'delayed'"),
        ("blockwise", {"margin": 1}, "no axis 'margin'"),
        ("delayed", {"amax_history_len": 0}, "at least 1"),
        ("delayed", {"amax_compute_algo": "mean"}, "'most_recent'"),
        ("delayed", {"input_tile": "1d", "weight_tile": "2d", "grad_tile": "1d"}, "'blockwise'"),
    ],
)
def test_refusals_name_the_mend(name, axes, mend):
    """CASES 74."""
    with pytest.raises(ValueError, match=mend):
        get_recipe(name, **axes)


def test_unknown_role():
    with pytest.raises(ValueError, match="grad_output"):
        get_recipe("blockwise").quantizer("bias")


def test_coverage_by_last_name():
    recipe = get_recipe("blockwise")
    assert recipe.covers("decoder.layers.0.mlp.fc1")
    assert not recipe.covers("output_layer")
    assert not recipe.covers("decoder.layers.0.fc1.norm")


def test_equal_axes_are_equal_recipes():
    assert get_recipe("blockwise") == get_recipe("blockwise", power_of_two_scales=True)
    assert get_recipe("blockwise") != get_recipe("blockwise", power_of_two_scales=False)
    assert hash(get_recipe("mxfp8")) == hash(get_recipe("mxfp8"))


@pytest.mark.parametrize("name", PRESETS)
def test_cases_87_one_definition_of_the_formats(name):
    """CASES 87: quantizing the same weight twice, in part or through another recipe object, gives the same bytes."""
    weight = torch.randn(130, 200, generator=torch.Generator().manual_seed(0)).bfloat16()
    first = get_recipe(name).quantizer("weight").quantize(weight, colwise=True)
    again = get_recipe(name).quantizer("weight").quantize(weight.float(), colwise=True)
    for a, b in ((first.rowwise, again.rowwise), (first.colwise, again.colwise)):
        assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
        assert torch.equal(a.scale_inv.contiguous().view(torch.uint8), b.scale_inv.contiguous().view(torch.uint8))
