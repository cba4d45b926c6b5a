"""A linear under each recipe, operands, and a sink and a history that look on."""

from dataclasses import dataclass, field

import pytest
import torch

from megafp8.fp8 import Linear, get_recipe
from megafp8.params import GradSink, Init, ParamSpec
from megafp8.step import StepContext

NAMES = ["tensorwise", "blockwise", "mxfp8", "delayed"]
ALL_NAMES = pytest.mark.parametrize("name", NAMES)


class Sink(GradSink):
    """A gradient sink whose buffers start at `fill`."""

    def __init__(self, fill=0.0):
        self.fill, self.buffers, self.count = fill, {}, {}

    def buffer(self, param):
        return self.buffers.setdefault(id(param), torch.full(param.shape, self.fill))

    def ready(self, param):
        self.count[id(param)] = self.count.get(id(param), 0) + 1


@dataclass
class History:
    """Records what is asked of a scaling history."""

    scales: dict = field(default_factory=dict)
    taken: list = field(default_factory=list)

    @property
    def recorded(self):
        return [(name, amax.item()) for name, amax in self.taken]

    def scale(self, name):
        return self.scales.get(name)

    def record(self, name, amax):
        self.taken.append((name, amax.clone()))

    def slot(self, name):
        self.taken.append((name, torch.zeros(1)))
        return self.taken[-1][1]


def make(name, n=70, k=200, bias=True, dtype=torch.bfloat16, seed=0, **options):
    torch.manual_seed(seed)
    recipe = get_recipe(name) if name else None
    spec = ParamSpec("layer.weight", (n, k), Init("normal", 0.02), True)
    return Linear(k, n, bias, recipe=recipe, weight_spec=options.pop("weight_spec", None), params_dtype=dtype,
                  name=spec.name, **options)  # fmt: skip


def data(m=37, n=70, k=200, dtype=torch.bfloat16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=generator).to(dtype).requires_grad_()
    return x, torch.randn(m, n, generator=generator).to(dtype)


def step_for(name, **fields):
    return StepContext(scaling=History() if name == "delayed" else None, **fields)


def fp64_reference(name, linear, x, dy):
    """(y, dx, dw, db) in FP64 of the dequantized operands."""
    recipe = linear.recipe
    q = {
        "input": recipe.quantizer("input").quantize(x, colwise=True),
        "weight": recipe.quantizer("weight").quantize(linear.weight, colwise=True),
        "grad_output": recipe.quantizer("grad_output").quantize(dy, colwise=True),
    }
    row = {role: v.rowwise.dequantize().double() for role, v in q.items()}
    col = {role: v.colwise.dequantize().double() for role, v in q.items()}
    y = row["input"] @ row["weight"].t()
    y = y + linear.bias.double() if linear.bias is not None else y
    return y, row["grad_output"] @ col["weight"].t(), col["grad_output"] @ col["input"].t(), dy.double().sum(0)


def error(got, expected):
    return ((got.double() - expected).norm() / expected.norm()).item()


def saved(linear, x, step=None):
    """Tensors that the forward keeps for backward, the weight aside."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = linear(x, step)
    return y, [t for t in kept if t.data_ptr() != linear.weight.data_ptr()]
