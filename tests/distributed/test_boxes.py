"""What each rank of a layout holds, built one rank at a time with a fake process group: nothing twice, nothing lost."""

from __future__ import annotations

import pytest
import torch

from megafp8.config.resolve import resolve
from megafp8.core.gpt import build_model
from megafp8.parallel import fake_parallel
from megafp8.params import initial_value, named_specs, unpadded
from tests.distributed.layouts import GPT2, LLAMA, Layout, assemble, make_config

FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "ragged": LLAMA | {"ffn_hidden_size": 88, "make_vocab_size_divisible_by": 1}}


def specs_of_ranks(values: dict, layout: Layout) -> list[dict]:
    """By rank: global name -> spec, from a model on the meta device."""
    config, found = make_config(values, layout), []
    for rank in range(layout.world):
        with fake_parallel(config, rank) as parallel:
            model = build_model(config, parallel, "meta")
            assert all(tuple(param.shape) == spec.local_shape for spec, param in named_specs(model))
            found.append({spec.name: spec for spec, _ in named_specs(model)})
    return found


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=4, sp=True), Layout(tp=2, dp=4)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values_are_those_of_one_process(family, layout):
    """Same seed, same weights (CASES 82): every element is held, and copies are equal to the bit."""
    (whole,) = specs_of_ranks(FAMILIES[family], Layout())
    ranks = specs_of_ranks(FAMILIES[family], layout)
    parts = [
        {name: (spec.box, spec.shape, unpadded(initial_value(spec, 7), spec)) for name, spec in rank.items()}
        for rank in ranks
    ]
    together = assemble(parts)
    assert together.keys() == whole.keys()
    for name, spec in whole.items():
        assert torch.equal(together[name], unpadded(initial_value(spec, 7), spec)), name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_parameter_is_cut_or_replicated(family):
    """What isn't cut says that it is replicated; partial gradients are those of parameters that see a part."""
    for sp in (False, True):
        for spec in specs_of_ranks(FAMILIES[family], Layout(tp=2, sp=sp))[1].values():
            cut = spec.box_shape != spec.shape
            assert cut != ("tp" in spec.replicated_over), spec.name
            partial = sp or spec.name.endswith(("q_norm.weight", "k_norm.weight"))
            assert ("tp" in spec.grad_sum_over) == (partial and not cut), spec.name


@pytest.mark.parametrize(
    ("recipe", "size", "message"),
    [
        (
            "blockwise",
            2,
            "--tensor-model-parallel-size 2 cuts the 384 output features of layers.0.attention.qkv .* 192",
        ),
        ("mxfp8", 16, "--tensor-model-parallel-size 16 cuts the .* into parts of 24, which the recipe's tiles of 32"),
    ],
)
def test_cuts_through_fp8_tiles_name_the_mend(recipe, size, message):
    values = LLAMA | {
        "hidden_size": 128,
        "ffn_hidden_size": 1024,
        "num_attention_heads": 16,
        "num_query_groups": 16,
        "bf16": True,
        "fp8_format": "e4m3",
        "fp8_recipe": recipe,
    }
    config = make_config(values, Layout(tp=size))
    with fake_parallel(config) as parallel:
        with pytest.raises(ValueError, match=message) as error:
            build_model(config, parallel, "meta")
        assert "--keep-modules-in-bf16 '*.qkv'" in str(error.value)
        mended = resolve(config.replace(keep_modules_in_bf16=("*",)), {"WORLD_SIZE": str(size)})
        build_model(mended.replace(unpadded_vocab_size=101, padded_vocab_size=128), parallel, "meta")
