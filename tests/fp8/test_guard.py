"""Whom a trace blames; in whole runs: tests/training/test_guard.py."""

import pytest
import torch

from megafp8.fp8 import get_recipe
from megafp8.fp8.guard import BACKWARD, Trace
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.parallel import ParallelContext


@pytest.mark.parametrize("orientations", [(True, True), (False, True)], ids=["both copies", "colwise"])
def test_a_quantized_gradient_that_two_hooks_see_is_one_gradient(orientations):
    """fc1 gets what fc2 has made; memory that is taken between the two looks must not make it another gradient."""
    gradient = torch.randn(128, 128)
    gradient[3, 5] = torch.nan
    quantizer, trace, taken = get_recipe("blockwise").quantizer("grad_output"), Trace(), []
    gradient = QuantizedTensor.from_tensor(gradient, quantizer, *orientations)
    for name, role in (("fc1", "grad_output"), ("fc2", "grad_input")):
        trace.check(name, role, gradient, BACKWARD)
        taken += [torch.empty(128, 128) for _ in range(8)]
    first = trace.first(ParallelContext())
    assert (first.name, first.role) == ("fc2", "grad_input")


def test_quantized_gradients_one_after_the_other_are_two():
    """Their values may come to lie at one address: the second look reuses what the first has freed."""
    quantizer, trace = get_recipe("blockwise").quantizer("grad_output"), Trace()
    bad = torch.full((128, 128), torch.nan)
    gradients = [QuantizedTensor.from_tensor(bad, quantizer) for _ in range(2)]
    for gradient, role in zip(gradients, ("grad_output", "grad_input"), strict=True):
        trace.check("experts", role, gradient, BACKWARD)
    assert trace.first(ParallelContext()).role == "grad_output"
