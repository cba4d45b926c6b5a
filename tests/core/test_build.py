"""build_model from a configuration: parameters as planned, precision by policy, refusals."""

import pytest
import torch

from megafp8.config import build_config, with_vocab_size
from megafp8.core.gpt import build_model
from megafp8.parallel import ParallelContext
from megafp8.params import named_specs
from megafp8.plan.shapes import parameter_count, parameters
from megafp8.step import StepContext
from tests.core.helpers import batch

BASE = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 32,
    "micro_batch_size": 2,
    "train_iters": 10,
    "lr": 1e-3,
    "mock_data": True,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 101,
}
FP8 = {"bf16": True, "fp8_format": "e4m3"}
LLAMA = {
    "group_query_attention": True,
    "num_query_groups": 2,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
QWEN = {**LLAMA, "qk_layernorm": True, "add_qkv_bias": True, "kv_channels": 32, "ffn_hidden_size": 96}


def config(**flags):
    return with_vocab_size(build_config(**BASE, **flags, env={}), 101)


def build(device="cpu", **flags):
    return build_model(config(**flags), ParallelContext(), device)


@pytest.mark.parametrize("flags", [{}, LLAMA, QWEN], ids=["gpt2", "llama", "qwen"])
def test_parameters_are_those_of_the_plan(flags):
    model = build(**flags)
    planned = {p.name: p for p in parameters(config(**flags))}
    specs = {spec.name: (spec, param) for spec, param in named_specs(model)}
    assert specs.keys() == planned.keys()
    for name, (spec, param) in specs.items():
        assert param.shape == planned[name].shape, name
        assert spec.decay == planned[name].decay, name
        assert param.dtype == torch.float32
    assert sum(spec.numel for spec, _ in specs.values()) == parameter_count(config(**flags))


def test_precision_follows_the_policy():
    flags = {**LLAMA, **FP8, "keep_modules_in_bf16": ("layers.1.mlp.*", "*.proj")}
    model = build(**flags)
    fp8 = {name for name, module in model.named_modules() if getattr(module, "recipe", None) is not None}
    assert fp8 == {"layers.0.attention.qkv", "layers.0.mlp.fc1", "layers.0.mlp.fc2", "layers.1.attention.qkv"}
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    with pytest.raises(ValueError, match=r"'layers\.7\.\*' matches no linear"):
        build(**LLAMA, **FP8, keep_modules_in_bf16=("layers.7.*",))


def test_seed_and_masters():
    """BF16 weights are the rounding of the FP32 model's, whatever else the configuration says."""
    fp32, bf16, other = build(**LLAMA), build(**LLAMA, **FP8), build(**LLAMA, seed=7)
    for a, b, c in zip(fp32.parameters(), bf16.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b)
        assert a.dim() == 1 or not torch.equal(a, c)


@pytest.mark.parametrize("flags", [{}, {**LLAMA, **FP8}], ids=["gpt2", "llama fp8"])
def test_trains(flags):
    """Plain SGD steps on one batch get below the loss of random guesses."""
    model = build(**flags, hidden_dropout=0.0, attention_dropout=0.0)
    tokens, labels, _ = batch(2, 32)
    losses = []
    for _ in range(30):
        loss = model(tokens, step=StepContext(), labels=labels)
        loss.backward()
        losses.append(loss.item() / tokens.numel())
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.02 * p.grad
                p.grad = None
    assert losses[0] == pytest.approx(4.62, abs=0.3)  # log 101
    assert losses[-1] < 0.85 * losses[0]


def test_meta_device_allocates_nothing():
    model = build("meta", num_query_groups=None)
    assert all(p.is_meta for p in model.parameters())
    assert sum(spec.numel for spec, _ in named_specs(model)) == parameter_count(config())
