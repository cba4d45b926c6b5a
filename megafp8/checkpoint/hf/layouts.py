"""Layouts: how tensors of a Hugging Face file make up one of ours, and back. Pure index arithmetic, no rounding.

A layout only moves whole rows (GPT-2's also turn a matrix over), so it applies alike to weights, to biases, to FP8
bytes and to the numbers of the tiles that rows lie in. Files rotate channels (i, i + d/2); a run under
--rotary-interleaved has them as neighbours, and its rows of q and k are put in the files' order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megafp8.config.model import ModelConfig


@dataclass(frozen=True)
class Layout:
    """join: their tensors, in the rule's order -> ours, in the shape of its ParamSpec; split: the inverse.

    turns: whether a matrix is transposed on the way, so that tiles of quantized bytes don't follow.
    """

    join: Callable[[Sequence[Tensor], ModelConfig], Tensor]
    split: Callable[[Tensor, ModelConfig], list[Tensor]]
    turns: bool = False


def _turned(x: Tensor) -> Tensor:
    return x.t() if x.dim() == 2 else x


def _heads(x: Tensor, groups: int) -> Tensor:
    """Rows of heads [heads d, ...] as [groups, rows a group, ...]."""
    return x.reshape(groups, x.shape[0] // groups, *x.shape[1:])


def rows_interleaved(x: Tensor, channels: int) -> Tensor:
    """Rows of heads of `channels`, rotary pairs from (i, i + d/2) to neighbours (2i, 2i + 1)."""
    return x.reshape(-1, 2, channels // 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def rows_in_halves(x: Tensor, channels: int) -> Tensor:
    """The inverse of `rows_interleaved`."""
    return x.reshape(-1, channels // 2, 2, *x.shape[1:]).transpose(1, 2).reshape(x.shape)


def _group_qkv(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    q, k, v = parts
    if model.rotary_interleaved:
        q, k = (rows_interleaved(x, model.kv_channels) for x in (q, k))
    return torch.cat([_heads(x, model.num_query_groups) for x in (q, k, v)], 1).flatten(0, 1)


def _ungroup_qkv(qkv: Tensor, model: ModelConfig) -> list[Tensor]:
    d, groups = model.kv_channels, model.num_query_groups
    grouped = _heads(qkv, groups)
    parts = grouped.split((grouped.shape[1] - 2 * d, d, d), 1)
    q, k, v = (x.reshape(-1, *x.shape[2:]) for x in parts)
    if model.rotary_interleaved:
        q, k = (rows_in_halves(x, d) for x in (q, k))
    return [q, k, v]


def _group_turned(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    return _group_qkv(_turned(parts[0]).chunk(3), model)


def _ungroup_turned(qkv: Tensor, model: ModelConfig) -> list[Tensor]:
    return [_turned(torch.cat(_ungroup_qkv(qkv, model)))]


def _in_our_channels(parts: Sequence[Tensor], model: ModelConfig) -> Tensor:
    return rows_interleaved(parts[0], model.kv_channels) if model.rotary_interleaved else parts[0]


def _in_their_channels(x: Tensor, model: ModelConfig) -> list[Tensor]:
    return [rows_in_halves(x, model.kv_channels) if model.rotary_interleaved else x]


SAME = Layout(lambda parts, model: parts[0], lambda x, model: [x])
STACKED = Layout(lambda parts, model: torch.stack(tuple(parts)), lambda x, model: list(x.unbind()))
"""Parts of one shape, such as SwiGLU's gate and up, as ours [parts, ...]."""
QKV = Layout(_group_qkv, _ungroup_qkv)
"""q, k and v, rows of all heads each, as rows by key/value group: its queries, its key, its value."""
CHANNELS = Layout(_in_our_channels, _in_their_channels)
"""The weight of a norm over a head's channels, which lie as the rows of q and k do."""
TURNED = Layout(lambda parts, model: _turned(parts[0]), lambda x, model: [_turned(x)], turns=True)
"""GPT-2's matrices are [in, out]."""
TURNED_QKV = Layout(_group_turned, _ungroup_turned, turns=True)
"""GPT-2's c_attn: columns of all queries, then all keys, then all values."""
