"""Where the optimizer lays the experts' weights: grouped GEMMs read and add in place."""

import pytest

from megafp8.core.gpt import build_model
from megafp8.fp8.weight_stack import stacked
from megafp8.optimizer import build_optimizer
from megafp8.parallel import ParallelContext
from megafp8.params import specs_in_order
from tests.distributed.layouts import LLAMA, Layout, make_config

MODEL = LLAMA | {"num_experts": 12, "moe_ffn_hidden_size": 40, "bf16": True, "fp8_format": "e4m3"}


@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
def test_weights_and_gradients_of_a_layer_are_one_view(overlap, primary):
    flags = {"use_distributed_optimizer": True, "fp8_param_gather": primary, "overlap_grad_reduce": overlap}
    config = make_config(MODEL | flags, Layout())
    model = build_model(config, ParallelContext(), "cpu")
    optimizer = build_optimizer(specs_in_order(model), config, ParallelContext())
    for layer in model.layers:
        for kind in ("fc1", "fc2"):
            params = [getattr(mlp, kind).weight for mlp in layer.mlp.experts]
            assert stacked([optimizer.grads.buffer(p) for p in params]) is not None
            held = [p.owner.primary.data["rowwise"] if primary else p for p in params]
            assert stacked(held) is not None
            assert [p.spec.stack[1] for p in params] == list(range(12))
    names = [spec.name for spec, _ in specs_in_order(model)]
    assert "layers.1.mlp.experts.11.fc1.weight" in names, "names are those of single experts"
