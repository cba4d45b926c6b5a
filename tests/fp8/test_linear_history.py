"""A linear and the amaxes of its tensors: delayed scaling's history, and measuring once."""

import pytest
import torch

from megafp8.fp8 import DelayedScaling, gemm
from megafp8.fp8.quantizer import Quantizer
from megafp8.step import Phase, StepContext
from tests.fp8.linears import History, Sink, data, make, step_for


def test_delayed_uses_the_history_and_records_in_training_only():
    linear = make("delayed")
    x, dy = data()
    scales = {f"layer.weight/{role}": torch.tensor([v]) for role, v in
              (("input", 3.0), ("weight", 100.0), ("grad_output", 7.0))}  # fmt: skip
    history, sink = History(scales), Sink()
    linear(x, StepContext(scaling=history, grads=sink)).backward(dy)
    q = {
        role: linear.recipe.quantizer(role).quantize(t, colwise=True, scale=scales[f"layer.weight/{role}"])
        for role, t in (("input", x.detach()), ("weight", linear.weight), ("grad_output", dy))
    }
    assert torch.equal(x.grad, gemm.dgrad(q["grad_output"].rowwise, q["weight"].colwise))
    assert torch.equal(sink.buffer(linear.weight), gemm.wgrad(q["grad_output"].colwise, q["input"].colwise))
    assert dict(history.recorded) == {
        "layer.weight/input": x.detach().abs().max().item(),
        "layer.weight/weight": linear.weight.abs().max().item(),
        "layer.weight/grad_output": dy.abs().max().item(),
    }
    history.taken.clear()
    with torch.no_grad():
        linear(x, StepContext(phase=Phase.EVAL, scaling=history))
    assert history.recorded == []


def test_a_new_scale_makes_new_weight_bytes():
    """Once a step: scales are updated, then weights are quantized with them."""
    linear = make("delayed")
    state = DelayedScaling.of(torch.nn.Sequential(linear))
    x, _ = data()
    step = StepContext(scaling=state)
    linear(x, step)
    state.advance()
    linear(x, step)
    scale = state.scale("layer.weight/weight")
    expected = linear.recipe.quantizer("weight").quantize(linear.weight, scale=scale).rowwise
    assert torch.equal(
        linear.weight.owner.operand("fprop", scale).data.view(torch.uint8), expected.data.view(torch.uint8)
    )
    state.record("layer.weight/weight", torch.tensor([1e3]))
    state.advance()
    linear(x, step)
    assert linear.weight.owner.operand("fprop", state.scale("layer.weight/weight")).scale_inv.item() > 1.0


def test_delayed_without_a_history_says_what_to_do():
    with pytest.raises(ValueError, match="DelayedScaling.of"):
        make("delayed")(data()[0])


@pytest.mark.parametrize("name", ["tensorwise", "blockwise", "delayed"])
def test_an_input_that_is_quantized_again_is_measured_once(name, monkeypatch):
    """The same bits as from a copy kept in FP8; under tensorwise backward is given forward's amax."""
    results, given, quantize = [], [], Quantizer.quantize

    def watched(self, value, *orientations, amax=None, **options):
        given.append((tuple(value.shape), amax))
        return quantize(self, value, *orientations, amax=amax, **options)

    for again in (False, True):
        linear, (x, dy) = make(name, requantize_input=again), data()
        y = linear(x, step_for(name))
        monkeypatch.setattr(Quantizer, "quantize", watched)
        y.backward(dy)
        monkeypatch.setattr(Quantizer, "quantize", quantize)
        results.append((y, x.grad, linear.weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    (amax,) = (amax for shape, amax in given if shape == tuple(x.shape))
    if name == "tensorwise":
        assert amax.item() == x.float().abs().max().item()
    else:
        assert amax is None
