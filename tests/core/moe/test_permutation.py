"""Tokens to experts and back (CASES 56)."""

import pytest
import torch

from megafp8.core.moe.permutation import Permutation, combine, permute, permute_weights

TOKENS, TOPK, EXPERTS, WIDTH = 37, 8, 16, 24


def experts(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(TOKENS)])


def test_rows_are_by_expert_then_by_token():
    where = experts()
    order = Permutation.of(where, EXPERTS)
    rows = [(int(where.flatten()[c]), int(c) // TOPK) for c in order.choices]
    assert rows == sorted(rows)
    assert order.counts.tolist() == torch.bincount(where.flatten(), minlength=EXPERTS).tolist()
    assert torch.equal(order.choices[order.rows].view(-1), torch.arange(TOKENS * TOPK))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(dtype):
    """Against FP32 index_add: sums of top-8 copies round once, in values and in both gradients."""
    order = Permutation.of(experts(), EXPERTS)
    x = torch.randn(TOKENS, WIDTH).to(dtype).requires_grad_()
    rows = permute(x, order)
    assert torch.equal(rows, x[order.tokens])
    grad = torch.randn(TOKENS * TOPK, WIDTH).to(dtype)
    rows.backward(grad)
    expected = torch.zeros(TOKENS, WIDTH, dtype=torch.float64).index_add(0, order.tokens, grad.double())
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(x.grad.double(), expected, rtol=eps, atol=1e-6)

    y = torch.randn(TOKENS * TOPK, WIDTH).to(dtype).requires_grad_()
    out = combine(y, order)
    assert out.dtype == dtype
    expected = torch.zeros(TOKENS, WIDTH, dtype=torch.float64).index_add(0, order.tokens, y.detach().double())
    torch.testing.assert_close(out.double(), expected, rtol=eps, atol=1e-6)
    grad = torch.randn(TOKENS, WIDTH).to(dtype)
    out.backward(grad)
    assert torch.equal(y.grad, grad[order.tokens])


def test_weights_follow_their_rows():
    order = Permutation.of(experts(), EXPERTS)
    weights = torch.randn(TOKENS, TOPK, requires_grad=True)
    rows = permute_weights(weights, order)
    assert torch.equal(rows, weights.flatten()[order.choices])
    rows.backward(rows.detach())
    assert torch.equal(weights.grad, weights)


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    order = Permutation.of(torch.zeros(tokens, 1, dtype=torch.int64), EXPERTS)
    x = torch.randn(tokens, WIDTH, requires_grad=True)
    out = combine(permute(x, order), order)
    assert torch.equal(out, x)
    out.sum().backward()
    assert torch.equal(x.grad, torch.ones(tokens, WIDTH))


# Dropped choices (the expert E), and experts filled up to a capacity


def dropped(seed: int = 0) -> torch.Tensor:
    where = experts(seed)
    return where.masked_fill(torch.rand(where.shape, generator=torch.Generator().manual_seed(seed)) < 0.3, EXPERTS)


@pytest.mark.parametrize("capacity", [None, TOKENS, 22])
def test_dropped_choices_have_no_effect_either_way(capacity):
    """NaN in the rows of what is dropped, in values and in gradients, reaches nobody."""
    where = dropped()
    order = Permutation.of(where, EXPERTS, drops=True, capacity=capacity)
    own = torch.bincount(where.flatten(), minlength=EXPERTS + 1)[:-1].tolist()
    assert order.counts.tolist() == (own if capacity is None else [capacity] * EXPERTS)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    weights = torch.randn(TOKENS, TOPK, requires_grad=True)
    rows, spread = permute(x, order), permute_weights(weights, order)
    valid = torch.arange(len(rows)) < order.counts.sum()
    y = torch.where(valid[:, None], rows * spread[:, None], torch.nan)
    y.register_hook(lambda grad: torch.where(valid[:, None], grad, torch.nan))
    rows.register_hook(lambda grad: torch.where(valid[:, None], grad, torch.nan))
    spread.register_hook(lambda grad: torch.where(valid, grad, torch.nan))
    out, grad = combine(y, order), torch.randn(TOKENS, WIDTH)
    out.backward(grad)

    kept = (where < EXPERTS).float()
    share = (weights.detach() * kept).sum(1, keepdim=True)
    torch.testing.assert_close(out, share * x.detach())
    torch.testing.assert_close(x.grad, share * grad)
    torch.testing.assert_close(weights.grad, kept * (x.detach() * grad).sum(1, keepdim=True))


def test_filled_rows_are_zeros_behind_their_experts_own():
    where, capacity = dropped(), 30
    order = Permutation.of(where, EXPERTS, drops=True, capacity=capacity)
    plain = Permutation.of(where, EXPERTS, drops=True)
    x = torch.randn(TOKENS, WIDTH)
    filled, own = permute(x, order).view(EXPERTS, capacity, WIDTH), permute(x, plain)
    for expert, part in enumerate(own.split([*plain.counts.tolist(), int((where == EXPERTS).sum())])[:-1]):
        assert torch.equal(filled[expert, : len(part)], part)
        assert not filled[expert, len(part) :].any()
    grad = torch.autograd.grad(combine(y := torch.randn(EXPERTS * capacity, WIDTH).requires_grad_(), order).sum(), y)[0]
    assert torch.equal(grad.any(1), order.choices >= 0)


@pytest.mark.parametrize(("drops", "capacity"), [(False, None), (True, None), (True, 9)])
@pytest.mark.parametrize("alignment", [4, 128])
def test_rows_filled_up_to_whole_tiles(drops, capacity, alignment):
    """CASES 13: each expert begins at a multiple, its rows as before, zeros behind them; sums see neither."""
    where = experts()
    if drops:
        where[::3, 1] = EXPERTS
        where[where == 2] = EXPERTS  # an expert without rows
        for number in range(EXPERTS if capacity else 0):
            chosen = (where == number).nonzero()
            where[tuple(chosen[capacity:].T)] = EXPERTS
    plain = Permutation.of(where, EXPERTS, drops=drops)
    order = Permutation.of(where, EXPERTS, drops=drops, capacity=capacity, alignment=alignment)
    room = [-(-(capacity or count) // alignment) * alignment for count in plain.counts.tolist()]
    assert order.counts.tolist() == room
    assert order.ends.tolist() == [sum(room[: e + 1]) for e in range(EXPERTS)]
    assert len(order.choices) >= sum(room)
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    rows, expected = permute(x, order), permute(y, plain)
    start = 0
    for own, filled, count in zip(
        expected.split([*plain.counts, len(expected) - plain.counts.sum()]), room, plain.counts, strict=False
    ):
        assert torch.equal(rows[start : start + count], own)
        assert not rows[start + count : start + filled].any()
        start += filled
    assert not rows[start:].any()
    nan = torch.where((order.choices < 0)[:, None], torch.nan, rows * 3)  # nobody's rows may hold anything
    out, same = combine(nan, order), combine(expected * 3, plain)
    assert torch.equal(out, same)
    grad = torch.randn_like(out)
    out.backward(grad), same.backward(grad)
    assert torch.equal(x.grad, y.grad)
