"""Tiny models and a gradient sink for the tests of `core`."""

from dataclasses import replace

import torch
from torch import Tensor

from megafp8.config.model import ModelConfig
from megafp8.core.build import BuildContext
from megafp8.core.gpt import GPTModel, initialize
from megafp8.params import GradSink, named_specs, unpadded

VOCAB = 101

LLAMA = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    kv_channels=8,
    num_query_groups=2,
    max_position_embeddings=64,
    position_embedding_type="rope",
    unpadded_vocab_size=VOCAB,
    padded_vocab_size=128,
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
)
GPT2 = replace(
    LLAMA,
    num_query_groups=4,
    position_embedding_type="learned_absolute",
    normalization="LayerNorm",
    swiglu=False,
    add_bias_linear=True,
    untie_embeddings_and_output_weights=False,
)
EXOTIC = replace(
    LLAMA,
    num_query_groups=1,
    kv_channels=16,  # wider than hidden / heads
    rotary_percent=0.5,
    rotary_interleaved=True,
    normalization="LayerNorm",
    apply_layernorm_1p=True,
    swiglu=False,
    squared_relu=True,
    add_qkv_bias=True,
    qk_layernorm=True,
    untie_embeddings_and_output_weights=False,
)
FAMILIES = {"llama": LLAMA, "gpt2": GPT2, "exotic": EXOTIC}


def make_model(config: ModelConfig = LLAMA, *, seed: int = 1, random: bool = False, **build) -> GPTModel:
    """A model with initial values, or with `random` ones everywhere (norms near one, biases not zero)."""
    model = GPTModel(BuildContext(config, **build))
    initialize(model, seed)
    if random:
        randomize(model, seed)
    return model


@torch.no_grad()
def randomize(model: GPTModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for spec, param in named_specs(model):
        value = torch.randn(spec.box_shape, generator=generator) * 0.2 + float(spec.init.kind == "ones")
        unpadded(param, spec).copy_(value)


def parameters(model: GPTModel) -> dict[str, Tensor]:
    return {spec.name: param for spec, param in named_specs(model)}


def gradients(model: GPTModel) -> dict[str, Tensor]:
    return {spec.name: param.grad for spec, param in named_specs(model)}


def batch(b: int = 2, s: int = 16, vocab: int = VOCAB, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, labels, loss mask), random."""
    generator = torch.Generator().manual_seed(seed)
    tokens, labels = (torch.randint(vocab, (b, s), generator=generator) for _ in range(2))
    return tokens, labels, (torch.rand(b, s, generator=generator) < 0.7).float()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected value, FP64."""
    expected = expected.double()
    return ((actual.double() - expected).norm() / expected.norm().clamp(min=1e-30)).item()


class Sink(GradSink):
    """FP32 gradient buffers by parameter, poisoned with a known offset, and the order of `ready` calls."""

    OFFSET = 0.25

    def __init__(self, model: GPTModel) -> None:
        self.names = {id(param): spec.name for spec, param in named_specs(model)}
        self.buffers = {
            spec.name: torch.full(param.shape, self.OFFSET, device=param.device) for spec, param in named_specs(model)
        }
        self.calls: list[str] = []

    def buffer(self, param: Tensor) -> Tensor:
        return self.buffers[self.names[id(param)]]

    def ready(self, param: Tensor) -> None:
        self.calls.append(self.names[id(param)])
