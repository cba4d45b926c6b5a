"""What one microbatch holds for backward, by module, in bytes.

T tokens, h hidden size, f MLP width (the inner width i is 2f with SwiGLU), a query heads, g key/value heads, d width
of a head, V padded vocabulary, e bytes of the compute dtype. q8(T x K) is an FP8 copy with its scales.

    input_norm, mlp_norm   T h e (its input) and FP32 statistics
    qkv                    T h e, or q8(T x h)
    core attention         T (a + 2g) d e (q, k, v), T a d e (its output), 4 T a (log of the softmax's sum)
    q_norm, k_norm         T (a + 2g) d e (qkv's output) and FP32 statistics
    proj                   nothing: it reads the core's output; q8(T x a d) where that is recomputed
    fc1                    T h e, or q8(T x h)
    activation             T i e (fc1's output); T (i + 4 i/128) with --activation-func-fp8-input-store
    fc2                    T f e in high precision; FP8: nothing, its input is remade from fc1's output
    final_norm, lm_head    T h e each
    loss                   T V e (logits) and a few numbers a token

Latent attention and mixtures of experts: layer_activations.py. A depth of multi-token prediction holds 2 T h e for its
linear, the inputs of its three norms, a layer, and what the LM head and the loss hold.

Recomputation keeps inputs instead: of whole layers (a unit's input, T h e), of the core attention (q, k, v), of the
MLP or the mixture of experts (mlp_norm's input), or of norms (their outputs are made anew).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from megafp8.config import Config
from megafp8.fp8 import policy
from megafp8.plan.layer_activations import Activation, LayerPlan, Sizes, quantized_bytes
from megafp8.plan.shapes import LayerShape, layers

__all__ = ["Activation", "activations", "by_module", "layer_activations", "peak_extra", "quantized_bytes"]

IDS_BYTES = 8
"""A token id is int64."""
LOSS_BYTES = 8 + 1 + 4 + 4
"""The loss keeps a token's target, whether it is on this rank, the largest logit and the log of the sum."""


def activations(config: Config, device: torch.device) -> list[Activation]:
    """Returns what one microbatch holds when its forward ends.

    Args:
        config: resolved, with the vocabulary known (`with_vocab_size`).
        device: whose GEMMs decide on orientations.
    """
    sizes, train = Sizes.of(config), config.train
    recomputed = _recomputed_layers(config)
    held = [Activation("embedding", "token ids", sizes.tokens * IDS_BYTES)]
    if recomputed:
        unit = 1 if train.recompute_method == "block" else train.recompute_num_layers
        units = math.ceil(recomputed / unit)
        held.append(Activation("layers", f"input of {units} recomputed units", units * sizes.stream))
    kept = [layer for layer in layers(config)[recomputed:] if not _in_prediction(layer)]
    for plan in _plans(config, kept, sizes, device, _selected(config)):
        held.extend(plan.items())
    held.extend(_head(config, sizes))
    ahead = [layer for layer in layers(config) if _in_prediction(layer)]
    for plan in _plans(config, ahead, sizes, device, _selected(config)):
        held.extend(_prediction(config, plan))
    return held


def layer_activations(config: Config, device: torch.device, number: int = 0) -> list[Activation]:
    """Returns what one layer holds of a microbatch when its forward ends, its input included, unless it is recomputed
    as a whole."""
    (plan,) = _plans(config, layers(config)[number : number + 1], Sizes.of(config), device, _selected(config))
    return list(plan.items())


def peak_extra(config: Config, device: torch.device) -> Activation:
    """Returns the largest of what backward adds for a while: the logits' gradient, or what it computes again."""
    sizes = Sizes.of(config)
    logits = sizes.tokens * config.model.padded_vocab_size * sizes.element
    candidates = [Activation("loss", "gradient of the logits", logits)]
    if recomputed := _recomputed_layers(config):
        unit = 1 if config.train.recompute_method == "block" else config.train.recompute_num_layers
        whole = [_bytes(plan) for plan in _plans(config, layers(config)[:recomputed], sizes, device, ())]
        units = [sum(whole[start : start + unit]) for start in range(0, recomputed, unit)]
        candidates.append(Activation("layers", "one recomputed unit", max(units)))
    elif modules := _selected(config):
        plans = (_plans(config, layers(config), sizes, device, m) for m in ((), modules))
        again = max(_bytes(whole) - _bytes(kept) for whole, kept in zip(*plans, strict=True))
        candidates.append(Activation("layers", "recomputed parts of a layer", again))
    return max(candidates, key=lambda a: a.bytes)


def by_module(items: Iterable[Activation]) -> list[Activation]:
    """Returns the sums over layers, in the order in which modules first appear."""
    sums: dict[tuple[str, str], int] = {}
    for item in items:
        sums[item.module, item.what] = sums.get((item.module, item.what), 0) + item.bytes
    return [Activation(module, what, total) for (module, what), total in sums.items()]


def _recomputed_layers(config: Config) -> int:
    """How many layers, from the first, are recomputed whole."""
    train = config.train
    if train.recompute_granularity != "full":
        return 0
    if train.recompute_method == "block":
        return min(train.recompute_num_layers, config.model.num_layers)
    return config.model.num_layers


def _selected(config: Config) -> tuple[str, ...]:
    """The parts of a layer that selective recomputation computes again."""
    train = config.train
    return train.recompute_modules if train.recompute_granularity == "selective" else ()


def _in_prediction(layer: LayerShape) -> bool:
    return layer.name.startswith("mtp.")


def _plans(
    config: Config, chosen: list[LayerShape], sizes: Sizes, device: torch.device, recomputed: tuple[str, ...]
) -> list[LayerPlan]:
    recipe_of = policy.from_config(config)
    store = config.fp8.activation_func_fp8_input_store
    return [LayerPlan(layer, sizes, recipe_of, device, recomputed, store) for layer in chosen]


def _bytes(plan: LayerPlan) -> int:
    return sum(item.bytes for item in plan.items())


def _head(config: Config, s: Sizes) -> list[Activation]:
    logits = s.tokens * config.model.padded_vocab_size * s.element
    return [
        Activation("final_norm", "input", s.norm(s.tokens, s.model.hidden_size)),
        Activation("lm_head", "input", s.stream),
        Activation("loss", "logits", logits + LOSS_BYTES * s.tokens),
    ]


def _prediction(config: Config, plan: LayerPlan) -> list[Activation]:
    """A depth of multi-token prediction. The hidden states that it reads are the LM head's input before it."""
    s = plan.sizes
    norms = s.norm(s.tokens, s.model.hidden_size) + 4 * s.statistics * s.tokens
    if s.norm_input != s.element:  # a copy of the LM head's input
        norms += s.tokens * s.model.hidden_size * s.norm_input
    if config.train.recompute_granularity == "full" and config.train.recompute_method == "uniform":
        layer = [Activation("mtp.layer", "input", s.stream)]
    else:
        layer = [Activation(f"mtp.layer.{a.module}", a.what, a.bytes) for a in plan.items()]
    return [
        Activation("mtp", "token ids", s.tokens * IDS_BYTES),
        Activation("mtp.norms", "embedding and statistics", norms),
        Activation("mtp.eh_proj", "input", 2 * s.stream),
        *layer,
        *(Activation(f"mtp.{a.module}", a.what, a.bytes) for a in _head(config, s)),
    ]
