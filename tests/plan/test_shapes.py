"""The planner's linears and parameters are those of the built model."""

import pytest

from megafp8.core.gpt import build_model
from megafp8.fp8 import Linear
from megafp8.parallel import ParallelContext
from megafp8.params import named_specs
from megafp8.plan.shapes import linears, parameter_count, parameters
from tests.plan.variants import VARIANTS

FP8 = {"bf16": True, "fp8_format": "e4m3"}


@pytest.mark.parametrize("variant", VARIANTS)
def test_parameters_are_the_models(make, variant):
    config = make(variant)
    model = build_model(config, ParallelContext(), "meta")
    built = {spec.name: (tuple(p.shape), spec.numel, spec.decay, spec.expert) for spec, p in named_specs(model)}
    planned = {p.name: (p.shape, p.unpadded_numel, p.decay, p.expert) for p in parameters(config)}
    assert planned == built
    assert parameter_count(config) == sum(spec.numel for spec, _ in named_specs(model))


@pytest.mark.parametrize("variant", VARIANTS)
def test_linears_are_the_models(make, variant):
    """Names, shapes and recipes, in the order of the forward pass; first and last layers in BF16."""
    config = make(variant, first_last_layers_bf16=True, keep_modules_in_bf16=("*.fc2",), **FP8)
    model = build_model(config, ParallelContext(), "meta")
    built = {
        name: (m.out_features, m.in_features, m.bias is not None, m.recipe)
        for name, m in model.named_modules()
        if isinstance(m, Linear)
    }
    planned = {x.name: (x.out_features, x.in_features, x.bias, x.recipe) for x in linears(config)}
    assert planned == built
    fp8 = [name for name, (*_, recipe) in planned.items() if recipe is not None]
    if variant == "llama":
        assert fp8 == ["layers.1.attention.qkv", "layers.1.attention.proj", "layers.1.mlp.fc1"]
    assert not any(name.startswith(("layers.0.", "layers.2.")) or name.endswith(("fc2", "eh_proj")) for name in fp8)


def test_a_pattern_that_matches_nothing(make):
    """CASES 74: a misspelt module name never leaves that module in FP8 silently."""
    config = make(keep_modules_in_bf16=("layers.*.fc3",), **FP8)
    with pytest.raises(ValueError, match="--keep-modules-in-bf16 'layers.*.fc3' matches no linear"):
        linears(config)


@pytest.mark.parametrize(
    ("values", "billions"),
    [
        (
            {
                "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32,
                "num_query_groups": 8, "vocab_size": 128256,
            },
            8.030261248,
        ),
        (
            {
                "num_layers": 80, "hidden_size": 8192, "ffn_hidden_size": 28672, "num_attention_heads": 64,
                "num_query_groups": 8, "vocab_size": 128256,
            },
            70.553706496,
        ),
    ],
    ids=["Llama-3-8B", "Llama-3-70B"],
)  # fmt: skip
def test_published_sizes(make, values, billions):
    """Parameter counts of the released models' files."""
    config = make("llama", **values)
    assert parameter_count(config) == round(billions * 1e9)


def test_a_model_far_too_large_for_this_machine(make):
    """Formulas only: 400 billion parameters take no memory."""
    config = make("llama", num_layers=200, hidden_size=16384, num_attention_heads=128, num_query_groups=8)
    h, ffn = 16384, 43648
    layer = h * (128 + 2 * 8) * 128 + h * h + 3 * h * ffn + 2 * h
    assert config.model.ffn_hidden_size == ffn
    assert parameter_count(config) == 200 * layer + h + 2 * 257 * h
