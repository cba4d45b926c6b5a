"""What each rank of a layout holds, built one rank at a time with a fake process group: nothing twice, nothing lost."""

from __future__ import annotations

import pytest
import torch

from megafp8.core.gpt import build_model
from megafp8.lone import fake_parallel
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


@pytest.mark.parametrize(("axis", "value"), [("fp8_weight_tile", "1d"), ("fp8_grad_tile", "2d")])
def test_cuts_through_tiles_of_other_shapes_name_the_mend(axis, value):
    """Blockwise tiles as they are by default may be cut; these would need more than shared amaxes."""
    tiles = {"fp8_weight_tile": "1d", axis: value}
    values = LLAMA | {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "blockwise"}
    config = make_config(values | tiles, Layout(tp=2))
    with fake_parallel(config) as parallel:
        build_model(make_config(values, Layout(tp=2)), parallel, "meta")
        message = (
            "--tensor-model-parallel-size 2 cuts 128 features of layers.0.attention.qkv into parts of 64, .* of 128"
        )
        with pytest.raises(ValueError, match=message) as error:
            build_model(config, parallel, "meta")
    assert "--fp8-weight-tile 2d" in str(error.value)
