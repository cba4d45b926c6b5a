"""`--cuda-graph-impl local` without a GPU, where recording is calling: all that stands around the graphs."""

import pytest
import torch

from tests.training.graph_steps import GRAPHS, RECIPES, addresses, build, differing, train

CPU = torch.device("cpu")
FAMILIES = {
    "llama": {},
    "qk norms": {"qk_layernorm": True},
    "gpt2": {
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "swiglu": False,
        "add_bias_linear": True,
        "group_query_attention": False,
        "num_query_groups": None,
    },
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_are_those_of_calls(recipe):
    plain = train(RECIPES[recipe], CPU, 4)
    run = train(RECIPES[recipe] | GRAPHS, CPU, 4)
    assert len(run.graphs.layers) == 4
    assert differing(plain, run) == []
