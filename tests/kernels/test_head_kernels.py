"""Queries and keys normalized and rotated by head, and latent attention's heads: PyTorch's bits in the PTX emulator."""

import pytest
import torch
from megafp8.kernels import head_norm, latent_heads
from torch.nn import functional as F

from megafp8.core.transformer.rope import _rotate, apply_rotary
from tests.kernels import testing

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs these on the GPU that is here")


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def angles(tokens, half):
    found = numbers(tokens, half).float()
    return found.cos(), found.sin()


@pytest.mark.parametrize(("groups", "n", "d", "offset"), [(2, 4, 64, 0.0), (17, 1, 32, 1.0)])
def test_heads_are_normalized_and_rotated(groups, n, d, offset):
    """Values bit for bit; gradients against float64, where nothing is rounded on the way."""
    tokens, eps = 3, 1e-5
    qkv, weights, turn = numbers(tokens, groups * (n + 2) * d), (numbers(d), numbers(d) + 1), angles(tokens, d // 2)
    with testing.emulated_launches():
        made = head_norm.norm_heads(qkv, weights, *turn, n, eps=eps, offset=offset)
    q, k, v = qkv.view(tokens, groups, n + 2, d).split((n, 1, 1), 2)
    for got, x, weight in zip(made, (q, k), weights, strict=False):
        normal = F.rms_norm(x.float(), (d,), weight.float() + offset, eps).bfloat16()
        assert torch.equal(got, _rotate(normal, *turn, False).view(got.shape))
    assert torch.equal(made[2], v.reshape(made[2].shape))

    exact = [t.double().requires_grad_() for t in (qkv, *weights)]
    q, k, v = exact[0].view(tokens, groups, n + 2, d).split((n, 1, 1), 2)
    cos, sin = (t.double()[:, None, None] for t in turn)
    out = []
    for x, weight in ((q, exact[1]), (k, exact[2])):
        a, b = F.rms_norm(x, (d,), weight + offset, eps).chunk(2, -1)
        out.append(torch.cat([a * cos - b * sin, b * cos + a * sin], -1).reshape(tokens, -1, d))
    grads = [numbers(*x.shape) for x in made]
    wanted = torch.autograd.grad([*out, v.reshape(tokens, -1, d)], exact, [x.double() for x in grads])
    wide = [torch.stack([x, x], 1)[:, 0] for x in grads]  # other strides between tokens
    with testing.emulated_launches():
        found = head_norm.norm_heads_grad(*wide, qkv, weights, *turn, eps=eps, offset=offset)
    for got, want in zip(found, wanted, strict=True):
        assert (got.double() - want).norm() <= 4e-3 * want.norm()
    assert torch.equal(found[0].view(tokens, groups, n + 2, d)[:, :, n + 1], grads[2])


@pytest.mark.parametrize(("heads", "plain", "rotated", "values"), [(3, 32, 16, 32), (17, 64, 32, 32)])
def test_latent_heads_are_those_of_pytorch(heads, plain, rotated, values):
    tokens = 2
    turn = angles(tokens, rotated // 2)
    x, up = numbers(tokens, heads, plain + rotated), numbers(tokens, heads * (plain + values))
    shared = numbers(tokens, 8 + rotated)[:, 8:]  # as it lies behind the latent
    leaves = [t.requires_grad_() for t in (x, up, shared.detach())]
    first, tail = x.split((plain, rotated), -1)
    q = torch.cat([first, apply_rotary(tail, turn, interleaved=True)], -1)
    first, v = up.view(tokens, heads, -1).split((plain, values), -1)
    key = apply_rotary(leaves[2][:, None], turn, interleaved=True).expand(-1, heads, -1)
    k = torch.cat([first, key], -1)
    dq, dk, dv = (numbers(*t.shape) for t in (q, k, v))
    wanted = torch.autograd.grad((q, k, v), leaves, (dq, dk, dv))
    with testing.emulated_launches(), torch.no_grad():
        assert torch.equal(latent_heads.turn_tails(x, *turn), q)
        made = latent_heads.keys_and_values(up, shared, *turn, heads, plain)
        assert torch.equal(made[0], k)
        assert torch.equal(made[1], v)
        assert torch.equal(latent_heads.turn_tails(dq, *turn, back=True), wanted[0])
        found = latent_heads.keys_and_values_grad(dk.transpose(0, 1).contiguous().transpose(0, 1), dv, *turn)
    for got, want in zip(found, wanted[1:], strict=True):
        assert torch.equal(got, want)


def test_compiled_for_hopper():
    """At the sizes of Qwen3-30B-A3B and DeepSeek-V3 nothing spills, and memory is read and written in wide pieces."""
    qkv, cos = torch.empty(4, 40 * 128, dtype=torch.bfloat16), torch.empty(4, 64)
    up, shared, angle = torch.empty(4, 128 * 256, dtype=torch.bfloat16), qkv[:, :64], cos[:, :32].contiguous()
    with testing.captured_launches() as launches:
        weights = qkv[0, :128], qkv[1, :128]
        made = head_norm.norm_heads(qkv, weights, cos, cos, 8, eps=1e-6)
        head_norm.norm_heads_grad(*made, qkv, weights, cos, cos, eps=1e-6)
        latent_heads.turn_tails(torch.empty(4, 128, 192, dtype=torch.bfloat16), angle, angle)
        made = latent_heads.keys_and_values(up, shared, angle, angle, 128, 128)
        latent_heads.keys_and_values_grad(*made, angle, angle)
    assert len(launches) == 6
    for launch in launches:
        used = testing.resources(testing.compile_launch(launch))
        assert used.spills == 0, launch.kernel.__name__
        if launch.kernel.__name__ != "sum_rows_kernel":
            assert any(op.startswith(("STG.E.128", "STG.E.64")) for op in used.instructions), launch.kernel.__name__
