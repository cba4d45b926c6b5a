"""What one microbatch holds for backward, by module, in bytes.

T tokens, h hidden size, f MLP width (the inner width i is 2f with SwiGLU), a query heads, g key/value heads, d width
of a head, V padded vocabulary, e bytes of the compute dtype. q8(T x K) is an FP8 copy with its scales.

    input_norm, mlp_norm   T h e (its input) and FP32 statistics
    qkv                    T h e, or q8(T x h)
    core attention         T (a + 2g) d e (q, k, v), T a d e (its output), 4 T a (log of the softmax's sum)
    q_norm, k_norm         T (a + 2g) d e (qkv's output) and FP32 statistics
    proj                   nothing: it reads the core's output; q8(T x a d) where that is recomputed
    fc1                    T h e, or q8(T x h)
    activation             T i e (fc1's output)
    fc2                    T f e in high precision; FP8: nothing, its input is remade from fc1's output
    final_norm, lm_head    T h e each
    loss                   T V e (logits) and a few numbers a token

Recomputation keeps inputs instead: of whole layers (a unit's input, T h e), of the core attention (q, k, v), of the
MLP (mlp_norm's input), or of norms (their outputs are made anew).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megafp8.config import Config
from megafp8.fp8 import Recipe, gemm, policy
from megafp8.fp8.formats import Scale

IDS_BYTES = 8
"""A token id is int64."""
LOSS_BYTES = 8 + 1 + 4 + 4
"""The loss keeps a token's target, whether it is on this rank, the largest logit and the log of the sum."""


@dataclass(frozen=True)
class Activation:
    """Bytes that `module` holds. what: which tensors, in words."""

    module: str
    what: str
    bytes: int


@dataclass(frozen=True)
class _Sizes:
    """The quantities of the formulas above."""

    tokens: int
    hidden: int
    ffn: int
    inner: int
    heads: int
    groups: int
    width: int
    element: int
    norm_input: int
    """bytes an element of what a norm keeps of its input: FP32 where its weight is stored minus one"""
    statistics: int
    """FP32 numbers a normalized row: 1 for RMSNorm, 2 for LayerNorm"""

    @staticmethod
    def of(config: Config) -> _Sizes:
        m = config.model
        element = 2 if config.train.bf16 else 4
        return _Sizes(
            tokens=config.train.micro_batch_size * config.data.seq_length,
            hidden=m.hidden_size,
            ffn=m.ffn_hidden_size,
            inner=m.ffn_hidden_size * (2 if m.swiglu else 1),
            heads=m.num_attention_heads,
            groups=m.num_query_groups,
            width=m.kv_channels,
            element=element,
            norm_input=4 if m.apply_layernorm_1p else element,
            statistics=2 if m.normalization == "LayerNorm" else 1,
        )

    @property
    def stream(self) -> int:
        """Bytes of the residual stream."""
        return self.tokens * self.hidden * self.element

    def norm(self, rows: int, width: int) -> int:
        """Bytes that a norm keeps of an input of `rows` rows."""
        return rows * (width * self.norm_input + 4 * self.statistics)


def activations(config: Config, device: torch.device) -> list[Activation]:
    """Returns what one microbatch holds when its forward ends.

    Args:
        config: resolved, with the vocabulary known (`with_vocab_size`).
        device: whose GEMMs decide on orientations.
    """
    sizes, train = _Sizes.of(config), config.train
    layers = config.model.num_layers
    recomputed = _recomputed_layers(config)
    held = [Activation("embedding", "token ids", sizes.tokens * IDS_BYTES)]
    if recomputed:
        unit = 1 if train.recompute_method == "block" else train.recompute_num_layers
        units = math.ceil(recomputed / unit)
        held.append(Activation("layers", f"input of {units} recomputed units", units * sizes.stream))
    for layer in range(recomputed, layers):
        held.extend(_layer(config, layer, sizes, device, _selected(config)))
    return [*held, *_head(config, sizes)]


