"""convert(): people's modules and optimizers, unchanged, in FP8."""

import copy

import pytest
import torch
from torch import nn

from megafp8.fp8 import Linear, convert, get_recipe

NAMES = ["tensorwise", "blockwise", "mxfp8", "delayed"]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 48))
        self.router = nn.Linear(48, 4, bias=False)
        self.attention = nn.MultiheadAttention(48, 4)
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        return self.head(self.body(x))


def net():
    torch.manual_seed(0)
    return Net()


def test_swaps_linears_around_the_same_parameters():
    model = net()
    params = dict(model.named_parameters())
    keys = list(model.state_dict())
    assert convert(model, get_recipe("blockwise"), skip=("head", "*router")) is model
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in params.items()}
    assert list(model.state_dict()) == keys
    assert type(model.body[0]) is type(model.body[2]) is Linear
    assert type(model.head) is type(model.router) is nn.Linear
    assert type(model.attention.out_proj) is not Linear  # its owner calls no forward


def test_skip_that_matches_nothing_is_an_error():
    """CASES 74."""
    with pytest.raises(ValueError, match="'lm_head' matches no nn.Linear; their names: .*head"):
        convert(net(), get_recipe("blockwise"), skip=("lm_head",))


def test_names_alone_and_models_without_linears():
    model = convert(net(), "blockwise", skip="head")
    assert type(model.head) is nn.Linear
    assert model.body[0].recipe == get_recipe("blockwise")
    with pytest.raises(ValueError, match="'block': use one of tensorwise"):
        convert(net(), "block")
    with pytest.raises(ValueError, match="Sequential has no nn.Linear"):
        convert(nn.Sequential(nn.Conv1d(2, 2, 1)), "blockwise")


def test_a_single_linear():
    linear = nn.Linear(8, 8)
    converted = convert(linear, get_recipe("blockwise"))
    assert isinstance(converted, Linear)
    assert converted.weight is linear.weight


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_cases_05_any_optimizer_is_followed(name, options):
    """CASES 05: after each step of a plain PyTorch optimizer, made before the swap, the next forward is its own.

    Fused optimizers don't count their writes in the parameter's version.
    """
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **options)
    convert(model, get_recipe(name))
    x = torch.randn(16, 40)
    losses = []
    for _ in range(30):
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            model(x)  # quantized weights are there when the step comes
        optimizer.step()
        optimizer.zero_grad()
        if name == "delayed":
            model.fp8_scaling.advance()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    model.eval()
    with torch.no_grad():
        fresh = net()
        fresh.load_state_dict(model.state_dict())
        convert(fresh, get_recipe(name))
        if name == "delayed":
            fresh.fp8_scaling.load_state({key: item.tensor for key, item in model.fp8_scaling.state().items()})
        assert torch.equal(model(x), fresh.eval()(x))


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_close_to_high_precision(name):
    plain, converted = net(), convert(net(), get_recipe(name))
    x = torch.randn(64, 40, generator=torch.Generator().manual_seed(3))
    for model in (plain, converted):
        model(x).square().sum().backward()
    for (key, a), (_, b) in zip(plain.named_parameters(), converted.named_parameters(), strict=True):
        if a.grad is not None:
            assert ((a.grad - b.grad).norm() / a.grad.norm()).item() < 0.2, key
            assert not torch.equal(a.grad, b.grad) or key == "head.bias"


def test_autocast():
    model = convert(nn.Sequential(nn.Linear(32, 32)), get_recipe("blockwise"))
    x = torch.randn(4, 32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == torch.float32
    assert model[0].weight.grad.dtype == torch.float32


def test_deep_copy_of_a_converted_model():
    model = convert(net(), get_recipe("blockwise"))
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.body[0].weight.zero_()
    x = torch.randn(3, 40)
    assert not torch.equal(model(x), twin(x))
