"""A GPT written once more, naively and in any dtype, from the formulas: what `core` is compared with.

One head at a time, dense masks, no fused kernels; it shares no code with `megafp8.core`.
"""

import math

import torch
from torch import Tensor

from megafp8.config.model import ModelConfig


def norm(x: Tensor, p: dict[str, Tensor], name: str, m: ModelConfig) -> Tensor:
    weight = p[f"{name}.weight"] + (1 if m.apply_layernorm_1p else 0)
    if m.normalization == "RMSNorm":
        return x / (x.pow(2).mean(-1, keepdim=True) + m.norm_epsilon).sqrt() * weight
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + m.norm_epsilon).sqrt() * weight + p[f"{name}.bias"]


def linear(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    y = x @ p[f"{name}.weight"].T
    return y + p[f"{name}.bias"] if f"{name}.bias" in p else y


def rotate(x: Tensor, positions: Tensor, m: ModelConfig) -> Tensor:
    """x: [s, channels]. Each channel pair is a complex number, multiplied by exp(i angle)."""
    n = int(x.shape[1] * m.rotary_percent)
    angle = positions[:, None].to(x.dtype) * m.rotary_base ** (-torch.arange(0, n, 2, dtype=x.dtype) / n)
    first, second = (x[:, 0:n:2], x[:, 1:n:2]) if m.rotary_interleaved else (x[:, : n // 2], x[:, n // 2 : n])
    real, imaginary = first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()
    turned = torch.stack([real, imaginary], -1).flatten(1) if m.rotary_interleaved else torch.cat([real, imaginary], 1)
    return torch.cat([turned, x[:, n:]], 1)


def attention(x: Tensor, p: dict[str, Tensor], name: str, m: ModelConfig, positions: Tensor, mask: Tensor) -> Tensor:
    """x: [s, hidden]; mask: bool [s, s], True where a query (row) may read a key."""
    d, per_group = m.kv_channels, m.num_attention_heads // m.num_query_groups
    rows = linear(x, p, f"{name}.qkv")
    outs = []
    for head in range(m.num_attention_heads):
        group, place = divmod(head, per_group)
        start = group * (per_group + 2) * d
        q = rows[:, start + place * d :][:, :d]
        k = rows[:, start + per_group * d :][:, :d]
        v = rows[:, start + (per_group + 1) * d :][:, :d]
        if m.qk_layernorm:
            q, k = norm(q, p, f"{name}.q_norm", m), norm(k, p, f"{name}.k_norm", m)
        if m.position_embedding_type == "rope":
            q, k = rotate(q, positions, m), rotate(k, positions, m)
        scores = (q @ k.T / math.sqrt(d)).masked_fill(~mask, -math.inf)
        outs.append(scores.softmax(-1) @ v)
    return linear(torch.cat(outs, 1), p, f"{name}.proj")


def mlp(x: Tensor, p: dict[str, Tensor], name: str, m: ModelConfig) -> Tensor:
    y = linear(x, p, f"{name}.fc1")
    if m.swiglu:
        gate, up = y[:, : m.ffn_hidden_size], y[:, m.ffn_hidden_size :]
        y = gate / (1 + torch.exp(-gate)) * up
    elif m.squared_relu:
        y = torch.where(y > 0, y * y, 0)
    elif m.add_bias_linear:
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    else:
        y = 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
    return linear(y, p, f"{name}.fc2")


def logits(
    p: dict[str, Tensor],
    m: ModelConfig,
    tokens: Tensor,
    documents: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """tokens, documents (numbers), positions: [s], one sequence. Returns [s, padded vocabulary]."""
    s = len(tokens)
    positions = torch.arange(s) if positions is None else positions
    documents = torch.zeros(s) if documents is None else documents
    mask = torch.ones(s, s, dtype=torch.bool).tril() & (documents[:, None] == documents[None, :])
    x = p["embedding.word_embeddings.weight"][tokens]
    if m.position_embedding_type == "learned_absolute":
        x = x + p["embedding.position_embeddings.weight"][positions]
    for i in range(m.num_layers):
        x = x + attention(norm(x, p, f"layers.{i}.input_norm", m), p, f"layers.{i}.attention", m, positions, mask)
        x = x + mlp(norm(x, p, f"layers.{i}.mlp_norm", m), p, f"layers.{i}.mlp", m)
    head = p["lm_head.weight" if m.untie_embeddings_and_output_weights else "embedding.word_embeddings.weight"]
    return norm(x, p, "final_norm", m) @ head.T


def loss(
    p: dict[str, Tensor], m: ModelConfig, vocab: int, tokens: Tensor, labels: Tensor, mask: Tensor, **kw
) -> Tensor:
    """Sum of the masked losses of one sequence over the logical vocabulary."""
    log_p = logits(p, m, tokens, **kw)[:, :vocab].log_softmax(-1)
    return -(log_p[torch.arange(len(tokens)), labels] * mask).sum()
