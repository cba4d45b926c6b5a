"""Small sets of parameters for the optimizer's tests."""

import torch
from torch import nn

from megafp8.optimizer import AdamWOptions, Optimizer
from megafp8.params import Init, ParamSpec, attach_spec, initial_value

SHAPES = {
    "embedding.weight": (33, 16),
    "layers.0.norm.weight": (16,),
    "layers.0.fc1.weight": (2, 24, 16),
    "layers.0.fc1.bias": (48,),
    "layers.1.fc2.weight": (16, 24),
    "scalar": (),
}


def make_param(
    name, shape, *, decay=None, dtype=torch.bfloat16, expert=False, local_shape=(), seed=1, std=0.02, device="cpu"
):
    """(spec, parameter) whose value is the rounded initial value, as core makes it."""
    decay = len(shape) > 1 if decay is None else decay
    init = Init("ones") if "norm" in name else Init("normal", std)
    spec = ParamSpec(name, shape, init, decay, local_shape=local_shape, expert=expert)
    return spec, attach_spec(nn.Parameter(initial_value(spec, seed).to(device, dtype)), spec)


def make_params(dtype=torch.bfloat16, shapes=SHAPES, seed=1, device="cpu"):
    return [make_param(name, shape, dtype=dtype, seed=seed, device=device) for name, shape in shapes.items()]


def make_optimizer(params=None, **options):
    return Optimizer(make_params() if params is None else params, AdamWOptions(**options), seed=1)


def set_grads(optimizer, generator, scale=1.0):
    """Fills the gradient buffers with random values; returns clones by name."""
    optimizer.zero_grad()
    for view in optimizer.grads.state.views.values():
        view.copy_(torch.randn(view.shape, generator=generator) * scale)
    return {name: view.clone() for name, view in optimizer.grads.state.views.items()}


def snapshot(optimizer):
    """Clones of all state and weights, by name."""
    items = {**optimizer.state(), **optimizer.weights.state()}
    return {name: item.tensor.clone() for name, item in items.items()}


def assert_same_bits(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        same = torch.equal(a[name].reshape(-1).view(torch.uint8), b[name].reshape(-1).view(torch.uint8))
        assert same, name
