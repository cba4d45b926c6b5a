"""Queries and keys by head on a GPU: the kernels against the modules' plain PyTorch, values and gradients."""

from dataclasses import replace

import pytest
import torch

from megafp8.core.transformer import heads
from megafp8.core.transformer.core_attention import Sequences
from megafp8.core.transformer.rope import inverse_frequencies, rotation
from megafp8.fp8 import backend
from megafp8.step import StepContext
from tests.core.families import DEEPSEEK
from tests.core.helpers import LLAMA, make_model
from tests.gpu.quantize_cases import normal

CUDA = torch.device("cuda")
NARROW = {"hidden_size": 256, "ffn_hidden_size": 256}
NORMALIZED = replace(LLAMA, **NARROW, qk_layernorm=True, kv_channels=64)
LATENT = replace(DEEPSEEK, **NARROW, q_lora_rank=64, kv_lora_rank=64)
MODELS = {
    "queries and keys normalized": NORMALIZED,
    "norms about one": replace(NORMALIZED, kv_channels=128, apply_layernorm_1p=True),
    "one group of many": replace(NORMALIZED, num_attention_heads=40, num_query_groups=1, kv_channels=32),
    "latent": replace(LATENT, qk_head_dim=64, qk_pos_emb_head_dim=32, v_head_dim=64),
    "latent, queries at once": replace(
        LATENT, qk_head_dim=128, qk_pos_emb_head_dim=64, v_head_dim=128, q_lora_rank=None
    ),
}


def attention_and_gradients(model, dtype):
    """The first layer's attention: what comes out, and the gradients of its input and parameters."""
    made = make_model(model, random=True, dtype=dtype).to(CUDA)
    attention = made.layers[0].attention
    x = normal(300, model.hidden_size).to(CUDA, dtype).requires_grad_()
    turn = rotation(torch.arange(150, device=CUDA).repeat(2), inverse_frequencies(model, CUDA))
    out = attention(x, Sequences(2, 150, turn), StepContext())
    out.backward(normal(*out.shape).to(CUDA, dtype) + 1)
    return [out, x.grad, *(p.grad for p in attention.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_kernels_are_the_modules(name, dtype, monkeypatch):
    """FP32 within its rounding; BF16 within that of values which differ in the last place here and there."""
    calls = []
    usable = heads._usable
    monkeypatch.setattr(heads, "_usable", lambda *given: calls.append(usable(*given)) or calls[-1])
    with_kernels = attention_and_gradients(MODELS[name], dtype)
    assert calls
    assert all(calls)
    monkeypatch.setattr(heads, "_usable", lambda *_: False)
    without = attention_and_gradients(MODELS[name], dtype)
    allowed = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for got, want in zip(with_kernels, without, strict=True):
        assert (got.float() - want.float()).norm() <= allowed * want.float().norm()


def test_a_long_tensor_of_heads():
    """More than 2^31 elements: offsets are 64 bits wide."""
    tokens, d = 54_000, 128
    qkv = torch.zeros(tokens, 320 * d, dtype=torch.bfloat16, device=CUDA)
    qkv[-1:] = normal(1, 320 * d).to(CUDA)
    turn = tuple(torch.full((tokens, d // 2), angle, device=CUDA) for angle in (0.6, 0.8))
    weights = torch.ones(d, device=CUDA, dtype=torch.bfloat16), torch.ones(d, device=CUDA, dtype=torch.bfloat16)
    kernels = backend.kernels("head_norm")
    q, k, v = kernels.norm_heads(qkv, weights, *turn, 8, eps=1e-6)
    few = kernels.norm_heads(qkv[-1:], weights, *(t[-1:] for t in turn), 8, eps=1e-6)
    for long, short in zip((q, k, v), few, strict=True):
        assert torch.equal(long[-1:], short)
        assert not long[:-1].any()
    del few, qkv
    torch.cuda.empty_cache()
