"""Tensors on their way in and out, one at a time, as the plan of a model says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from megafp8.checkpoint.hf.block_fp8 import SCALE_SUFFIX, carry_over, grid
from megafp8.checkpoint.hf.rules import Entry
from megafp8.checkpoint.hf.stored import StoredCheckpoint
from megafp8.checkpoint.hf.write import meta
from megafp8.config.model import ModelConfig

PREFIX = "model/"
"""Of the weights' names in a checkpoint of ours."""
WEIGHT = ".weight"
HELD = 2
"""Tensors of ours whose parts an export holds on to: by name, `o_proj` comes between `k_proj` and `q_proj`."""
Quantize = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A weight [N, K] -> E4M3 bytes [N, K] and FP32 scale_inv, one a 128 x 128 block."""


class Incoming:
    """Our tensors, made of those that `read` gives by their names.

    tensors: our name -> dtype and shape wanted; rounded: names of those that the dtype rounded, so far.
    """

    def __init__(
        self,
        plan: Iterable[Entry],
        model: ModelConfig,
        dtypes: Mapping[str, torch.dtype],
        read: Callable[[str], Tensor],
    ):
        self._model, self._read = model, read
        self._entries = {PREFIX + entry.name: entry for entry in plan}
        self.tensors = {PREFIX + e.name: meta(e.shape, dtypes[e.name]) for e in self._entries.values()}
        self.rounded: list[str] = []

    def load(self, name: str) -> Tensor:
        entry = self._entries[name]
        joined = entry.join([self._read(part) for part in entry.parts], self._model)
        cast = joined.to(self.tensors[name].dtype)
        if not torch.equal(cast.to(joined.dtype), joined) and not joined.isnan().any():
            self.rounded.append(name)
        return cast


class Outgoing:
    """Their tensors, cut from those of an open checkpoint.

    dtypes: our name -> dtype of the parts, unless quantized.
    quantize: our name -> how its weight becomes FP8, None for a weight that stays.
    tensors: their name -> dtype and shape, scales included. kept: modules that stay in high precision. requantized:
        weights, so far, whose blocks are not tiles of ours, so that they were quantized on their own.
    """

    def __init__(
        self,
        plan: Iterable[Entry],
        model: ModelConfig,
        stored: StoredCheckpoint,
        dtypes: Mapping[str, torch.dtype],
        quantize: Callable[[str], Quantize | None] = lambda name: None,
    ):
        self._model, self._stored, self._dtypes, self._quantize = model, stored, dtypes, quantize
        self._made: dict[str, dict[str, Tensor]] = {}
        self._scales: dict[str, Tensor] = {}
        self._maker: dict[str, Entry] = {}
        self.tensors: dict[str, Tensor] = {}
        self.kept: list[str] = []
        self.requantized: set[str] = set()
        for entry in plan:
            for name, tensor in self._describe(entry).items():
                self._maker[name] = entry
                self.tensors[name] = tensor

    def _describe(self, entry: Entry) -> dict[str, Tensor]:
        parts = zip(entry.parts, entry.shapes, strict=True)
        if self._quantize(entry.name) is None:
            if entry.name.endswith(WEIGHT) and len(entry.shapes[0]) == 2 and "embed" not in entry.name:
                self.kept += [part.removesuffix(WEIGHT) for part in entry.parts]
            return {name: meta(shape, self._dtypes[entry.name]) for name, shape in parts}
        found = {}
        for name, shape in parts:
            found[name] = meta(shape, torch.float8_e4m3fn)
            found[_scale_of(name)] = meta(grid(shape), torch.float32)
        return found

    def load(self, name: str) -> Tensor:
        """A tensor by their name.

        The parts of the last `HELD` tensors of ours are kept, as files name parts of one close together; and all
        scales, which files begin with.
        """
        if name in self._scales:
            return self._scales[name]
        entry = self._maker[name]
        if entry.name not in self._made:
            while len(self._made) >= HELD:
                del self._made[next(iter(self._made))]
            self._made[entry.name] = self._make(entry)
        return self._made[entry.name][name]

    def _make(self, entry: Entry) -> dict[str, Tensor]:
        tensor = self._stored.read(PREFIX + entry.name)
        quantize = self._quantize(entry.name)
        if quantize is not None:
            return self._make_fp8(entry, tensor, quantize)
        parts = entry.split(tensor, self._model)
        return {name: part.to(self.tensors[name].dtype) for name, part in zip(entry.parts, parts, strict=True)}

    def _make_fp8(self, entry: Entry, tensor: Tensor, quantize: Quantize) -> dict[str, Tensor]:
        data, scale_inv = quantize(tensor.reshape(-1, tensor.shape[-1]))
        carried = carry_over(entry, data.reshape(tensor.shape), scale_inv, self._model)
        made = {}
        for name, pair, part in zip(entry.parts, carried, entry.split(tensor, self._model), strict=True):
            if pair is None:
                self.requantized.add(name)
                pair = quantize(part)
            made[name], made[_scale_of(name)] = pair
        self._scales |= {name: part for name, part in made.items() if name.endswith(SCALE_SUFFIX)}
        return made


def _scale_of(name: str) -> str:
    return name.removesuffix("weight") + SCALE_SUFFIX
