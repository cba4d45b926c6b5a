"""A linear's weight: when it is quantized anew, and what its copies may outlive."""

import copy

import pytest
import torch

from megafp8.step import Phase
from tests.fp8.linears import ALL_NAMES, Sink, data, error, fp64_reference, make, step_for


@ALL_NAMES
def test_cases_05_microbatches_share_bytes_and_a_new_version_is_used(name, monkeypatch):
    """CASES 05: weight bytes are made once a version, and every way to write the weight makes new ones."""
    linear = make(name)
    recipe = linear.recipe
    calls = []
    quantizer = type(recipe.quantizer("weight"))
    original = quantizer.quantize
    weight_quantizer = recipe.quantizer("weight")

    def counted(self, x, *args, **kwargs):
        if x is linear.weight:
            calls.append(x)
        return original(self, x, *args, **kwargs)

    monkeypatch.setattr(quantizer, "quantize", counted)
    x, dy = data()

    def passes():
        for i in range(2):
            y = linear(x, step_for(name, microbatch=i))
            y.backward(dy)
        return y

    before = passes()
    made = len(calls)
    assert made == (1 if weight_quantizer.spec.tile.symmetric else 2)
    assert torch.equal(passes(), before)
    assert len(calls) == made
    writers = {
        "optimizer": lambda value: (linear.weight.owner.write_shard(value), linear.weight.owner.publish()),
        "data": lambda value: (linear.weight.data.copy_(value), linear.weight.owner.publish()),
        "no_grad": lambda value: torch.no_grad()(linear.weight.copy_)(value),
        "state_dict": lambda value: linear.load_state_dict({"weight": value, "bias": linear.bias.data}),
        "assign": lambda value: linear.load_state_dict({"weight": value, "bias": linear.bias.data}, assign=True),
        "dtype and back": lambda value: (
            linear.load_state_dict({"weight": value, "bias": linear.bias.data}),
            linear.to(torch.float64),
            linear.to(torch.bfloat16),
        ),
    }
    for number, write in enumerate(writers.values()):
        value = torch.full((70, 200), float(number + 1), dtype=torch.bfloat16)
        write(value)
        y = linear(x, step_for(name))
        expected = fp64_reference(name, linear, x.detach(), dy)
        assert torch.equal(linear.weight.detach(), value)
        assert error(y, expected[0]) < 3e-3
        x.grad = None
        y.backward(dy)
        assert error(x.grad, expected[1]) < 3e-3


def train(linear, name, steps=3, evaluate=False, microbatches=2):
    """SGD through the optimizer's path; returns outputs and gradients of every step."""
    seen = []
    for number in range(steps):
        sink = Sink()
        for i in range(microbatches):
            x, dy = data(seed=10 * number + i)
            y = linear(x, step_for(name, grads=sink, iteration=number, microbatch=i))
            y.backward(dy)
            seen += [y.detach(), x.grad]
        seen.append(sink.buffer(linear.weight))
        linear.weight.owner.write_shard(linear.weight - 0.01 * sink.buffer(linear.weight))
        linear.weight.owner.publish()
        if evaluate:
            with torch.no_grad():
                linear(data(seed=99)[0], step_for(name, phase=Phase.EVAL))
    return seen


@ALL_NAMES
@pytest.mark.parametrize("keep_transposed", [True, False])
def test_cases_04_an_evaluation_between_steps_changes_nothing(name, keep_transposed):
    """CASES 04: both copies always come from the current weight."""
    plain = train(make(name), name)
    evaluated = train(make(name, keep_transposed=keep_transposed), name, evaluate=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, evaluated, strict=True))
    linear = make(name)
    train(linear, name, evaluate=True)
    owner = linear.weight.owner
    expected = linear.recipe.quantizer("weight").quantize(linear.weight, colwise=True)
    assert torch.equal(owner.operand("fprop").dequantize(), expected.rowwise.dequantize())
    assert torch.equal(owner.operand("dgrad").dequantize(), expected.colwise.dequantize())


@ALL_NAMES
def test_planted_stale_transposed_copy_is_noticed(name, monkeypatch):
    """The equality above fails where publish() forgets the colwise copy."""
    plain = train(make(name), name)
    weight_class = type(make(name).weight.owner)

    def forgetful(self):
        stale = self._copies.get("colwise")
        self._key, self._copies, self._amax = None, {}, None
        if stale is not None:
            self._copies["colwise"] = stale

    monkeypatch.setattr(weight_class, "_drop", forgetful)
    faulty = train(make(name), name)
    assert not all(torch.equal(a, b) for a, b in zip(plain, faulty, strict=True))


@ALL_NAMES
def test_planted_skipped_refresh_is_noticed(name, monkeypatch):
    plain = train(make(name), name)
    monkeypatch.setattr(type(make(name).weight.owner), "_drop", lambda self: setattr(self, "_key", self._key))
    faulty = train(make(name), name)
    assert not all(torch.equal(a, b) for a, b in zip(plain, faulty, strict=True))


def test_a_weight_written_between_forward_and_backward_is_refused():
    linear = make("blockwise")
    x, dy = data()
    y = linear(x)
    linear.weight.owner.write_shard(torch.zeros(70, 200))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_transposed_copy_is_dropped_when_asked():
    x, dy = data()
    sizes = {}
    for keep in (True, False):
        linear = make("blockwise", keep_transposed=keep)
        linear(x).backward(dy)
        sizes[keep] = linear.weight.owner.nbytes
    assert sizes[False] < 0.6 * sizes[True]


def test_deep_copies_own_their_weight():
    linear = make("blockwise")
    x, _ = data()
    y = linear(x)
    twin = copy.deepcopy(linear)
    with torch.no_grad():
        linear.weight.zero_()
    assert torch.equal(twin(x), y)
    assert twin.weight.owner.param is twin.weight
    with torch.no_grad():
        twin.weight.zero_()
    assert torch.equal(twin(x), linear(x))
