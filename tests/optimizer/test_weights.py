"""Writing weights: through their owner where fp8 has one, in place otherwise; no derived copy survives a write."""

import pytest
import torch

from megafp8.fp8 import get_recipe
from megafp8.fp8.linear import Linear
from megafp8.optimizer import AdamWOptions, ModelWeights, Optimizer
from megafp8.params import Init, ParamSpec, attach_spec, initial_value, named_specs
from megafp8.step import StepContext
from tests.optimizer.helpers import assert_same_bits, make_param, snapshot


class Owner:
    """Stands for an `fp8.param.Weight` whose bytes are not the parameter's: records what it is told."""

    def __init__(self, log, name):
        self.log, self.name = log, name

    def write_shard(self, value):
        self.log.append((self.name, "write_shard", value.dtype))

    def publish(self):
        self.log.append((self.name, "publish"))


def test_owned_weights_are_written_before_any_is_published():
    log = []
    params = [make_param(name, (4, 4)) for name in "abc"]
    for spec, param in params[:2]:
        param.owner = Owner(log, spec.name)
    weights = ModelWeights(params)
    before = [param.detach().clone() for _, param in params]
    weights.write({spec.name: torch.ones(4, 4) for spec, _ in params})
    assert log == [
        ("a", "write_shard", torch.float32),
        ("b", "write_shard", torch.float32),
        ("a", "publish"),
        ("b", "publish"),
    ]
    assert torch.equal(params[0][1].detach(), before[0]), "an owned parameter is its owner's to write"
    assert torch.equal(params[2][1].detach(), torch.ones(4, 4, dtype=torch.bfloat16))


def make_linear(recipe, seed=1):
    spec = ParamSpec("fc.weight", (48, 160), Init("normal", 0.1), True)
    bias = ParamSpec("fc.bias", (48,), Init("zeros"), False)
    linear = Linear(160, 48, recipe=recipe, weight_spec=spec, bias_spec=bias, params_dtype=torch.bfloat16)
    with torch.no_grad():
        for s, param in named_specs(linear):
            param.copy_(initial_value(s, seed))
    return linear


@pytest.mark.parametrize("recipe", [None, "blockwise", "tensorwise", "mxfp8"])
def test_no_stale_fp8_copy_after_a_step_or_a_load(recipe):
    """A linear that has cached its copies gives what a new one with the same weights gives."""
    recipe = get_recipe(recipe) if recipe else None
    linear = make_linear(recipe)
    optimizer = Optimizer(named_specs(linear), AdamWOptions(), seed=1)
    x = torch.randn(64, 160, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))

    def output_and_grad(module):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        y.float().square().sum().backward()
        return y.detach(), leaf.grad

    def check():
        fresh = make_linear(recipe)
        fresh.load_state_dict(linear.state_dict())
        for ours, expected in zip(output_and_grad(linear), output_and_grad(fresh), strict=True):
            assert torch.equal(ours, expected)

    first = output_and_grad(linear)[0]
    optimizer.zero_grad()
    step = StepContext(grads=optimizer.grads)
    linear(x, step).float().square().sum().backward()
    assert linear.weight.grad is None
    assert optimizer.grads.ready_count("fc.weight") == optimizer.grads.ready_count("fc.bias") == 1
    optimizer.step(lr=1e-2, weight_decay=0.1, valid_tokens=64)
    assert not torch.equal(output_and_grad(linear)[0], first)
    check()
    other = Optimizer(named_specs(make_linear(recipe, seed=2)), AdamWOptions(), seed=2)
    optimizer.load_state(snapshot(other))
    check()
    optimizer.weights.load_state(snapshot(Optimizer(named_specs(make_linear(recipe, seed=3)), AdamWOptions(), seed=3)))
    check()


def test_state_is_in_the_compute_dtype_and_loads_back():
    params = [make_param("a", (3, 4)), make_param("b", (5,), dtype=torch.float32)]
    weights = ModelWeights(params)
    state = {name: item.tensor.clone() for name, item in weights.state().items()}
    assert {name: t.dtype for name, t in state.items()} == {"model/a": torch.bfloat16, "model/b": torch.float32}
    other = ModelWeights([make_param("a", (3, 4), seed=9), make_param("b", (5,), dtype=torch.float32, seed=9)])
    other.load_state(state)
    assert_same_bits({name: item.tensor for name, item in other.state().items()}, state)
    with pytest.raises(KeyError, match="model/b"):
        other.load_state({"model/a": state["model/a"]})


def test_two_parameters_under_one_name_are_refused():
    spec, param = make_param("a", (3,))
    with pytest.raises(AssertionError):
        ModelWeights([(spec, param), (spec, attach_spec(torch.nn.Parameter(torch.zeros(3)), spec))])
