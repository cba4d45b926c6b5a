"""The model's linears and parameters, by global name, from the configuration alone.

h hidden size, f MLP width, a query heads, g key/value heads, d width of a head, V vocabulary, S positions:

    embedding.word_embeddings        [V, h]            embedding.position_embeddings  [S, h]   (learned positions)
    layers.N.attention.qkv           [(a + 2g) d, h]   layers.N.attention.proj        [h, a d]
    layers.N.mlp.fc1                 [f, h], [2f, h] with SwiGLU
    layers.N.mlp.fc2                 [h, f]            lm_head                        [V, h]   (untied only)
    layers.N.{input_norm, mlp_norm}, final_norm  [h]   layers.N.attention.{q_norm, k_norm}    [d]

Latent attention, experts and multi-token prediction have the shapes that megafp8/core/gpt.py lists.
All formulas are for one rank that holds the whole model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megafp8.config import Config
from megafp8.config.model import ModelConfig
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
class PartShape:
    """A linear of a layer, or a row of like ones, the experts'.

    part: name within the layer; `*` stands for the expert. copies: how many there are. share: how many of them each
    token goes through.
    """

    part: str
    out_features: int
    in_features: int
    bias: bool = False
    copies: int = 1
    share: int = 1

    @property
    def parts(self) -> Iterator[str]:
        """Names of all copies."""
        return (self.part.replace("*", str(number)) for number in range(self.copies))


@dataclass(frozen=True)
class ParameterShape:
    """A parameter's shape as stored, vocabulary padding included, and without it.

    decay: weight decay applies. expert: belongs to an expert.
    """

    name: str
    shape: tuple[int, ...]
    unpadded: tuple[int, ...]
    decay: bool
    expert: bool = False

    @property
    def numel(self) -> int:
        """Elements stored."""
        return math.prod(self.shape)

    @property
    def unpadded_numel(self) -> int:
        """Elements of the model proper."""
        return math.prod(self.unpadded)


@dataclass(frozen=True)
class LayerShape:
    """A transformer layer. name: global name; experts: its MLP is a mixture of experts."""

    name: str
    experts: bool


def layers(config: Config) -> list[LayerShape]:
    """Returns the model's layers in the order of the forward pass, those of multi-token prediction last."""
    m = config.model
    own = [LayerShape(f"layers.{number}", experts) for number, experts in enumerate(m.moe_layers)]
    return own + [LayerShape(f"mtp.{k}.layer", m.moe_layers[-1]) for k in range(m.mtp_num_layers or 0)]


def layer_linears(model: ModelConfig, *, experts: bool) -> list[PartShape]:
    """Returns the linears of a layer, with a mixture of experts or without, in the order of the forward pass."""
    return [*_attention(model), *(_experts(model) if experts else _mlp(model, "mlp", model.ffn_hidden_size))]


def _attention(m: ModelConfig) -> Iterator[PartShape]:
    heads, h = m.num_attention_heads, m.hidden_size
    if m.multi_latent_attention:
        if m.q_lora_rank is None:
            yield PartShape("attention.q_proj", heads * m.query_channels, h)
        else:
            yield PartShape("attention.q_down", m.q_lora_rank, h)
            yield PartShape("attention.q_up", heads * m.query_channels, m.q_lora_rank)
        yield PartShape("attention.kv_down", m.kv_lora_rank + m.qk_pos_emb_head_dim, h)
        yield PartShape("attention.kv_up", heads * (m.qk_head_dim + m.v_head_dim), m.kv_lora_rank)
    else:
        rows = (heads + 2 * m.num_query_groups) * m.kv_channels
        yield PartShape("attention.qkv", rows, h, m.add_bias_linear or m.add_qkv_bias)
    yield PartShape("attention.proj", h, heads * m.value_channels, m.add_bias_linear)


def _mlp(m: ModelConfig, name: str, ffn: int, copies: int = 1, share: int = 1) -> Iterator[PartShape]:
    inner = ffn * (2 if m.swiglu else 1)
    yield PartShape(f"{name}.fc1", inner, m.hidden_size, m.add_bias_linear, copies, share)
    yield PartShape(f"{name}.fc2", m.hidden_size, ffn, m.add_bias_linear, copies, share)


def _experts(m: ModelConfig) -> Iterator[PartShape]:
    yield from _mlp(m, "mlp.experts.*", m.moe_ffn_hidden_size, m.num_experts, m.moe_router_topk)
    if m.moe_shared_expert_intermediate_size:
        yield from _mlp(m, "mlp.shared_experts", m.moe_shared_expert_intermediate_size)
        if m.moe_shared_expert_gate:
            yield PartShape("mlp.shared_experts.gate", 1, m.hidden_size)


