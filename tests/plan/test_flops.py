"""FLOPs against PyTorch's counter (CASES 75)."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megafp8.core.gpt import build_model
from megafp8.parallel import ParallelContext
from megafp8.plan.flops import attention_flops_per_token, forward_flops_per_token, training_flops_per_token
from megafp8.step import StepContext
from tests.plan.variants import VARIANTS


def counted(config, *, backward):
    """FLOPs of matrix products a token in one pass; attention in its plain form, which computes all s x s products."""
    model = build_model(config, ParallelContext(), "cpu")
    shape = (config.train.micro_batch_size, config.data.seq_length)
    tokens = torch.randint(257, shape, generator=torch.Generator().manual_seed(0))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = model(tokens, step=StepContext(), labels=tokens)
        if backward:
            loss.backward()
    return counter.get_total_flops() / tokens.numel()


@pytest.mark.parametrize("variant", VARIANTS)
def test_forward_equals_the_counter(make, variant):
    """GQA, SwiGLU, heads wider than h / heads, tied and untied: within 1% (here: exactly)."""
    config = make(variant)
    assert forward_flops_per_token(config, causal=False) == pytest.approx(counted(config, backward=False), rel=1e-9)


@pytest.mark.parametrize("variant", ["gpt2", "qwen"])
def test_training_equals_the_counter(make, variant):
    config = make(variant)
    assert training_flops_per_token(config, causal=False) == pytest.approx(counted(config, backward=True), rel=0.01)


def test_head_width_is_not_assumed(make):
    """CASES 75: width 128 where h / heads is 80."""
    config = make("llama", hidden_size=640, num_attention_heads=8, kv_channels=128, num_layers=1)
    assert forward_flops_per_token(config, causal=False) == pytest.approx(counted(config, backward=False), rel=1e-9)


def test_causal_attention_counts_the_keys_that_are_seen(make):
    """Tokens see 1, 2, ..., s keys."""
    config = make("llama", seq_length=7)
    m = config.model
    seen = sum(range(1, 8)) / 7
    expected = m.num_layers * 4 * m.num_attention_heads * m.kv_channels * seen
    assert attention_flops_per_token(config) == pytest.approx(expected)
    assert attention_flops_per_token(config, causal=False) == pytest.approx(expected / seen * 7)


def test_recomputation_is_not_counted(make):
    plain = make("llama")
    assert training_flops_per_token(make("llama", recompute_granularity="full")) == training_flops_per_token(plain)
    assert training_flops_per_token(plain) == 3 * forward_flops_per_token(plain)
