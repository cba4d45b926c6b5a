"""Groups, seeding of masters, state, and loading."""

import pytest
import torch

from megafp8.config import Config
from megafp8.optimizer import AdamWOptions, Group, Optimizer, build_optimizer
from megafp8.parallel import ParallelContext
from megafp8.params import initial_value
from tests.optimizer.helpers import (
    SHAPES,
    assert_same_bits,
    make_optimizer,
    make_param,
    make_params,
    set_grads,
    snapshot,
)


def run_steps(optimizer, generator, steps=3, lr=1e-3):
    for _ in range(steps):
        set_grads(optimizer, generator)
        optimizer.step(lr=lr, weight_decay=0.1, valid_tokens=10)


def test_masters_start_from_the_initial_value_not_from_the_rounded_weight():
    optimizer = make_optimizer()
    for name, master in optimizer.masters.views.items():
        spec = optimizer.weights.specs[name]
        assert torch.equal(master, initial_value(spec, 1))
    assert any(not torch.equal(m, m.bfloat16().float()) for m in optimizer.masters.views.values())


def test_groups_follow_the_specs_in_the_order_of_names():
    """CASES 64: matrices decay, 1-D parameters don't; order and groups are the same whatever order core gives."""
    expected = {name: Group(decay=len(SHAPES[name]) > 1) for name in sorted(SHAPES)}
    params = make_params()
    assert list(make_optimizer(params).groups().items()) == list(expected.items())
    assert list(make_optimizer(list(reversed(make_params()))).groups().items()) == list(expected.items())


def test_only_decaying_parameters_decay():
    """CASES 64, by effect."""
    optimizer = make_optimizer()
    before = {n: m.clone() for n, m in optimizer.masters.views.items()}
    optimizer.zero_grad()
    optimizer.step(lr=0.1, weight_decay=0.5, valid_tokens=1)
    for name, group in optimizer.groups().items():
        factor = 0.95 if group.decay else 1.0
        torch.testing.assert_close(optimizer.masters.views[name], before[name] * factor, rtol=1e-6, atol=0)


def test_decoupled_parameters_follow_their_own_rate():
    a, b = make_param("embedding", (8, 4)), make_param("body", (8, 4))
    optimizer = Optimizer([a, b], AdamWOptions(), seed=1, groups={"embedding": Group(True, decoupled=True)})
    before = {n: m.clone() for n, m in optimizer.masters.views.items()}
    for view in optimizer.grads.state.views.values():
        view.fill_(1.0)
    optimizer.step(lr=1e-3, decoupled_lr=5e-3, weight_decay=0.0, valid_tokens=1)
    for name, rate in (("embedding", 5e-3), ("body", 1e-3)):
        moved = before[name] - optimizer.masters.views[name]
        torch.testing.assert_close(moved, torch.full_like(moved, rate), rtol=1e-4, atol=0)


def test_padding_rows_stay_zero_and_out_of_the_state():
    spec, param = make_param("embedding", (5, 4), local_shape=(8, 4))
    optimizer = make_optimizer([(spec, param)])
    run_steps_with_unpadded_grads(optimizer, param)
    assert torch.equal(param[5:], torch.zeros(3, 4, dtype=param.dtype))
    state = {**optimizer.state(), **optimizer.weights.state()}
    for kind in ("optimizer/master", "optimizer/exp_avg", "optimizer/exp_avg_sq", "model"):
        item = state[f"{kind}/embedding"]
        assert item.shape == item.tensor.shape == (5, 4)


def run_steps_with_unpadded_grads(optimizer, param):
    for _ in range(3):
        optimizer.zero_grad()
        optimizer.grads.buffer(param)[:5] = torch.randn(5, 4)
        optimizer.step(lr=1e-2, weight_decay=0.1, valid_tokens=1)


def test_state_goes_through_another_optimizer_bit_for_bit():
    """CASES 76 and the optimizer's part of exact resume: low bits of moments, counts, and the steps that follow."""
    optimizer = make_optimizer()
    generator = torch.Generator().manual_seed(0)
    run_steps(optimizer, generator)
    for moments in (optimizer.exp_avg, optimizer.exp_avg_sq):
        moments.views["layers.0.norm.weight"].fill_(1 + 2**-20)
    saved = snapshot(optimizer)
    restored = make_optimizer(make_params(seed=2))
    restored.load_state(saved)
    assert_same_bits(snapshot(restored), saved)
    twin = torch.Generator()
    twin.set_state(generator.get_state())
    run_steps(optimizer, generator)
    run_steps(restored, twin)
    assert_same_bits(snapshot(restored), snapshot(optimizer))


def test_loading_keeps_the_exact_master_with_lr_0():
    """CASES 33, second half: not the BF16-rounded one."""
    optimizer = make_optimizer()
    run_steps(optimizer, torch.Generator().manual_seed(0))
    saved = snapshot(optimizer)
    restored = make_optimizer(make_params(seed=2))
    restored.load_state(saved)
    set_grads(restored, torch.Generator().manual_seed(1))
    restored.step(lr=0.0, weight_decay=0.1, valid_tokens=1)
    for name in SHAPES:
        assert torch.equal(restored.masters.views[name], saved[f"optimizer/master/{name}"])
        assert torch.equal(restored.weights.params[name].detach(), saved[f"model/{name}"])


def test_weights_loaded_alone_survive_the_first_step():
    """CASES 33: masters are rebuilt from the loaded weights, so lr 0 changes nothing."""
    source = make_optimizer(make_params(seed=7))
    run_steps(source, torch.Generator().manual_seed(0))
    weights = {k: v for k, v in snapshot(source).items() if k.startswith("model/")}
    optimizer = make_optimizer()
    run_steps(optimizer, torch.Generator().manual_seed(1))
    optimizer.weights.load_state(weights)
    optimizer.reset_from_weights()
    assert optimizer.step_count == 0
    assert not any(flat.any() for flat in optimizer.exp_avg.flats + optimizer.exp_avg_sq.flats)
    set_grads(optimizer, torch.Generator().manual_seed(1))
    optimizer.step(lr=0.0, weight_decay=0.1, valid_tokens=1)
    for name in SHAPES:
        assert torch.equal(optimizer.weights.params[name].detach(), weights[f"model/{name}"]), name


def test_missing_state_is_an_error():
    saved = snapshot(make_optimizer())
    del saved["optimizer/exp_avg_sq/layers.0.fc1.bias"]
    with pytest.raises(KeyError, match="exp_avg_sq/layers.0.fc1.bias"):
        make_optimizer().load_state(saved)


def test_a_build_without_trained_parameters_is_refused():
    frozen = make_params()
    for _, param in frozen:
        param.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter"):
        build_optimizer(frozen, Config(), ParallelContext())


def test_build_reads_the_configuration():
    config = Config().replace(adam_beta1=0.8, adam_beta2=0.95, adam_eps=1e-6, clip_grad=0.5, seed=1)
    optimizer = build_optimizer(make_params(), config, ParallelContext())
    assert (optimizer.options.beta1, optimizer.options.beta2) == (0.8, 0.95)
    assert (optimizer.options.eps, optimizer.options.clip_grad) == (1e-6, 0.5)
    assert_same_bits(snapshot(optimizer), snapshot(make_optimizer()))
