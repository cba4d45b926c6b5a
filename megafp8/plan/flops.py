"""Floating-point operations of a training step: matrix products only, a multiply-add counted as two.

Per token and layer, forward (h hidden size, f MLP width, a query heads, g key/value heads, d width of a head,
s sequence length):

    qkv   2 h (a + 2g) d        proj  2 a d h        attention  2 products of 2 a d over the keys seen
    fc1   2 h f, with SwiGLU 4 h f                   fc2        2 f h            LM head  2 h V (padded rows)

A token goes through the k experts that are chosen for it and the shared ones, and through a router of 2 h E. Latent
attention has the products of its own linears, and heads of one width for queries and keys, another for values.
Multi-token prediction adds a linear of 4 h^2, a layer and the LM head again for each depth.

A token sees (s + 1) / 2 keys on average under the causal mask, fewer in a sliding window: that is what an attention
kernel computes, and what `causal=True`, the default, counts. `causal=False` counts all s keys, as a counter of dense
matrix products does. Grouped queries change qkv only: every query head multiplies with keys and values of its own or
shared. Backward is twice the forward; recomputation is not counted (model FLOPs, not hardware FLOPs).
"""

from __future__ import annotations

from collections.abc import Callable

from megafp8.config import Config
from megafp8.fp8 import Recipe, policy
from megafp8.plan.shapes import PartShape, layer_linears, layers


def linear_flops_per_token(config: Config) -> int:
    """Returns the forward FLOPs a token of all linears, routers and LM head included."""
    m = config.model
    depths = m.mtp_num_layers or 0
    products = (1 + depths) * m.hidden_size * m.padded_vocab_size + depths * 2 * m.hidden_size * m.hidden_size
    of_kind = {experts: _layer_products(config, experts) for experts in {layer.experts for layer in layers(config)}}
    return 2 * (products + sum(of_kind[layer.experts] for layer in layers(config)))


def _layer_products(config: Config, experts: bool) -> int:
    """Multiplications a token of a layer's linears and router."""
    m = config.model
    router = m.hidden_size * m.num_experts if experts else 0
    return router + sum(_products(shape) for shape in layer_linears(m, experts=experts))


def attention_flops_per_token(config: Config, *, causal: bool = True) -> float:
    """Returns the forward FLOPs a token of `q k^T` and of the weighted sum of values, over all layers."""
    m, length = config.model, config.data.seq_length
    keys = keys_seen(length, m.window) if causal else length
    return len(layers(config)) * 2 * m.num_attention_heads * (m.query_channels + m.value_channels) * keys


def keys_seen(length: int, window: int | None) -> float:
    """Returns the mean number of keys that a token of a sequence sees: its own, and all or `window` before."""
    most = length if window is None else min(window + 1, length)
    return most - most * (most - 1) / 2 / length


def forward_flops_per_token(config: Config, *, causal: bool = True) -> float:
    """Returns the forward FLOPs a token, at the configured sequence length."""
    return linear_flops_per_token(config) + attention_flops_per_token(config, causal=causal)


def training_flops_per_token(config: Config, *, causal: bool = True) -> float:
    """Returns the FLOPs a token of forward and backward: three times the forward's.

    Args:
        config: resolved, with the vocabulary known (`with_vocab_size`).
        causal: whether only the keys that the causal mask lets through count.
    """
    return 3 * forward_flops_per_token(config, causal=causal)


def fp8_training_flops_per_token(config: Config, counts: Callable[[Recipe], bool] = lambda recipe: True) -> float:
    """Returns those of `training_flops_per_token` that FP8 GEMMs do: all three products of the linears in FP8.

    Args:
        config: as there.
        counts: which recipes' products count.
    """
    recipe_of, products = policy.from_config(config), 0.0
    for layer in layers(config):
        for shape in layer_linears(config.model, experts=layer.experts):
            recipes = [recipe_of(f"{layer.name}.{part}") for part in shape.parts]
            covered = sum(recipe is not None and counts(recipe) for recipe in recipes) / len(recipes)
            products += covered * _products(shape)
    return 3 * 2 * products


def _products(shape: PartShape) -> float:
    return shape.share * shape.out_features * shape.in_features
