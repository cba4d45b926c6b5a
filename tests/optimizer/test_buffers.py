"""How gradients get into the flat buffers."""

import gc
import weakref

import pytest
import torch

from tests.optimizer.helpers import make_optimizer, make_param, make_params


def test_buffers_are_views_of_one_flat_tensor_in_the_local_shape():
    params = make_params()
    optimizer = make_optimizer(params)
    (flat,) = optimizer.grads.state.flats
    for spec, param in params:
        view = optimizer.grads.buffer(param)
        assert view.shape == param.shape == spec.local_shape
        assert view.dtype == torch.float32
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_microbatch_gradients_256_and_1_add_up_to_257():
    """CASES 46: BF16 accumulation would give 256."""
    spec, param = make_param("w", (3, 5))
    optimizer = make_optimizer([(spec, param)])
    optimizer.zero_grad()
    for gradient in (256.0, 1.0):
        (param * gradient).sum().backward()
        assert param.grad is None
    assert torch.equal(optimizer.grads.buffer(param), torch.full((3, 5), 257.0))
    assert optimizer.grads.ready_count("w") == 2


def test_a_filled_buffer_is_added_to_and_zero_clears_it():
    """CASES 46."""
    spec, param = make_param("w", (4,), dtype=torch.float32)
    optimizer = make_optimizer([(spec, param)])
    optimizer.grads.buffer(param).fill_(3.0)
    (param * 2).sum().backward()
    assert torch.equal(optimizer.grads.buffer(param), torch.full((4,), 5.0))
    optimizer.zero_grad()
    assert torch.equal(optimizer.grads.buffer(param), torch.zeros(4))
    assert optimizer.grads.ready_count("w") == 0


def test_the_first_gradient_is_written_and_the_next_one_added():
    a, b, c = (make_param(name, (4,), dtype=torch.float32) for name in "abc")
    optimizer = make_optimizer([a, b, c])
    for flat in optimizer.grads.state.flats:
        flat.fill_(torch.nan)
    optimizer.zero_grad(2)
    for _ in range(2):
        (a[1] * -0.0).sum().backward()
        view, adds = optimizer.grads.target(b[1])
        view.copy_(view + 2 if adds else torch.full((4,), 2.0))
    optimizer.reduce_gradients()
    views = optimizer.grads.state.views
    assert torch.equal(views["a"], torch.zeros(4))
    assert views["a"].signbit().all()  # added to zeros it would be +0: nothing after it tells the two apart
    assert torch.equal(views["b"], torch.full((4,), 4.0))
    assert torch.equal(views["c"], torch.zeros(4))  # none came


class _Matmul(torch.autograd.Function):
    """A linear that adds its own weight gradient into the sink, as fp8's does."""

    @staticmethod
    def forward(ctx, x, w, sink):
        ctx.save_for_backward(x, w)
        ctx.sink = sink
        return x @ w.t()

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        ctx.sink.buffer(w).add_(dy.t() @ x)
        ctx.sink.ready(w)
        return dy @ w, None, None


def test_the_hook_leaves_alone_what_a_linear_added_itself():
    own = make_param("own", (3, 4), dtype=torch.float32)
    other = make_param("other", (4,), dtype=torch.float32)
    optimizer = make_optimizer([own, other])
    x = torch.randn(5, 4)
    _Matmul.apply(x * other[1], own[1], optimizer.grads).sum().backward()
    assert optimizer.grads.ready_count("own") == 1
    assert optimizer.grads.ready_count("other") == 1
    expected = torch.ones(5, 3).t() @ (x * other[1].detach())
    torch.testing.assert_close(optimizer.grads.buffer(own[1]), expected)
    assert optimizer.grads.buffer(other[1]).abs().sum() > 0


def test_unready_names_the_parameters_without_a_gradient():
    a, b = make_param("a", (4,)), make_param("b", (4,))
    optimizer = make_optimizer([a, b])
    optimizer.zero_grad()
    a[1].sum().backward()
    assert optimizer.grads.unready() == ["b"]


def test_a_frozen_parameter_has_no_buffer():
    a, b = make_param("a", (4,)), make_param("b", (4,))
    b[1].requires_grad_(False)
    optimizer = make_optimizer([a, b])
    with pytest.raises(KeyError):
        optimizer.grads.buffer(b[1])
    assert "optimizer/master/b" not in optimizer.state()
    assert "model/b" in optimizer.weights.state()


def test_what_nobody_uses_any_more_is_freed():
    """A process that builds one model after another must not hold the first one's gradients and parameters."""
    params = make_params()
    optimizer = make_optimizer(params)
    sum((param * 2.0).sum() for _, param in params).backward()
    flat = optimizer.grads.state.flats[0]
    left = [weakref.ref(x) for x in (flat, optimizer.grads, *(param for _, param in params))]
    del flat, optimizer, params
    gc.collect()
    assert [ref() for ref in left] == [None] * len(left)