def peak_extra(config: Config, device: torch.device) -> Activation:
    """Returns the largest of what backward adds for a while: the logits' gradient, or what it computes again."""
    sizes = _Sizes.of(config)
    logits = sizes.tokens * config.model.padded_vocab_size * sizes.element
    candidates = [Activation("loss", "gradient of the logits", logits)]
    if recomputed := _recomputed_layers(config):
        unit = 1 if config.train.recompute_method == "block" else config.train.recompute_num_layers
        parts = [a for layer in range(min(unit, recomputed)) for a in _layer(config, layer, sizes, device)]
        candidates.append(Activation("layers", "one recomputed unit", sum(a.bytes for a in parts)))
    elif modules := _selected(config):
        whole, kept = (sum(a.bytes for a in _layer(config, 0, sizes, device, m)) for m in ((), modules))
        candidates.append(Activation("layers", "recomputed parts of a layer", whole - kept))
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


def _layer(
    config: Config, layer: int, s: _Sizes, device: torch.device, modules: tuple[str, ...] = ()
) -> list[Activation]:
    """What a layer holds when backward recomputes `modules` of it ("core_attn", "layernorm", "mlp")."""
    recipe_of = policy.from_config(config)
    parts = ("attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2")
    qkv, proj, fc1, fc2 = (recipe_of(f"layers.{layer}.{part}") for part in parts)
    heads_all = s.tokens * (s.heads + 2 * s.groups) * s.width * s.element
    norms_kept = "layernorm" not in modules
    items = [Activation("input_norm", "input", s.norm(s.tokens, s.hidden))]
    if norms_kept:
        items.append(_linear_input("attention.qkv", qkv, s.hidden, s, device))
    if config.model.qk_layernorm:
        statistics = 4 * s.statistics * s.tokens * (s.heads + s.groups)
        items.append(Activation("attention.q_norm, k_norm", "output of qkv", heads_all + statistics))
    items.append(Activation("attention.core", "q, k, v", heads_all))
    if "core_attn" in modules and proj is not None:
        items.append(_linear_input("attention.proj", proj, s.heads * s.width, s, device))
    else:
        items.append(Activation("attention.core", "output", s.tokens * s.heads * s.width * s.element))
    if "core_attn" not in modules:
        items.append(Activation("attention.core", "log-sum-exp", 4 * s.tokens * s.heads))
    items.append(Activation("mlp_norm", "input", s.norm(s.tokens, s.hidden)))
    if "mlp" in modules:
        return items
    if norms_kept:
        items.append(_linear_input("mlp.fc1", fc1, s.hidden, s, device))
    items.append(Activation("mlp.activation", "output of fc1", s.tokens * s.inner * s.element))
    if fc2 is None:
        items.append(_linear_input("mlp.fc2", fc2, s.ffn, s, device))
    return items


def _linear_input(module: str, recipe: Recipe | None, features: int, s: _Sizes, device: torch.device) -> Activation:
    if recipe is None:
        return Activation(module, "input", s.tokens * features * s.element)
    orientation = gemm.needs(recipe, "input", device)["wgrad"]
    size = quantized_bytes(recipe, "input", (s.tokens, features), orientation)
    return Activation(module, f"FP8 input, {orientation}", size)


def _head(config: Config, s: _Sizes) -> list[Activation]:
    logits = s.tokens * config.model.padded_vocab_size * s.element
    return [
        Activation("final_norm", "input", s.norm(s.tokens, s.hidden)),
        Activation("lm_head", "input", s.stream),
        Activation("loss", "logits", logits + LOSS_BYTES * s.tokens),
    ]


def quantized_bytes(recipe: Recipe, role: str, shape: tuple[int, int], orientation: str) -> int:
    """Returns the bytes of one orientation of a quantized `[M, K]` operand: elements and scales, unpadded."""
    rows, cols = shape if orientation == "rowwise" else shape[::-1]
    spec = recipe.quantizer(role).spec
    scale_bytes = 1 if spec.scale is Scale.E8M0 else 4
    return rows * cols + math.prod(spec.tile.scale_shape(rows, cols)) * scale_bytes
