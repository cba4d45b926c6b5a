"""Norms, clipping and zero counts."""

import math

import pytest
import torch

from megafp8.optimizer.norm import clip_coefficient, l2_norm, num_zeros
from megafp8.params import Init, ParamSpec
from tests.optimizer.helpers import make_optimizer, make_param, set_grads


def test_norm_is_that_of_float64_and_leaves_padding_out():
    spec = ParamSpec("embedding", (5, 4), Init("normal", 1.0), True, local_shape=(8, 4))
    other = ParamSpec("bias", (3,), Init("zeros"), False)
    values = {"embedding": torch.randn(8, 4), "bias": torch.randn(3)}
    expected = torch.cat([values["embedding"][:5].reshape(-1), values["bias"]]).double().norm()
    norm = l2_norm(values, {"embedding": spec, "bias": other})
    assert norm.dtype == torch.float64
    assert norm.item() == pytest.approx(expected.item(), rel=1e-14)
    values["bias"][1] = 0
    values["embedding"][6] = 0
    assert num_zeros(values, {"embedding": spec, "bias": other}) == 1


def test_norm_does_not_depend_on_the_order_in_which_parameters_are_held():
    names = [f"p{i}" for i in range(30)]
    specs = {n: ParamSpec(n, (7, 3), Init("zeros"), True) for n in names}
    values = {n: torch.randn(7, 3) * 10 ** (i % 5) for i, n in enumerate(names)}
    backwards = {n: values[n] for n in reversed(names)}
    assert torch.equal(l2_norm(values, specs), l2_norm(backwards, specs))


def test_norm_neither_overflows_nor_underflows_in_fp32():
    spec = {"w": ParamSpec("w", (2,), Init("zeros"), False)}
    assert l2_norm({"w": torch.tensor([3e30, 4e30])}, spec).item() == pytest.approx(5e30, rel=1e-6)
    assert l2_norm({"w": torch.tensor([3e-30, 4e-30])}, spec).item() == pytest.approx(5e-30, rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_norm_shows_a_non_finite_element(bad):
    spec = {"w": ParamSpec("w", (100,), Init("zeros"), False)}
    values = torch.randn(100)
    values[63] = bad
    assert not torch.isfinite(l2_norm({"w": values}, spec))


def test_an_empty_parameter_adds_nothing():
    specs = {n: ParamSpec(n, s, Init("zeros"), False) for n, s in {"a": (0, 4), "b": (2,)}.items()}
    assert l2_norm({"a": torch.zeros(0, 4), "b": torch.tensor([3.0, 4.0])}, specs) == 5


def test_clipping_scales_down_only():
    for norm, clip, expected in [(10.0, 1.0, 1 / (10 + 1e-6)), (0.5, 1.0, 1.0), (10.0, 0.0, 1.0), (0.0, 1.0, 1.0)]:
        assert clip_coefficient(torch.tensor(norm, dtype=torch.float64), clip).item() == pytest.approx(expected)


def test_step_reports_zeros_and_norms_of_the_mean_gradient():
    spec, param = make_param("w", (4, 4), std=1.0)
    optimizer = make_optimizer([(spec, param)], clip_grad=1.0)
    grads = set_grads(optimizer, torch.Generator().manual_seed(0))["w"]
    optimizer.grads.buffer(param)[0] = 0
    stats = optimizer.step(lr=0.0, weight_decay=0.0, valid_tokens=8, with_num_zeros=True, with_params_norm=True)
    assert stats.num_zeros == 4
    assert stats.grad_norm.item() == pytest.approx(grads[1:].norm().item() / 8, rel=1e-6)
    assert stats.params_norm.item() == pytest.approx(optimizer.masters.views["w"].norm().item(), rel=1e-6)
    assert math.isclose(optimizer.params_norm().item(), stats.params_norm.item())
