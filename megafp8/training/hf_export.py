"""From a checkpoint to a Hugging Face model, in high precision or in block-FP8.

The families' rules and the streaming are in megafp8/checkpoint/hf; here they meet the run's configuration and its
recipe, whose quantizer makes the FP8 bytes: the very ones that the run computed with, where the format's blocks are
the recipe's tiles.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megafp8.checkpoint import Found
from megafp8.checkpoint.hf import Family, family_for, family_of
from megafp8.checkpoint.hf.block_fp8 import BLOCK, BlockFP8
from megafp8.checkpoint.hf.companions import copy_companions, export_tokenizer, write_generation_config
from megafp8.checkpoint.hf.family import differences, model_of
from megafp8.checkpoint.hf.rules import make_plan
from megafp8.checkpoint.hf.source import CONFIG, read_config
from megafp8.checkpoint.hf.stored import open_checkpoint
from megafp8.checkpoint.hf.streams import PREFIX, Outgoing, Quantize
from megafp8.checkpoint.hf.values import Values
from megafp8.checkpoint.hf.write import published, write_hf_weights, write_json
from megafp8.checkpoint.index import RUN_FILE, read_index
from megafp8.checkpoint.tensor_file import DamagedFileError
from megafp8.config import Config
from megafp8.data import build_tokenizer
from megafp8.fp8 import get_recipe, policy
from megafp8.fp8.recipe import Recipe
from megafp8.training.hf_import import check_claims, model_tensors

DTYPE_KEYS = ("dtype", "torch_dtype")
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True)
class ExportOptions:
    """family: a model_type, None for the first that fits. dtype: "auto" (as stored), "bf16" or "fp32".

    fp8: write block-FP8. like: a Hugging Face directory whose config.json, generation_config.json and tokenizer are
    the model's, None where there is none. max_shard_bytes: of one file.
    """

    family: str | None = None
    dtype: str = "auto"
    fp8: bool = False
    like: Path | None = None
    max_shard_bytes: int = 5 * 10**9


def export_hf(found: Found, target: Path, options: ExportOptions) -> list[str]:
    """Writes a checkpoint as a Hugging Face model into the new directory `target`; returns notes.

    Raises ValueError, one line, when no family has this model or a file is damaged; then `target` isn't there.
    """
    config = config_of(found)
    original = None if options.like is None else read_config(options.like)
    name = options.family or (family_of(original).model_type if original else None)
    family = family_for(config, name)
    fp8 = BlockExport(config, family) if options.fp8 else None
    with _outgoing(found, family, config, options, fp8) as outgoing, published(target, "--hf") as partial:
        content = _describe(family, config, original, outgoing.tensors) | _precision(outgoing, options, original)
        if fp8:
            content["quantization_config"] = BlockFP8(skipped=tuple(sorted(outgoing.kept))).to_json()
        notes = _write_companions(config, options.like, content, partial)
        write_json(partial / CONFIG, content)
        write_hf_weights(partial, outgoing.tensors, outgoing.load, options.max_shard_bytes)
    return notes + (fp8.notes(outgoing) if fp8 else [])


def config_of(found: Found) -> Config:
    """The configuration of the run that saved a checkpoint.

    Raises DamagedFileError when run.json holds none, ValueError for more layers than the checkpoint has tensors.
    """
    try:
        config = Config.from_dict(found.metadata["args"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DamagedFileError(f"{found.directory / RUN_FILE} holds no run's arguments: {reason}") from None
    check_claims(config.model, len(read_index(found.directory).tensors))
    return config


@contextmanager
def _outgoing(
    found: Found, family: Family, config: Config, options: ExportOptions, fp8: BlockExport | None
) -> Iterator[Outgoing]:
    bf16 = config.train.bf16 if options.dtype == "auto" else options.dtype == "bf16"
    quantize = fp8.quantizer_of if fp8 else lambda name: None
    with open_checkpoint(found) as stored:
        tensors = model_tensors(config.replace(bf16=bf16), len(stored.records))
        plan = make_plan(family.rules, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, config.model)
        wanted = {PREFIX + entry.name: entry.shape for entry in plan}
        saved = {name: record.shape for name, record in stored.records.items()}
        if wanted != saved:
            name = min(name for name in wanted.keys() | saved.keys() if wanted.get(name) != saved.get(name))
            raise ValueError(f"{found.directory}: '{name}' is not as the checkpoint's own arguments make it")
        dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
        yield Outgoing(plan, config.model, stored, dtypes, quantize)


def _describe(family: Family, config: Config, original: Values | None, names: Collection[str]) -> dict[str, Any]:
    """config.json: the original one where it still describes the model, else with what has changed put over it.

    names: of the tensors that are written.
    """
    described = family.describe(config)
    if original is None:
        return described
    before = model_of(family.present(family.to_args(original), names))
    changed = bool(differences(before, config))
    dropped = ("quantization_config", *DTYPE_KEYS, *(ROPE_KEYS if changed else ()))
    kept = {key: value for key, value in original.content.items() if key not in dropped}
    return kept | (described if changed else {"vocab_size": config.model.unpadded_vocab_size})


def _precision(outgoing: Outgoing, options: ExportOptions, original: Values | None) -> dict[str, str]:
    """The dtype of the high-precision tensors, under the key that the original used."""
    key = "torch_dtype" if original is not None and "torch_dtype" in original.content else "dtype"
    found = {t.dtype for name, t in outgoing.tensors.items() if not name.endswith("_scale_inv")}
    return {key: "float32" if torch.float32 in found else "bfloat16"}


def _write_companions(config: Config, like: Path | None, content: dict[str, Any], partial: Path) -> list[str]:
    """Tokenizer files and generation_config.json; puts the ids of special tokens into `content`."""
    data = {name: getattr(config.data, name) for name in ("tokenizer_type", "tokenizer_model", "vocab_file",
                                                          "merge_file")}  # fmt: skip
    found = copy_companions(like, partial) if like is not None else False
    found = found or export_tokenizer(data, partial)
    if like is None:
        bos, eos = _special_ids(config) if found else (None, None)
        content |= {"bos_token_id": bos, "eos_token_id": eos}
    write_generation_config(content, partial)
    if found or data["tokenizer_type"] == "NullTokenizer":
        return []
    return [f"no tokenizer written: {data['tokenizer_type']} has no Hugging Face form, or its files are gone (--like)"]


def _special_ids(config: Config) -> tuple[int | None, int | None]:
    tokenizer = build_tokenizer(config.data)
    return tokenizer.bos, tokenizer.eod


class BlockExport:
    """How a run's linears become block-FP8: with its own quantizer where its tiles are those of the format."""

    def __init__(self, config: Config, family: Family):
        if any(rule.layout.turns for rule in family.rules):
            raise ValueError(f"--fp8: {family.model_type} stores its matrices turned, block-FP8 knows no such model")
        self._policy = policy.from_config(config)
        self.trained = self._policy.recipe
        self.own = self.trained is not None and _makes_blocks(self.trained)
        self._recipe = self.trained if self.own else get_recipe("blockwise")

    def quantizer_of(self, name: str) -> Quantize | None:
        """Of the weight `name`; None for what stays in high precision, in the file as in the run."""
        module = name.removesuffix(".weight")
        if module == name or not self._recipe.covers(module):
            return None
        if self.trained is not None and self._policy(module) is None:
            return None
        return self._quantize

    def _quantize(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        row = self._recipe.quantizer("weight").quantize(weight, rowwise=True, colwise=False).rowwise
        return row.data, row.scale_inv.contiguous()

    def notes(self, outgoing: Outgoing) -> list[str]:
        """What the bytes are, for the user: the run's own or not."""
        count = sum(t.dtype == torch.float8_e4m3fn for t in outgoing.tensors.values())
        if not self.own:
            how = "in high precision" if self.trained is None else f"with recipe {self.trained.name}"
            return [f"{count} weights were trained {how} and quantized now: bytes that the run never computed with"]
        if not outgoing.requantized:
            return [f"{count} weights: exactly the FP8 bytes and scales that the run computed with"]
        return [
            f"{len(outgoing.requantized)} of {count} weights quantized again, as their {BLOCK} x {BLOCK} blocks cut "
            f"rows otherwise than the run's (first: {min(outgoing.requantized)}); the others are the run's own bytes"
        ]


def _makes_blocks(recipe: Recipe) -> bool:
    """Whether the recipe's weights are E4M3 with an FP32 scale a 128 x 128 tile."""
    spec = recipe.quantizer("weight").spec
    square = (spec.tile.kind, spec.tile.block) == ("2d", BLOCK)
    return square and spec.format.dtype == torch.float8_e4m3fn
