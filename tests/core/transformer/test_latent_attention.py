"""Latent attention against the formulas in FP64, one head at a time; packed documents; what becomes of its scale."""

import math
from dataclasses import replace

import pytest
import torch

from megafp8.core.build import BuildContext
from megafp8.core.transformer.core_attention import Sequences
from megafp8.core.transformer.latent_attention import LatentAttention
from megafp8.core.transformer.rope import inverse_frequencies, rotation, rotation_scale, score_scale
from megafp8.step import StepContext
from tests.core.families import DEEPSEEK
from tests.core.helpers import randomize, relative_error

YARN = {"rope_type": "yarn", "rotary_scaling_factor": 40.0, "mscale": 0.9, "mscale_all_dim": 0.7}
KINDS = {
    "two latents": DEEPSEEK,
    "queries at once, no norms": replace(DEEPSEEK, q_lora_rank=None, qk_layernorm=False),
    "wide values": replace(DEEPSEEK, v_head_dim=20),
    "yarn": replace(DEEPSEEK, original_max_position_embeddings=8, **YARN),
    "window": replace(DEEPSEEK, window_size="3,0"),
}


def naive(m, p, x, turn, window=None):
    """x: FP64 [s, hidden], one sequence."""
    heads, plain, rope, value = m.num_attention_heads, m.qk_head_dim, m.qk_pos_emb_head_dim, m.v_head_dim

    def norm(x, name):
        if not m.qk_layernorm:
            return x
        return x / (x.pow(2).mean(-1, keepdim=True) + m.latent_norm_epsilon).sqrt() * p[f"{name}.weight"]

    def rotate(x):
        pairs = torch.view_as_complex(x.contiguous().view(len(x), -1, 2)) * turn
        return torch.view_as_real(pairs).flatten(1)

    if m.q_lora_rank is None:
        q = x @ p["q_proj.weight"].T
    else:
        q = norm(x @ p["q_down.weight"].T, "q_norm") @ p["q_up.weight"].T
    latent, key = (x @ p["kv_down.weight"].T).split([m.kv_lora_rank, rope], 1)
    up = norm(latent, "kv_norm") @ p["kv_up.weight"].T
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    if window is not None:
        mask = mask.triu(-window)
    mscale = 0.1 * m.mscale_all_dim * math.log(m.rotary_scaling_factor) + 1 if m.rope_type == "yarn" else 1
    outs = []
    for h in range(heads):
        query = q[:, h * (plain + rope) :][:, : plain + rope]
        both = up[:, h * (plain + value) :][:, : plain + value]
        scores = query[:, :plain] @ both[:, :plain].T + rotate(query[:, plain:]) @ rotate(key).T
        scores = scores * mscale**2 / math.sqrt(plain + rope)
        outs.append(scores.masked_fill(~mask, -math.inf).softmax(-1) @ both[:, plain:])
    return torch.cat(outs, 1) @ p["proj.weight"].T


def turns(m, length):
    """Complex numbers [s, rotated channels / 2], FP64."""
    cos, sin = rotation(torch.arange(length), inverse_frequencies(m), rotation_scale(m))
    return torch.complex(cos.double(), sin.double())


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_against_float64(kind):
    m = KINDS[kind]
    made = LatentAttention("layers.0.attention", BuildContext(m))
    randomize(made, 1)
    x = torch.randn(24, m.hidden_size, requires_grad=True)
    turn = rotation(torch.arange(12).repeat(2), inverse_frequencies(m), rotation_scale(m))
    out = made(x, Sequences(2, 12, turn), StepContext())
    grad = torch.randn_like(out)
    out.backward(grad)
    exact = {name: p.detach().double().requires_grad_() for name, p in made.named_parameters()}
    x64 = x.detach().double().requires_grad_()
    expected = torch.cat([naive(m, exact, part, turns(m, 12), m.window) for part in x64.chunk(2)])
    expected.backward(grad.double())
    assert relative_error(out, expected) < 1e-6
    assert relative_error(x.grad, x64.grad) < 1e-5
    for name, p in made.named_parameters():
        assert relative_error(p.grad, exact[name].grad) < 1e-5, name


def test_packed_documents_equal_documents_alone():
    made = LatentAttention("layers.0.attention", BuildContext(DEEPSEEK))
    randomize(made, 1)
    x = torch.randn(16, DEEPSEEK.hidden_size)
    frequencies = inverse_frequencies(DEEPSEEK)
    positions = torch.cat([torch.arange(5), torch.arange(11)])
    bounds = torch.tensor([0, 5, 16], dtype=torch.int32)
    packed = made(x, Sequences(1, 16, rotation(positions, frequencies), bounds), StepContext())
    alone = [
        made(part, Sequences(1, len(part), rotation(torch.arange(len(part)), frequencies)), StepContext())
        for part in x.split([5, 11])
    ]
    torch.testing.assert_close(packed, torch.cat(alone), rtol=1e-5, atol=1e-6)


def test_scales_of_yarn():
    """DeepSeek-V3's numbers: factor 40, both strengths 1: scores times 1.3689^2, rotation times 1."""
    m = replace(DEEPSEEK, rope_type="yarn", rotary_scaling_factor=40.0, mscale=1.0, mscale_all_dim=1.0)
    assert rotation_scale(m) == 1.0
    assert score_scale(m) == pytest.approx(1.368888**2 / math.sqrt(12), rel=1e-6)
    assert rotation_scale(replace(m, mscale_all_dim=0.0)) == pytest.approx(1.368888, rel=1e-6)
    assert score_scale(replace(m, mscale_all_dim=0.0)) == pytest.approx(1 / math.sqrt(12))
    assert score_scale(replace(m, rotary_scaling_factor=1.0)) == pytest.approx(1 / math.sqrt(12))
