"""States to save and load."""

import torch

from megafp8.params import StateItem

SHAPES = {
    "model/embedding.weight": (33, 16),
    "model/fc1.weight": (2, 24, 16),
    "model/norm.weight": (16,),
    "optimizer/master/embedding.weight": (33, 16),
    "optimizer/step": (),
}


def make_items(seed=0, shapes=SHAPES):
    """Random state: weights BF16, the step int64, the rest FP32."""
    generator = torch.Generator().manual_seed(seed)
    items = {}
    for name, shape in shapes.items():
        value = torch.randn(shape, generator=generator)
        if name.startswith("model/"):
            value = value.bfloat16()
        if name.endswith("/step"):
            value = torch.tensor(seed + 100)
        items[name] = StateItem.whole(value)
    return items


def poisoned(items):
    """Destinations like `items`, filled with values that a load must overwrite."""
    return {name: StateItem(torch.full_like(item.tensor, -77), item.shape, item.box) for name, item in items.items()}


def assert_equal_items(a, b):
    assert a.keys() == b.keys()
    for name in a:
        x, y = a[name].tensor, b[name].tensor
        assert x.dtype == y.dtype, name
        assert torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)), name
