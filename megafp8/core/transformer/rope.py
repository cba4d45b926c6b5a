"""Rotary position embedding: pairs of channels are rotated by angles proportional to the position.

Channel pair i of a head turns by `position * theta^(-2i / d)` (Su et al., RoFormer). The pairs are channels
(i, i + d/2) by default, neighbours (2i, 2i + 1) when interleaved; the two need differently ordered q and k weights.
Only the first `rotary_percent` of a head's channels turn. Angles, cosines and sines are FP32.

To run longer sequences than a model was trained for, frequencies are lowered: all alike (linear), only the low ones
(Llama 3.1), or by YaRN (Peng et al. 2023), which also scales queries and keys, or all attention scores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megafp8.config.model import ModelConfig

# Llama 3.1's constants (`low_freq_factor`, `high_freq_factor`, `original_max_position_embeddings`).
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_OLD_CONTEXT = 1.0, 4.0, 8192

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines, FP32 [T, rotated channels / 2]."""


def rotary_channels(model: ModelConfig) -> int:
    """Number of rotated channels of a head, an even number."""
    channels = model.qk_pos_emb_head_dim if model.multi_latent_attention else model.kv_channels
    return int(channels * model.rotary_percent) // 2 * 2


def inverse_frequencies(model: ModelConfig, device: torch.device | str = "cpu") -> Tensor:
    """Angle per position of each channel pair, FP32 [rotated channels / 2], scaled as the configuration says."""
    channels = rotary_channels(model)
    exponents = torch.arange(0, channels, 2, dtype=torch.float32) / channels
    frequencies = 1.0 / model.rotary_base**exponents
    if model.rotary_seq_len_interpolation_factor is not None:
        frequencies = frequencies / model.rotary_seq_len_interpolation_factor
    if model.use_rope_scaling:
        frequencies = _llama3(frequencies, model.rope_scaling_factor)
    if model.rope_type == "yarn":
        frequencies = _yarn(frequencies, model)
    return frequencies.to(device)


def _llama3(frequencies: Tensor, factor: float) -> Tensor:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    blend = (LLAMA3_OLD_CONTEXT / wavelengths - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)
    blend = blend.clamp(0, 1)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _yarn(frequencies: Tensor, model: ModelConfig) -> Tensor:
    """YaRN: pairs that turn more than `beta_fast` times over the original length keep their frequency, those that turn
    less than `beta_slow` times are divided by the factor; between the two, by the pair's number, a ramp."""
    pairs = frequencies.numel()

    def pair_that_turns(times: float) -> float:
        turns = model.original_max_position_embeddings / (2 * math.pi * times)
        return pairs * math.log(turns) / math.log(model.rotary_base)

    low = max(math.floor(pair_that_turns(model.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(model.beta_slow)), 2 * pairs - 1)
    ramp = (torch.arange(pairs) - low) / max(high - low, 0.001)
    slowed = ramp.clamp(0, 1)
    return frequencies * (1 - slowed) + frequencies / model.rotary_scaling_factor * slowed


def _mscale(factor: float, strength: float) -> float:
    """YaRN's correction of attention for a context `factor` times longer."""
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def rotation_scale(model: ModelConfig) -> float:
    """What rotated queries and keys are multiplied by."""
    if model.rope_type != "yarn":
        return 1.0
    factor = model.rotary_scaling_factor
    return _mscale(factor, model.mscale) / _mscale(factor, model.mscale_all_dim)


def score_scale(model: ModelConfig) -> float:
    """What the products of queries and keys are multiplied by in latent attention."""
    yarn = _mscale(model.rotary_scaling_factor, model.mscale_all_dim) if model.rope_type == "yarn" else 1.0
    return yarn * yarn / math.sqrt(model.query_channels)


def rotation(position_ids: Tensor, frequencies: Tensor, scale: float = 1.0) -> Rotation:
    """Cosines and sines, times `scale`, for positions int64 [T]."""
    angles = position_ids[:, None].float() * frequencies
    if scale == 1:
        return angles.cos(), angles.sin()
    return angles.cos() * scale, angles.sin() * scale


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    channels = 2 * cos.shape[-1]
    cos, sin = (t.view(t.shape[0], *[1] * (x.dim() - 2), t.shape[1]) for t in (cos, sin))
    if interleaved:
        pairs = slice(0, channels, 2), slice(1, channels, 2)
    else:
        pairs = slice(0, channels // 2), slice(channels // 2, channels)
    a, b = (x[..., part].float() for part in pairs)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out[..., pairs[0]] = a * cos - b * sin
    out[..., pairs[1]] = b * cos + a * sin
    out[..., channels:] = x[..., channels:]
    return out


class _Rotary(torch.autograd.Function):
    """Keeps only the (shared) cosines and sines: the gradient is turned back by the same angles."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad_output, cos, -sin, ctx.interleaved), None, None, None


def apply_rotary(x: Tensor, turn: Rotation, *, interleaved: bool = False) -> Tensor:
    """x: [T, ..., head channels], any strides. Computed in FP32; returns a new contiguous tensor in x's dtype."""
    return _Rotary.apply(x, *turn, interleaved)
