"""Experts, latent attention and sliding windows on a GPU: equal to the CPU, deterministic where asked."""

from dataclasses import replace

import pytest
import torch

from megafp8.core.build import RecomputePlan
from megafp8.core.transformer.core_attention import CoreAttention, Sequences
from megafp8.fp8 import get_recipe
from megafp8.fp8.policy import Policy
from megafp8.step import StepContext
from tests.core.families import DEEPSEEK, FAMILIES
from tests.core.helpers import Sink, batch, gradients, make_model, relative_error

CUDA = torch.device("cuda")
MEDIUM = replace(
    DEEPSEEK,
    hidden_size=256,
    ffn_hidden_size=512,
    moe_ffn_hidden_size=256,
    moe_shared_expert_intermediate_size=256,
    qk_head_dim=64,
    qk_pos_emb_head_dim=64,
    v_head_dim=64,  # narrower than queries and keys
    q_lora_rank=128,
    kv_lora_rank=128,
    mtp_num_layers=1,
    moe_aux_loss_coeff=(0.01,),
)


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_equals_the_cpu(family):
    tokens, labels, mask = batch()
    results = []
    for device in (torch.device("cpu"), CUDA):
        model = make_model(FAMILIES[family].model, random=True).to(device)
        loss = model(tokens.to(device), step=StepContext(), labels=labels.to(device), loss_mask=mask.to(device))
        loss.backward()
        results.append((loss.cpu(), {n: g.cpu() for n, g in gradients(model).items()}))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=0)
    for name, grad in results[0][1].items():
        assert relative_error(results[1][1][name], grad) < 1e-4, name


@pytest.mark.parametrize("recipe", [None, "blockwise", "tensorwise", "mxfp8"])
def test_deterministic_mode_and_recomputation(deterministic, recipe):
    """The same bits twice and with recomputation, uneven loads and idle experts included."""
    recipe_of = Policy(get_recipe(recipe) if recipe else None)
    tokens, labels, mask = (t.to(CUDA) for t in batch(2, 128))
    results = []
    for plan in (RecomputePlan(), RecomputePlan(), RecomputePlan(unit=2), RecomputePlan(frozenset({"moe", "mlp"}))):
        model = make_model(
            MEDIUM, dtype=torch.bfloat16, device=CUDA, deterministic=True, recompute=plan, recipe_of=recipe_of
        )
        sink = Sink(model)
        loss = model(tokens, step=StepContext(grads=sink), labels=labels, loss_mask=mask)
        loss.backward()
        results.append([loss, *sink.buffers.values()])
    assert all(torch.isfinite(value).all() for value in results[0])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


@pytest.mark.parametrize("channels", [64, 32])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 0, 40])
def test_attention_of_unlike_widths_and_windows(window, documents, channels):
    """BF16 kernels against the plain formula in FP32, gradients too; values may be narrower than queries."""
    generator = torch.Generator().manual_seed(0)
    widths = (64, 64, channels)
    exact = [torch.randn(512, 4, d, generator=generator).to(CUDA).requires_grad_() for d in widths]
    fast = [x.detach().bfloat16().requires_grad_() for x in exact]
    bounds = torch.tensor([0, 1, 130, 256, 500, 512], dtype=torch.int32, device=CUDA) if documents else None
    grad = torch.randn(512, 4 * channels, generator=generator).to(CUDA)
    outs = []
    for inputs in (exact, fast):
        core = CoreAttention("core", scale=0.1, window=window)
        out = core(*inputs, Sequences(2, 256, cu_seqlens=bounds), StepContext())
        out.backward(grad.to(out.dtype))
        outs.append(out)
    assert relative_error(outs[1], outs[0]) < 1e-2
    # A token that sees itself alone has a constant softmax: gradients of q and k are 0, and rounding that of v's size.
    least = exact[2].grad.norm() if window == 0 else 0.0
    for a, b in zip(fast, exact, strict=True):
        assert (a.grad - b.grad).norm() < 2e-2 * max(b.grad.norm(), least)
