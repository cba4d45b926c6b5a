"""llama2.c's `.bin` files (https://github.com/karpathy/llama2.c, version 0): seven int32 fields, then FP32 weights.

    dim, ffn, layers, heads, key/value heads, vocabulary (negative: the LM head has a weight of its own), context
    embedding; of all layers: attention norm, wq, wk, wv, wo, MLP norm, w1 (gate), w2 (down), w3 (up); final norm;
    tables of cosines and sines [context, head / 2] (not read); LM head where it is not tied

Rotary pairs are neighbours there and halves in Llama's files; q and k are put into Llama's order, so that the family
"llama" takes over from here.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.checkpoint.hf.layouts import rows_in_halves
from megafp8.checkpoint.tensor_file import DamagedFileError

_HEADER = struct.Struct("<7i")
_LIMIT = 1 << 24
_LAYER_NAMES = {
    "attention_norm": "input_layernorm",
    "wq": "self_attn.q_proj",
    "wk": "self_attn.k_proj",
    "wv": "self_attn.v_proj",
    "wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "w1": "mlp.gate_proj",
    "w2": "mlp.down_proj",
    "w3": "mlp.up_proj",
}


class Llama2cFile:
    """An open file. config: what Llama's config.json would say; shapes: their name -> shape."""

    def __init__(self, path: Path):
        """Raises DamagedFileError unless the file's size is exactly what its header makes it."""
        try:
            with path.open("rb") as stream:
                header = stream.read(_HEADER.size)
            size = path.stat().st_size
        except OSError as error:
            raise ValueError(f"--bin {path}: {error.strerror}") from None
        if len(header) < _HEADER.size:
            raise DamagedFileError(f"{path} is too short for a llama2.c file: {size} bytes")
        dim, ffn, layers, heads, kv_heads, vocab, context = _HEADER.unpack(header)
        sizes = (dim, ffn, layers, heads, kv_heads, abs(vocab), context)
        if not all(0 < n <= _LIMIT for n in sizes) or dim % heads or heads % kv_heads or 4 * layers * dim > size:
            raise DamagedFileError(f"{path} is no llama2.c file: its header says {sizes}")
        self._path, self._channels = path, dim // heads
        self.config: dict[str, Any] = {
            "model_type": "llama",
            "hidden_size": dim,
            "intermediate_size": ffn,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "vocab_size": abs(vocab),
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": vocab > 0,
        }
        self._offsets, expected = self._lay_out()
        if size != expected:
            raise DamagedFileError(f"{path} has {size} bytes, its header makes it {expected}")

    def _lay_out(self) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
        """Name -> (offset in bytes, shape), and the file's size."""
        c = self.config
        dim, ffn, layers, vocab = (
            c[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")
        )
        kv = c["num_key_value_heads"] * self._channels
        shapes = {"attention_norm": (dim,), "wq": (dim, dim), "wk": (kv, dim), "wv": (kv, dim), "wo": (dim, dim),
                  "ffn_norm": (dim,), "w1": (ffn, dim), "w2": (dim, ffn), "w3": (ffn, dim)}  # fmt: skip
        order: list[tuple[str | None, tuple[int, ...]]] = [("model.embed_tokens.weight", (vocab, dim))]
        for field, name in _LAYER_NAMES.items():
            order += [(f"model.layers.{i}.{name}.weight", shapes[field]) for i in range(layers)]
        order += [("model.norm.weight", (dim,)), (None, (c["max_position_embeddings"], self._channels))]
        if not c["tie_word_embeddings"]:
            order.append(("lm_head.weight", (vocab, dim)))
        found, offset = {}, _HEADER.size
        for name, shape in order:
            if name is not None:
                found[name] = (offset, shape)
            offset += 4 * math.prod(shape)
        return found, offset

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, (_, shape) in self._offsets.items()}

    def read(self, name: str) -> Tensor:
        """A tensor in Llama's order, FP32."""
        offset, shape = self._offsets[name]
        with self._path.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(4 * math.prod(shape))
        tensor = torch.frombuffer(bytearray(data), dtype=torch.float32).view(shape)
        turns = name.endswith(("q_proj.weight", "k_proj.weight"))
        return rows_in_halves(tensor, self._channels) if turns else tensor
