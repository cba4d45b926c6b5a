"""Rotary embedding against transformers, in both channel orders, partial, and scaled."""

from dataclasses import replace

import pytest
import torch

from megafp8.core.transformer.rope import apply_rotary, inverse_frequencies, rotary_channels, rotation
from tests.core.helpers import LLAMA

LONG = replace(LLAMA, kv_channels=128, rotary_base=500000.0)


def turned(x, m, positions):
    return apply_rotary(x, rotation(positions, inverse_frequencies(m)), interleaved=m.rotary_interleaved)


@pytest.mark.parametrize("percent", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_distance_only(interleaved, percent):
    """<rope(q, m), rope(k, n)> is a function of m - n, and channels past the rotated part stay."""
    m = replace(LLAMA, kv_channels=32, rotary_interleaved=interleaved, rotary_percent=percent)
    q, k = torch.randn(2, 1, 3, 32, generator=torch.Generator().manual_seed(0)).expand(2, 5, 3, 32)
    q5, k5 = turned(q, m, torch.arange(5) + 3), turned(k, m, torch.arange(5))
    scores = (q5 * k5).sum(-1)
    torch.testing.assert_close(scores, scores[:1].expand(5, 3), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(scores, (q * k).sum(-1), atol=1e-2)
    n = rotary_channels(m)
    assert torch.equal(q5[..., n:], q[..., n:])
    assert torch.equal(turned(q, m, torch.zeros(5, dtype=torch.long)), q)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient_is_the_rotation_back(interleaved):
    m = replace(LLAMA, rotary_interleaved=interleaved, rotary_percent=0.5)
    x = torch.randn(6, 2, 8, requires_grad=True)
    y = turned(x, m, torch.arange(6))
    grad = torch.randn(6, 2, 8)
    y.backward(grad)
    torch.testing.assert_close((y.detach() * grad).sum(), (x.detach() * x.grad).sum())  # orthogonal map
    torch.testing.assert_close(turned(x.grad, m, torch.arange(6)), grad)


def test_interleaved_is_the_other_order_of_channels():
    """The trap: the two orders agree only after the channels are permuted."""
    x = torch.randn(6, 2, 8)
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])  # interleaved place -> halves place
    halves = turned(x, LLAMA, torch.arange(6))
    neighbours = turned(x[..., order], replace(LLAMA, rotary_interleaved=True), torch.arange(6))
    torch.testing.assert_close(neighbours, halves[..., order])
    assert not torch.allclose(turned(x, replace(LLAMA, rotary_interleaved=True), torch.arange(6)), halves, atol=0.1)


def test_strided_input_bf16_and_fp32_angles():
    x = torch.randn(9, 2, 4, 8).bfloat16()[:, :, 1:3]
    m = replace(LLAMA, max_position_embeddings=1 << 20)
    positions = torch.arange(9) + 100_000  # BF16 or even wrapped positions would be far off
    y = turned(x, m, positions)
    exact = turned(x.float(), m, positions)
    assert y.is_contiguous()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("fields", "scaling"),
    [
        ({}, None),
        ({"rotary_seq_len_interpolation_factor": 4}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
    ],
)
def test_frequencies_equal_transformers(fields, scaling):
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=512,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 500000.0, **(scaling or {"rope_type": "default"})},
    )
    rotary = LlamaRotaryEmbedding(config)
    torch.testing.assert_close(inverse_frequencies(replace(LONG, **fields)), rotary.inv_freq, rtol=1e-6, atol=0)
