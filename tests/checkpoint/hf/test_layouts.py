"""Layouts against element-by-element definitions, and each is undone by its inverse. CASES 25, 26."""

import pytest
import torch

from megafp8.checkpoint.hf import layouts as L
from megafp8.config.model import ModelConfig

HEADS, GROUPS, D, WIDTH = 6, 2, 4, 5
MODEL = ModelConfig(num_attention_heads=HEADS, num_query_groups=GROUPS, kv_channels=D)


def qkv(width=(WIDTH,)):
    return [torch.randn(n * D, *width) for n in (HEADS, GROUPS, GROUPS)]


def test_qkv_lies_by_group():
    q, k, v = qkv()
    expected = []
    for group in range(GROUPS):
        for head in range(3 * group, 3 * group + 3):
            expected += [q[head * D + i] for i in range(D)]
        expected += [k[group * D + i] for i in range(D)] + [v[group * D + i] for i in range(D)]
    assert torch.equal(L.QKV.join([q, k, v], MODEL), torch.stack(expected))


def test_gate_comes_first():
    gate, up = torch.randn(7, WIDTH), torch.randn(7, WIDTH)
    joined = L.STACKED.join([gate, up], MODEL)
    assert joined.shape == (2, 7, WIDTH)
    assert torch.equal(joined[0], gate)


def test_interleaving_makes_pairs_neighbours():
    x = torch.arange(2 * D)[:, None].float()
    assert L.rows_interleaved(x, D).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert torch.equal(L.rows_in_halves(L.rows_interleaved(x, D), D), x)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [(WIDTH,), (), (1,)])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_qkv_is_undone(groups, width, interleaved):
    """Weights, biases and columns of tile numbers; every head count."""
    model = ModelConfig(
        num_attention_heads=HEADS, num_query_groups=groups, kv_channels=D, rotary_interleaved=interleaved
    )
    parts = [torch.randn(n * D, *width) for n in (HEADS, groups, groups)]
    joined = L.QKV.join(parts, model)
    for back, part in zip(L.QKV.split(joined, model), parts, strict=True):
        assert torch.equal(back, part)
    plain = ModelConfig(num_attention_heads=HEADS, num_query_groups=groups, kv_channels=D)
    assert torch.equal(joined, L.QKV.join(parts, plain)) is not interleaved


def test_norms_of_heads_lie_as_their_rows():
    model = ModelConfig(num_attention_heads=3, num_query_groups=3, kv_channels=D, rotary_interleaved=True)
    weight = torch.arange(D).float()
    assert L.CHANNELS.join([weight], model).tolist() == [0, 2, 1, 3]
    assert torch.equal(L.CHANNELS.split(L.CHANNELS.join([weight], model), model)[0], weight)
    assert torch.equal(L.CHANNELS.join([weight], MODEL), weight)


@pytest.mark.parametrize("layout", [L.SAME, L.TURNED, L.STACKED])
def test_others_are_undone(layout):
    parts = [torch.randn(7, WIDTH) for _ in range(2 if layout is L.STACKED else 1)]
    for back, part in zip(layout.split(layout.join(parts, MODEL), MODEL), parts, strict=True):
        assert torch.equal(back, part)


@pytest.mark.parametrize("bias", [False, True])
def test_gpt2s_fused_matrix(bias):
    model = ModelConfig(num_attention_heads=3, num_query_groups=3, kv_channels=D)
    parts = [torch.randn(3 * D) if bias else torch.randn(3 * D, WIDTH) for _ in range(3)]
    stored = torch.cat(parts) if bias else torch.cat(parts).t().contiguous()
    joined = L.TURNED_QKV.join([stored], model)
    assert torch.equal(joined, L.QKV.join(parts, model))
    assert torch.equal(L.TURNED_QKV.split(joined, model)[0], stored)
