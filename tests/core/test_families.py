"""Every family against transformers: logits and all gradients in FP32, with weights mapped by hand (CASES 25, 50)."""

import pytest
import torch
from torch.nn import functional as F

from megafp8.step import Phase, StepContext
from tests.core.families import FAMILIES, Family
from tests.core.helpers import batch, gradients, make_model, parameters, relative_error

EVAL = StepContext(phase=Phase.EVAL)


def copied(family: Family, theirs: torch.nn.Module):
    """Our model with the weights of theirs."""
    model = make_model(family.model)
    ours, mapped = parameters(model), family.mapped(theirs.state_dict().__getitem__)
    assert ours.keys() == mapped.keys()
    with torch.no_grad():
        for name, value in mapped.items():
            ours[name][: value.shape[0]].copy_(value)
    biases = {
        name: name.replace("/", ".").replace("router.expert_bias", "gate.e_score_correction_bias")
        for name in model.state()
    }
    model.load_state({name: theirs.state_dict()[their_name] for name, their_name in biases.items()})
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients(name):
    family = FAMILIES[name]
    theirs = family.build()
    model = copied(family, theirs)
    tokens, labels, _ = batch(2, 24)
    expected = theirs(tokens).logits
    torch.testing.assert_close(model(tokens, step=EVAL), expected, rtol=1e-4, atol=1e-4)
    F.cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    model(tokens, step=StepContext(), labels=labels).backward()
    grads = gradients(model)
    their_grads = {key: p.grad for key, p in theirs.named_parameters()}
    for key, expected_grad in family.mapped(their_grads.__getitem__).items():
        assert relative_error(grads[key][: expected_grad.shape[0]], expected_grad) < 2e-5, key


def broken(model, fault: str) -> None:
    """Plants a fault that changes no shape."""
    layer, ours = model.layers[-1], parameters(model)
    with torch.no_grad():
        if fault == "experts permuted":
            a, b = (ours[f"layers.2.mlp.experts.{e}.fc1.weight"] for e in (0, 1))
            a.copy_(b.clone()), b.copy_(a.clone())
        if fault == "gate and up swapped":
            weight = ours["layers.2.mlp.shared_experts.fc1.weight"]
            weight.copy_(torch.cat(weight.chunk(2)[::-1]))
        if fault == "bias ignored":
            layer.mlp.router.expert_bias.zero_()
        if fault == "halves rotated":
            weight = ours["layers.2.attention.kv_down.weight"][-4:]
            weight.copy_(weight[[0, 2, 1, 3]].clone())
        if fault == "keys and values swapped":
            weight = ours["layers.2.attention.kv_up.weight"].view(4, 18, -1)
            weight.copy_(weight.flip(1).clone())


@pytest.mark.parametrize(
    "fault",
    [
        "experts permuted",
        "gate and up swapped",
        "bias ignored",
        "halves rotated",
        "keys and values swapped",
    ],
)
def test_faults_are_seen(fault):
    """CASES 25-27: shapes match in all of these, so only numbers tell."""
    family = FAMILIES["deepseek v3"]
    theirs = family.build()
    model = copied(family, theirs)
    tokens, _, _ = batch(2, 24)
    expected = theirs(tokens).logits
    assert relative_error(model(tokens, step=EVAL), expected) < 1e-5
    broken(model, fault)
    assert relative_error(model(tokens, step=EVAL), expected) > 1e-3
