"""Floating-point operations of a training step: matrix products only, a multiply-add counted as two.

Per token and layer, forward (h hidden size, f MLP width, a query heads, g key/value heads, d width of a head,
s sequence length):

    qkv   2 h (a + 2g) d        proj  2 a d h        attention  2 products of 2 a d over the keys seen
    fc1   2 h f, with SwiGLU 4 h f                   fc2        2 f h            LM head  2 h V (padded rows)

A token sees (s + 1) / 2 keys on average under the causal mask: that is what an attention kernel computes, and what
`causal=True`, the default, counts. `causal=False` counts all s keys, as a counter of dense matrix products does.
Grouped queries change qkv only: every query head multiplies with keys and values of its own or shared. Backward is
twice the forward; recomputation is not counted (model FLOPs, not hardware FLOPs).
"""

from __future__ import annotations

from megafp8.config import Config
from megafp8.plan.shapes import layer_linears


def linear_flops_per_token(config: Config) -> int:
    """Returns the forward FLOPs a token of all linears, LM head included."""
    m = config.model
    layer = sum(2 * out_features * in_features for out_features, in_features, _ in layer_linears(config).values())
    return m.num_layers * layer + 2 * m.hidden_size * m.padded_vocab_size


def attention_flops_per_token(config: Config, *, causal: bool = True) -> float:
    """Returns the forward FLOPs a token of `q k^T` and of the weighted sum of values, over all layers."""
    m, length = config.model, config.data.seq_length
    keys = (length + 1) / 2 if causal else length
    return m.num_layers * 2 * 2 * m.num_attention_heads * m.kv_channels * keys


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
