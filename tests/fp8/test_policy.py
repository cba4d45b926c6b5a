"""Which linears are quantized: coverage, first and last layers, patterns."""

import pytest

from megafp8.config import Config, FP8Config, ModelConfig
from megafp8.fp8 import Policy, get_recipe, policy

NAMES = [f"layers.{i}.{m}" for i in range(4) for m in ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")]


def config(**fp8):
    return Config(model=ModelConfig(num_layers=4), fp8=FP8Config(**fp8))


def in_fp8(decide):
    return [name for name in NAMES if decide(name) is not None]


def test_without_fp8_format_nothing_is_quantized():
    decide = policy.from_config(config())
    assert in_fp8(decide) == []
    decide.check()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"fp8_format": "e4m3"}, get_recipe("blockwise")),
        ({"fp8_format": "hybrid"}, get_recipe("tensorwise")),
        ({"fp8_format": "hybrid", "fp8_recipe": "blockwise"}, get_recipe("blockwise", fp8_format="hybrid")),
        ({"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_weight_tile": "1d"}, get_recipe("mxfp8", weight_tile="1d")),
        (
            {"fp8_format": "hybrid", "fp8_recipe": "delayed", "fp8_margin": 1},
            get_recipe("delayed", margin=1, amax_history_len=1, amax_compute_algo="most_recent"),
        ),
        (
            {"fp8_format": "e4m3", "fp8_power_of_two_scales": False, "fp8_grad_format": "e5m2"},
            get_recipe("blockwise", power_of_two_scales=False, grad_format="e5m2"),
        ),
    ],
)
def test_flags_make_the_recipe(flags, expected):
    assert policy.recipe_of(config(**flags)) == expected


def test_only_covered_linears():
    decide = policy.from_config(config(fp8_format="e4m3"))
    assert in_fp8(decide) == NAMES
    assert decide("lm_head") is None
    assert decide("layers.0.mlp.router") is None


def test_first_and_last_layers_stay_in_bf16():
    decide = policy.from_config(
        config(
            fp8_format="e4m3", first_last_layers_bf16=True, num_layers_at_start_in_bf16=2, num_layers_at_end_in_bf16=1
        )
    )
    assert in_fp8(decide) == [name for name in NAMES if name.startswith("layers.2.")]
    decide.check()


def test_layer_1_is_not_layer_10():
    decide = Policy(get_recipe("blockwise"), ["layers.1.*"])
    assert decide("layers.1.mlp.fc1") is None
    assert decide("layers.10.mlp.fc1") is not None


def test_patterns():
    decide = policy.from_config(config(fp8_format="e4m3", keep_modules_in_bf16=("layers.*.mlp.fc2", "*.3.*.qkv")))
    assert in_fp8(decide) == [n for n in NAMES if not n.endswith("fc2") and n != "layers.3.attention.qkv"]
    decide.check()


def test_cases_74_pattern_that_matches_nothing_is_an_error():
    decide = policy.from_config(config(fp8_format="e4m3", keep_modules_in_bf16=("layers.*.mlp.down_proj",)))
    in_fp8(decide)
    with pytest.raises(ValueError, match="--keep-modules-in-bf16 'layers.*down_proj' matches no linear"):
        decide.check()


def test_other_recipes_by_pattern_and_file(tmp_path):
    """CASES 05: a run whose FP8 is switched on for some modules only, by a file."""
    path = tmp_path / "recipes.txt"
    path.write_text("# all but\n*=bf16\nlayers.*.fc2 = tensorwise:e4m3  # the second MLP linear\n\n")
    decide = policy.from_config(config(fp8_format="e4m3", fp8_module_recipes=(f"@{path}", "layers.3.*=mxfp8")))
    expected = dict.fromkeys(NAMES)
    expected |= {name: get_recipe("tensorwise", fp8_format="e4m3") for name in NAMES if name.endswith("fc2")}
    expected |= {name: get_recipe("mxfp8") for name in NAMES if name.startswith("layers.3.")}
    assert {name: decide(name) for name in NAMES} == expected
    decide.check()


def test_keeping_in_bf16_beats_another_recipe():
    decide = policy.from_config(
        config(fp8_format="e4m3", fp8_module_recipes=("*.qkv=tensorwise",), keep_modules_in_bf16=("layers.0.*",))
    )
    assert decide("layers.0.attention.qkv") is None
    assert decide("layers.1.attention.qkv") == get_recipe("tensorwise")


def test_a_recipe_for_nothing_is_an_error():
    decide = policy.from_config(config(fp8_format="e4m3", fp8_module_recipes=("layers.*.mlp.fc3=tensorwise",)))
    in_fp8(decide)
    with pytest.raises(ValueError, match=r"--fp8-module-recipes 'layers.*fc3' matches no linear"):
        decide.check()