def linears(config: Config) -> list[LinearShape]:
    """Returns the model's linears in the order of the forward pass, each with its recipe.

    Args:
        config: resolved, with the vocabulary known (`with_vocab_size`).

    Raises:
        ValueError: a pattern of `--keep-modules-in-bf16` matches no linear.
    """
    m, recipe_of = config.model, policy.from_config(config)
    shapes = []
    for layer in layers(config):
        if layer.name.startswith("mtp."):
            shapes.append(LinearShape(eh_proj_of(layer), m.hidden_size, 2 * m.hidden_size, False, None))
        for shape in layer_linears(m, experts=layer.experts):
            for part in shape.parts:
                name = f"{layer.name}.{part}"
                recipe = recipe_of(name)
                shapes.append(LinearShape(name, shape.out_features, shape.in_features, shape.bias, recipe))
    recipe_of.check()
    return [*shapes, LinearShape("lm_head", m.padded_vocab_size, m.hidden_size, False, None)]


def eh_proj_of(layer: LayerShape) -> str:
    """Name of the linear before a layer of multi-token prediction."""
    return layer.name.removesuffix("layer") + "eh_proj"


def parameters(config: Config) -> list[ParameterShape]:
    """Returns the model's parameters under their global names; a tied LM head has none of its own."""
    m = config.model
    vocabulary = ((m.padded_vocab_size, m.hidden_size), (m.unpadded_vocab_size, m.hidden_size))
    found = [ParameterShape("embedding.word_embeddings.weight", *vocabulary, True)]
    if m.position_embedding_type == "learned_absolute":
        found.append(_plain("embedding.position_embeddings.weight", m.max_position_embeddings, m.hidden_size))
    for layer in layers(config):
        found.extend(_layer_parameters(config, layer))
        if layer.name.startswith("mtp."):
            found.append(_plain(f"{eh_proj_of(layer)}.weight", m.hidden_size, 2 * m.hidden_size))
            for norm in ("embedding_norm", "hidden_norm", "final_norm"):
                found.extend(_norm(config, layer.name.removesuffix("layer") + norm, m.hidden_size))
    found.extend(_norm(config, "final_norm", m.hidden_size))
    if m.untie_embeddings_and_output_weights:
        found.append(ParameterShape("lm_head.weight", *vocabulary, True))
    return found


def parameter_count(config: Config) -> int:
    """Returns the number of the model's parameters, vocabulary padding not counted."""
    return sum(p.unpadded_numel for p in parameters(config))


def active_parameter_count(config: Config) -> int:
    """Returns the number of parameters that one token uses: of each layer's experts those it is routed to."""
    share = config.model.moe_router_topk / config.model.num_experts if config.model.num_experts else 1
    return round(sum(p.unpadded_numel * (share if p.expert else 1) for p in parameters(config)))


def _layer_parameters(config: Config, layer: LayerShape) -> Iterator[ParameterShape]:
    m = config.model
    for norm in ("input_norm", "mlp_norm"):
        yield from _norm(config, f"{layer.name}.{norm}", m.hidden_size)
    for shape in layer_linears(m, experts=layer.experts):
        for part in shape.parts:
            expert = "*" in shape.part
            yield _plain(f"{layer.name}.{part}.weight", shape.out_features, shape.in_features, expert=expert)
            if shape.bias:
                yield _plain(f"{layer.name}.{part}.bias", shape.out_features)
    if layer.experts:
        yield _plain(f"{layer.name}.mlp.router.weight", m.num_experts, m.hidden_size)
    for norm, size in attention_norms(m).items():
        yield from _norm(config, f"{layer.name}.attention.{norm}", size)


def attention_norms(m: ModelConfig) -> dict[str, int]:
    """Returns the norms inside of attention, and their widths."""
    if not m.qk_layernorm:
        return {}
    if not m.multi_latent_attention:
        return {"q_norm": m.kv_channels, "k_norm": m.kv_channels}
    queries = {} if m.q_lora_rank is None else {"q_norm": m.q_lora_rank}
    return queries | {"kv_norm": m.kv_lora_rank}


def _norm(config: Config, name: str, size: int) -> Iterator[ParameterShape]:
    yield _plain(f"{name}.weight", size)
    if config.model.normalization == "LayerNorm":
        yield _plain(f"{name}.bias", size)


def _plain(name: str, *shape: int, expert: bool = False) -> ParameterShape:
    return ParameterShape(name, shape, shape, decay=len(shape) > 1, expert=expert)
