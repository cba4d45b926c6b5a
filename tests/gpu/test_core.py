"""The model on a GPU: equal to the CPU, deterministic where asked, document masks, memory."""

import gc
from dataclasses import replace

import pytest
import torch

from megafp8.core.build import RecomputePlan
from megafp8.core.transformer.core_attention import CoreAttention, Sequences
from megafp8.fp8 import get_recipe
from megafp8.fp8.policy import Policy
from megafp8.step import StepContext
from tests.core.helpers import EXOTIC, FAMILIES, LLAMA, Sink, batch, gradients, make_model, relative_error

CUDA = torch.device("cuda")
BOUNDS = [0, 5, 6, 16, 29, 32]
MEDIUM = replace(LLAMA, hidden_size=256, kv_channels=64, ffn_hidden_size=512)


@pytest.fixture
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def moved(*tensors):
    return [t.to(CUDA) for t in tensors]


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_equals_the_cpu(family):
    tokens, labels, mask = batch()
    results = []
    for device in (torch.device("cpu"), CUDA):
        model = make_model(FAMILIES[family], random=True).to(device)
        loss = model(tokens.to(device), step=StepContext(), labels=labels.to(device), loss_mask=mask.to(device))
        loss.backward()
        results.append((loss.cpu(), {n: g.cpu() for n, g in gradients(model).items()}))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-6, atol=0)
    for name, grad in results[0][1].items():
        assert relative_error(results[1][1][name], grad) < 1e-5, name


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_packed_attention_equals_separate_documents(groups):
    """Variable-length attention (BF16) against one document at a time in FP32, gradients too."""
    generator = torch.Generator().manual_seed(0)
    exact = [torch.randn(512, n, 64, generator=generator).to(CUDA).requires_grad_() for n in (4, groups, groups)]
    packed = [x.detach().bfloat16().requires_grad_() for x in exact]
    cu_seqlens = torch.tensor([0, 1, 130, 130, 256, 500, 512], dtype=torch.int32, device=CUDA)
    sequences = Sequences(2, 256, cu_seqlens=cu_seqlens)
    grad = torch.randn(512, 256, generator=generator).to(CUDA)
    outs = []
    for inputs in (exact, packed):
        out = CoreAttention("core")(*inputs, sequences, StepContext())
        out.backward(grad.to(out.dtype))
        outs.append(out)
    assert relative_error(outs[1], outs[0]) < 1e-2
    for a, b in zip(packed, exact, strict=True):
        assert relative_error(a.grad, b.grad) < 1e-2


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("recipe", [None, "blockwise", "tensorwise"])
def test_deterministic_mode_and_recomputation(deterministic, recipe, documents):
    """The same bits twice, and with any recomputation; hidden dropout on."""
    m = replace(MEDIUM, hidden_dropout=0.1, num_layers=3)
    recipe_of = Policy(get_recipe(recipe) if recipe else None)
    tokens, labels, mask = moved(*batch(2, 128))
    cu_seqlens = torch.tensor([0, 50, 128, 256], dtype=torch.int32, device=CUDA) if documents else None
    parts = frozenset({"core_attn", "mlp", "layernorm"})
    plans = [RecomputePlan(), RecomputePlan(), RecomputePlan(unit=2), RecomputePlan(parts)]
    results = []
    for plan in plans:
        model = make_model(
            m, dtype=torch.bfloat16, device=CUDA, deterministic=True, recompute=plan, recipe_of=recipe_of
        )
        sink = Sink(model)
        loss = model(tokens, step=StepContext(grads=sink), labels=labels, loss_mask=mask, cu_seqlens=cu_seqlens)
        loss.backward()
        norms = {n: g for n, g in gradients(model).items() if g is not None}
        results.append([loss, *sink.buffers.values(), *norms.values()])
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_bf16_is_near_fp32():
    tokens, labels, mask = moved(*batch(2, 128))
    grads = []
    for dtype in (torch.float32, torch.bfloat16):
        model = make_model(MEDIUM, dtype=dtype, device=CUDA)
        model(tokens, step=StepContext(), labels=labels, loss_mask=mask).backward()
        grads.append(gradients(model))
    for name, grad in grads[0].items():
        assert relative_error(grads[1][name], grad) < 0.05, name


def test_attention_dropout():
    model = make_model(replace(EXOTIC, attention_dropout=0.3), dtype=torch.bfloat16, device=CUDA)
    tokens, labels = moved(*batch()[:2])
    for cu_seqlens in (None, torch.tensor(BOUNDS, dtype=torch.int32, device=CUDA)):
        runs = [
            model(tokens, step=StepContext(microbatch=i), labels=labels, cu_seqlens=cu_seqlens).item()
            for i in (0, 0, 1)
        ]
        assert runs[0] == runs[1] != runs[2]


def requested():
    """Bytes asked for and not freed; the allocator's blocks may be larger."""
    return torch.cuda.memory_stats()["requested_bytes.all.current"]


@pytest.mark.parametrize("recipe", [None, "blockwise"])
def test_bytes_that_a_layer_keeps(recipe):
    """By count, a token: the residual stream twice, q, k, v, attention's output and fc1's output in BF16, and for
    the inputs of qkv and fc1 one FP8 copy with scales (BF16: the inputs themselves, and fc2's)."""
    h, f, kv, tokens = 1024, 4096, 256, 2048
    m = replace(LLAMA, hidden_size=h, kv_channels=128, num_attention_heads=8, num_query_groups=2, ffn_hidden_size=f)
    x = torch.randn(tokens, h, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    recipe_of = Policy(get_recipe(recipe) if recipe else None)
    model = make_model(replace(m, num_layers=2), dtype=torch.bfloat16, device=CUDA, recipe_of=recipe_of)
    layer, sequences, step = model.layers[1], Sequences(1, tokens), StepContext()
    layer(x, sequences, step).sum().backward()  # derived weight copies and workspaces are made once
    gc.collect()
    before = requested()
    y = layer(x, sequences, step)
    kept = requested() - before - y.nbytes
    bf16 = 2 * (h + (h + 2 * kv) + h + 2 * f)  # x after attention; q, k, v; attention's output; fc1's output
    inputs = 2 * (h + h + f) if recipe is None else (h + h) * (1 + 4 / 128)
    assert kept / tokens == pytest.approx(bf16 + inputs, rel=0.01)
