"""Delayed scaling's history, against a plain derivation; state, and what reads and writes it."""

import copy
import pickle

import pytest
import torch

from megafp8.fp8 import DelayedScaling, Linear, get_recipe
from megafp8.fp8.recipe import Delayed
from megafp8.step import Phase, StepContext

FMAX = {"b/input": 448.0, "a/grad_output": 57344.0}


def state(**axes):
    return DelayedScaling(FMAX, get_recipe("delayed", **axes))


def test_first_step_uses_current_scaling():
    scaling = state()
    assert scaling.scale("b/input") is None
    scaling.record("b/input", torch.tensor([7.0]))
    assert scaling.scale("b/input") is None
    scaling.advance()
    assert scaling.scale("b/input").tolist() == [64.0]


@pytest.mark.parametrize("algo", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 3])
@pytest.mark.parametrize("margin", [0, 2])
@pytest.mark.parametrize("pow2", [False, True])
def test_scales_follow_the_history(algo, length, margin, pow2):
    """Each step's scale, from a list of all amaxes so far; an amax of 0 keeps the previous scale."""
    scaling = state(amax_compute_algo=algo, amax_history_len=length, margin=margin, power_of_two_scales=pow2)
    amaxes = [3.0, 10.0, 0.0, 0.0, 0.0, 0.0, 1.5, 2.0, 448.0]
    previous = 1.0
    for number, amax in enumerate(amaxes):
        scaling.record("b/input", torch.tensor([amax / 2]))  # microbatches: the largest counts
        scaling.record("b/input", torch.tensor([amax]))
        scaling.advance()
        window = amaxes[max(0, number + 1 - length) : number + 1] if algo == "max" else [amax]
        if max(window) > 0:
            exact = torch.div(torch.tensor([448.0 * 2.0**-margin]), torch.tensor([max(window)]))
            previous = (2.0 ** exact.log2().floor()).item() if pow2 else exact.item()
        assert scaling.scale("b/input").item() == pytest.approx(previous, rel=0 if pow2 else 1e-7)
        assert scaling.scale("a/grad_output").item() == 1.0


def test_pending_amaxes_are_one_packed_tensor():
    """The seam for the all-reduce: reduced in place, before advance()."""
    scaling = state()
    scaling.record("b/input", torch.tensor([2.0]))
    pending = scaling.pending()
    assert list(scaling.names()) == ["a/grad_output", "b/input"]
    assert pending.is_contiguous()
    assert pending.tolist() == [0.0, 2.0]
    torch.maximum(pending, torch.tensor([1.0, 4.0]), out=pending)
    scaling.advance()
    assert scaling.scale("b/input").item() == 112.0
    assert scaling.scale("a/grad_output").item() == 57344.0
    assert scaling.pending().tolist() == [0.0, 0.0]


def model():
    torch.manual_seed(0)
    options = {"recipe": get_recipe("delayed", amax_history_len=3), "params_dtype": torch.bfloat16}
    first, second = Linear(48, 32, name="first.weight", **options), Linear(32, 16, name="second.weight", **options)
    return torch.nn.ModuleList([first, second])


def run(layers, scaling, steps, evaluate=False):
    outputs = []
    for number in steps:
        x = torch.randn(8, 48, generator=torch.Generator().manual_seed(number)).bfloat16() * (number + 1)
        step = StepContext(scaling=scaling, iteration=number)
        if evaluate:
            with torch.no_grad():
                layers[1](
                    layers[0](100 * x, StepContext(Phase.EVAL, scaling=scaling)),
                    StepContext(Phase.EVAL, scaling=scaling),
                )
        y = layers[1](layers[0](x, step), step)
        y.sum().backward()
        outputs.append(y.detach())
        with torch.no_grad():
            for layer in layers:
                layer.weight.owner.write_shard(layer.weight - 0.1 * layer.weight.grad)
                layer.weight.owner.publish()
                layer.weight.grad = None
        scaling.advance()
    return outputs


def test_cases_22_evaluation_changes_nothing():
    outputs = []
    for evaluate in (False, True):
        layers = model()
        outputs.append(run(layers, DelayedScaling.of(layers), range(4), evaluate))
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def test_cases_60_state_round_trip():
    """CASES 60: saved after five steps, the next ones are bit-equal; a checkpoint without state starts afresh."""
    layers = model()
    scaling = DelayedScaling.of(layers)
    run(layers, scaling, range(5))
    saved = {name: item.tensor.clone() for name, item in scaling.state().items()}
    twin = copy.deepcopy(layers)
    restored = DelayedScaling.of(twin)
    restored.load_state(saved)
    assert all(
        torch.equal(a, b)
        for a, b in zip(run(layers, scaling, range(5, 8)), run(twin, restored, range(5, 8)), strict=True)
    )
    for name, item in scaling.state().items():
        assert torch.equal(item.tensor, restored.state()[name].tensor), name
    fresh = DelayedScaling.of(layers)
    fresh.load_state({})
    assert fresh.scale("first.weight/input") is None


def test_cases_60_state_is_named_globally_and_is_only_delayeds():
    names = set(DelayedScaling.of(model()).state())
    tensors = [f"{layer}.weight/{role}" for layer in ("first", "second") for role in ("input", "weight", "grad_output")]
    assert names == {"fp8_scaling/steps"} | {
        f"fp8_scaling/{t}/{part}" for t in tensors for part in ("amax_history", "scale")
    }
    assert DelayedScaling.of(torch.nn.Sequential(Linear(8, 8, recipe=get_recipe("blockwise")))) is None


@pytest.mark.parametrize("part", ["amax_history", "scale"])
def test_a_tensor_without_a_history_is_refused(part):
    """A linear that was in BF16 when the checkpoint was saved: no scale can be made up for it."""
    layers = model()
    scaling = DelayedScaling.of(layers)
    run(layers, scaling, range(2))
    tensors = {name: item.tensor for name, item in scaling.state().items()}
    gone = next(name for name in tensors if name.endswith(part))
    del tensors[gone]
    with pytest.raises(ValueError, match=f"no '{gone}'.*--keep-modules-in-bf16"):
        scaling.load_state(tensors)


def test_history_of_another_length_is_refused():
    saved = {name: item.tensor for name, item in state(amax_history_len=4).state().items()}
    with pytest.raises(ValueError, match="--fp8-amax-history-len 5: .* has 4 steps"):
        state(amax_history_len=5).load_state(saved)


def test_gradients_have_the_range_of_their_format():
    layers = model()
    assert isinstance(layers[0].recipe, Delayed)
    assert layers[0].history_tensors() == {
        "first.weight/input": 448.0,
        "first.weight/weight": 448.0,
        "first.weight/grad_output": 57344.0,
    }


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda scaling: pickle.loads(pickle.dumps(scaling))])
def test_a_copy_keeps_a_history_of_its_own(copied):
    """What is raised in a slot reaches the copy's history, and not the one it was copied from."""
    scaling = state()
    scaling.record("b/input", torch.tensor([7.0]))
    twin = copied(scaling)
    twin.slot("b/input").fill_(14.0)
    assert (twin.pending().tolist(), scaling.pending().tolist()) == ([0.0, 14.0], [0.0, 7.0])
    for one, scale in ((twin, 32.0), (scaling, 64.0)):
        one.advance()
        assert one.scale("b/input").tolist() == [scale]
        assert one.scale("b/input").data_ptr() == one._scales.data_ptr() + 4
