"""The model's linears and parameters, by global name, from the configuration alone.

h hidden size, f MLP width, a query heads, g key/value heads, d width of a head, V vocabulary, S positions:

    embedding.word_embeddings        [V, h]            embedding.position_embeddings  [S, h]   (learned positions)
    layers.N.attention.qkv           [(a + 2g) d, h]   layers.N.attention.proj        [h, a d]
    layers.N.mlp.fc1                 [f, h], [2f, h] with SwiGLU
    layers.N.mlp.fc2                 [h, f]            lm_head                        [V, h]   (untied only)
    layers.N.{input_norm, mlp_norm}, final_norm  [h]   layers.N.attention.{q_norm, k_norm}    [d]

All formulas are for one rank that holds the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megafp8.config import Config
from megafp8.fp8 import Recipe, policy


@dataclass(frozen=True)
class LinearShape:
    """A linear `y = x W^T + b` with W `[out_features, in_features]`; recipe None means high precision."""

    name: str
    out_features: int
    in_features: int
    bias: bool
    recipe: Recipe | None


@dataclass(frozen=True)
class ParameterShape:
    """A parameter's shape as stored, vocabulary padding included, and without it. decay: weight decay applies."""

    name: str
    shape: tuple[int, ...]
    unpadded: tuple[int, ...]
    decay: bool

    @property
    def numel(self) -> int:
        """Elements stored."""
        return math.prod(self.shape)

    @property
    def unpadded_numel(self) -> int:
        """Elements of the model proper."""
        return math.prod(self.unpadded)


def layer_linears(config: Config) -> dict[str, tuple[int, int, bool]]:
    """Returns name within a layer -> (out features, in features, bias), in the order of the forward pass."""
    m = config.model
    queries = m.num_attention_heads * m.kv_channels
    groups = m.num_query_groups * m.kv_channels
    inner = m.ffn_hidden_size * (2 if m.swiglu else 1)
    return {
        "attention.qkv": (queries + 2 * groups, m.hidden_size, m.add_bias_linear or m.add_qkv_bias),
        "attention.proj": (m.hidden_size, queries, m.add_bias_linear),
        "mlp.fc1": (inner, m.hidden_size, m.add_bias_linear),
        "mlp.fc2": (m.hidden_size, m.ffn_hidden_size, m.add_bias_linear),
    }


def linears(config: Config) -> list[LinearShape]:
    """Returns the model's linears in the order of the forward pass, each with its recipe.

    Args:
        config: resolved, with the vocabulary known (`with_vocab_size`).

    Raises:
        ValueError: a pattern of `--keep-modules-in-bf16` matches no linear.
    """
    recipe_of = policy.from_config(config)
    shapes = []
    for layer in range(config.model.num_layers):
        for part, (out_features, in_features, bias) in layer_linears(config).items():
            name = f"layers.{layer}.{part}"
            shapes.append(LinearShape(name, out_features, in_features, bias, recipe_of(name)))
    recipe_of.check()
    m = config.model
    return [*shapes, LinearShape("lm_head", m.padded_vocab_size, m.hidden_size, False, None)]


def parameters(config: Config) -> list[ParameterShape]:
    """Returns the model's parameters under their global names; a tied LM head has none of its own."""
    m = config.model
    vocabulary = ((m.padded_vocab_size, m.hidden_size), (m.unpadded_vocab_size, m.hidden_size))
    found = [ParameterShape("embedding.word_embeddings.weight", *vocabulary, True)]
    if m.position_embedding_type == "learned_absolute":
        found.append(_plain("embedding.position_embeddings.weight", m.max_position_embeddings, m.hidden_size))
    for layer in range(m.num_layers):
        found.extend(_layer_parameters(config, f"layers.{layer}"))
    found.extend(_norm(config, "final_norm", m.hidden_size))
    if m.untie_embeddings_and_output_weights:
        found.append(ParameterShape("lm_head.weight", *vocabulary, True))
    return found


def parameter_count(config: Config) -> int:
    """Returns the number of the model's parameters, vocabulary padding not counted."""
    return sum(p.unpadded_numel for p in parameters(config))


def _layer_parameters(config: Config, layer: str) -> Iterator[ParameterShape]:
    m = config.model
    for norm in ("input_norm", "mlp_norm"):
        yield from _norm(config, f"{layer}.{norm}", m.hidden_size)
    for part, (out_features, in_features, bias) in layer_linears(config).items():
        yield _plain(f"{layer}.{part}.weight", out_features, in_features)
        if bias:
            yield _plain(f"{layer}.{part}.bias", out_features)
    if m.qk_layernorm:
        for norm in ("q_norm", "k_norm"):
            yield from _norm(config, f"{layer}.attention.{norm}", m.kv_channels)


def _norm(config: Config, name: str, size: int) -> Iterator[ParameterShape]:
    yield _plain(f"{name}.weight", size)
    if config.model.normalization == "LayerNorm":
        yield _plain(f"{name}.bias", size)


def _plain(name: str, *shape: int) -> ParameterShape:
    return ParameterShape(name, shape, shape, decay=len(shape) > 1)
