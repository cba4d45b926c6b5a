"""The update against AdamW in float64, and its behaviour bit by bit."""

import pytest
import torch

from megafp8.optimizer.adamw import Rates, adamw, step_scalars
from tests.optimizer.helpers import (
    assert_same_bits,
    make_optimizer,
    make_param,
    make_params,
    set_grads,
    snapshot,
)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("betas_eps", [(0.9, 0.999, 1e-8), (0.9, 0.95, 1e-5)])
def test_100_steps_stay_within_1e_6_of_float64_adamw(weight_decay, betas_eps):
    """CASES 63. Gradients are of a sum over tokens, clipped, with a resume at step 50."""
    check_100_steps("cpu", weight_decay, *betas_eps)


def check_100_steps(device, weight_decay, beta1, beta2, eps):
    params = make_params(device=device)
    optimizer = make_optimizer(params, beta1=beta1, beta2=beta2, eps=eps)
    reference = {n: torch.nn.Parameter(m.double().clone()) for n, m in optimizer.masters.views.items()}
    groups = [
        {"params": [reference[n] for n, g in optimizer.groups().items() if g.decay], "weight_decay": weight_decay},
        {"params": [reference[n] for n, g in optimizer.groups().items() if not g.decay], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-3, betas=(beta1, beta2), eps=eps)
    generator = torch.Generator().manual_seed(0)
    for step in range(100):
        lr = 1e-3 * (1 + step % 7)
        grads = set_grads(optimizer, generator, scale=10.0 ** (step % 3))
        tokens = 100 + step
        for group in adamw.param_groups:
            group["lr"] = lr
        for name, param in reference.items():
            param.grad = grads[name].double() / tokens
        norm = torch.nn.utils.clip_grad_norm_(list(reference.values()), 1.0)
        adamw.step()
        stats = optimizer.step(lr=lr, weight_decay=weight_decay, valid_tokens=tokens)
        assert stats.grad_norm.item() == pytest.approx(norm.item(), rel=1e-12)
        if step == 49:
            saved = snapshot(optimizer)
            optimizer = make_optimizer(make_params(seed=2, device=device), beta1=beta1, beta2=beta2, eps=eps)
            optimizer.load_state(saved)
    for name, param in reference.items():
        assert relative(optimizer.masters.views[name], param) <= 1e-6, name
        assert relative(optimizer.exp_avg.views[name], adamw.state[param]["exp_avg"]) <= 1e-6, name
        assert relative(optimizer.exp_avg_sq.views[name], adamw.state[param]["exp_avg_sq"]) <= 1e-6, name


def test_decay_is_decoupled_from_the_gradient():
    """CASES 63: a zero gradient shrinks a weight by lr * decay; L2 inside the gradient would move it by lr."""
    spec, param = make_param("w", (8, 8), std=1.0)
    optimizer = make_optimizer([(spec, param)])
    before = optimizer.masters.views["w"].clone()
    optimizer.zero_grad()
    optimizer.step(lr=0.1, weight_decay=0.5, valid_tokens=1)
    torch.testing.assert_close(optimizer.masters.views["w"], before * 0.95, rtol=1e-6, atol=0)


def test_the_bf16_weight_moves_because_the_master_does():
    """CASES 63: 1000 steps of 1e-5 from 1.0 are each far below BF16's resolution."""
    spec, param = make_param("norm.weight", (64,))
    optimizer = make_optimizer([(spec, param)])
    for _ in range(1000):
        optimizer.zero_grad()
        optimizer.grads.buffer(param).fill_(1.0)
        optimizer.step(lr=1e-5, weight_decay=0.0, valid_tokens=1)
    torch.testing.assert_close(optimizer.masters.views["norm.weight"], torch.full((64,), 0.99), rtol=1e-4, atol=0)
    assert param.dtype == torch.bfloat16
    assert torch.equal(param.detach(), torch.full((64,), 0.99, dtype=torch.bfloat16))


def test_weights_are_the_rounded_masters_after_every_step():
    optimizer = make_optimizer()
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        set_grads(optimizer, generator)
        optimizer.step(lr=1e-2, weight_decay=0.1, valid_tokens=7)
        for name, param in optimizer.weights.params.items():
            assert torch.equal(param.detach(), optimizer.masters.views[name].bfloat16()), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_gradient_skips_the_step(bad):
    """CASES 31: weights, masters, moments and step count keep their bits; the next step is a normal one."""
    optimizer, twin = make_optimizer(), make_optimizer()
    generators = [torch.Generator().manual_seed(5) for _ in range(2)]
    for opt, generator in zip((optimizer, twin), generators, strict=True):
        set_grads(opt, generator)
        stats = opt.step(lr=1e-3, weight_decay=0.1, valid_tokens=3)
        assert not stats.skipped
        assert not stats.nan
    before = snapshot(optimizer)
    set_grads(optimizer, torch.Generator().manual_seed(99))
    optimizer.grads.state.views["layers.0.norm.weight"][3] = bad
    stats = optimizer.step(lr=1e-3, weight_decay=0.1, valid_tokens=3)
    assert stats.skipped
    assert stats.nan
    assert not torch.isfinite(stats.grad_norm)
    after = snapshot(optimizer)
    assert after.pop("optimizer/skipped_steps") == before.pop("optimizer/skipped_steps") + 1
    assert_same_bits(before, after)
    for opt, generator in zip((optimizer, twin), generators, strict=True):
        set_grads(opt, generator)
        assert not opt.step(lr=1e-3, weight_decay=0.1, valid_tokens=3).skipped
    a, b = snapshot(optimizer), snapshot(twin)
    assert a.pop("optimizer/skipped_steps") - b.pop("optimizer/skipped_steps") == 1
    assert_same_bits(a, b)


def test_a_skip_keeps_negative_zeros():
    optimizer = make_optimizer()
    for state in (optimizer.masters, optimizer.exp_avg):
        for flat in state.flats:
            flat.fill_(-0.0)
    before = [f.clone() for f in optimizer.masters.flats + optimizer.exp_avg.flats]
    set_grads(optimizer, torch.Generator().manual_seed(1), scale=float("nan"))
    assert optimizer.step(lr=1e-3, weight_decay=0.1, valid_tokens=3).skipped
    for old, new in zip(before, optimizer.masters.flats + optimizer.exp_avg.flats, strict=True):
        assert torch.equal(old.view(torch.int32), new.view(torch.int32))


def test_a_non_finite_loss_skips_the_step_unless_no_token_is_valid():
    """CASES 31, and a mean over no tokens, which is NaN by nature."""
    optimizer = make_optimizer()
    set_grads(optimizer, torch.Generator().manual_seed(5))
    nan = torch.tensor(float("nan"))
    assert optimizer.step(lr=1e-3, weight_decay=0.1, valid_tokens=3, loss=nan).skipped
    assert optimizer.step_count == 0
    optimizer.zero_grad()
    stats = optimizer.step(lr=1e-3, weight_decay=0.0, valid_tokens=torch.tensor(0.0), loss=nan)
    assert not stats.skipped
    assert stats.grad_norm == 0
    assert optimizer.step_count == 1
    assert all(torch.isfinite(f).all() for f in optimizer.masters.flats)


def test_the_result_of_an_element_does_not_depend_on_its_place():
    """Shards of any length, at any offset, give the bits of the whole."""
    generator = torch.Generator().manual_seed(0)
    n = 70001
    state = [torch.randn(n, generator=generator) for _ in range(2)] + [torch.rand(n, generator=generator)]
    grad = torch.randn(n, generator=generator) * 100
    options = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    scale = torch.tensor(0.0123, dtype=torch.float64)
    rates = [Rates(3e-4, 0.1)]
    scalars = step_scalars(torch.tensor(7), scale, torch.tensor(False), rates, beta1=0.9, beta2=0.95)
    whole = adamw(*state, grad, scalars, 0, **options)
    cuts = [0, 1, 4, 33, 129, 5000, 32768, 32769, 50003, n]
    parts = [
        adamw(*(t[a:b] for t in state), grad[a:b], scalars, 0, **options) for a, b in zip(cuts, cuts[1:], strict=False)
    ]
    for x, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(x, torch.cat(pieces))
