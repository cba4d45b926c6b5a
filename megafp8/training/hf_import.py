"""From a Hugging Face model, or a file of llama2.c, to a checkpoint that a run can start from.

The families' rules and the streaming are in megafp8/checkpoint/hf; here they meet the model, whose parameters say
which tensors there must be, and the tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from megafp8.checkpoint.hf import Family, family_of
from megafp8.checkpoint.hf.companions import KEPT, copy_companions, export_tokenizer, tokenizer_args
from megafp8.checkpoint.hf.family import model_of
from megafp8.checkpoint.hf.llama2c import Llama2cFile
from megafp8.checkpoint.hf.rules import Entry, check_sources, make_plan
from megafp8.checkpoint.hf.source import CONFIG, Source, open_source, read_config
from megafp8.checkpoint.hf.streams import PREFIX, Incoming
from megafp8.checkpoint.hf.values import Values
from megafp8.checkpoint.hf.write import meta, published, write_checkpoint, write_json
from megafp8.config import Config, ParallelConfig, with_vocab_size
from megafp8.config.model import ModelConfig
from megafp8.core.gpt import build_model
from megafp8.data import build_tokenizer
from megafp8.fp8 import policy
from megafp8.optimizer import build_schedule, schedule_to_json
from megafp8.parallel import ParallelContext
from megafp8.params import named_specs
from megafp8.training.build import tokenizer_identity
from megafp8.training.progress import Progress

ARGS_FILE = "model_args.json"
"""Flags of a converted model, for `pretrain_gpt.py --config`."""
LONGEST = 4096
"""Tokens of a sample for tools, where the model could take longer ones."""
FP8_ARGS = {"fp8_format": "e4m3", "fp8_recipe": "blockwise", "fp8_small_linears": "fp8"}
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class ImportOptions:
    """dtype: "auto", "bf16" or "fp32". seq_length: None for the model's positions, at most LONGEST.

    tokenizer: fields of DataConfig that name it; empty for the one that lies beside the model.
    """

    dtype: str = "auto"
    seq_length: int | None = None
    tokenizer: Mapping[str, Any] = field(default_factory=dict)


def import_hf(directory: Path, save: Path, options: ImportOptions) -> list[str]:
    """Converts the Hugging Face model in `directory` into a new directory of checkpoints, `save`; returns notes.

    Raises ValueError, one line, for a model that is not built here, a name without a counterpart, or a damaged or
    hostile file; then `save` doesn't exist.
    """
    hf = read_config(directory)
    family = family_of(hf)
    args = family.to_args(hf)
    with open_source(directory, family, hf) as source, published(save, "--save") as partial:
        copy_companions(directory, partial / KEPT)
        write_json(partial / KEPT / CONFIG, hf.content)
        options = _with_copied_tokenizer(options, partial / KEPT)
        args = family.present(args, source.tensors) | {"bf16": _is_bf16(options, hf, source)}
        if source.fp8 is not None and args["bf16"]:  # a model stored in FP8 is run in FP8
            args |= FP8_ARGS | ({} if source.power_of_two_scales() else {"fp8_power_of_two_scales": False})
        model = _Model(family, args, hf.integer("vocab_size"), options, len(source.tensors))
        check_sources(model.plan, _shapes(source, family, model.config), str(directory), ignored=family.ignored)
        kept = _kept_in_bf16(model, source)
        incoming = Incoming(model.plan, model.config.model, model.dtypes, source.read)
        _write(partial, save, model.with_flags(keep_modules_in_bf16=kept) if kept else model, incoming)
    notes = [] if options.tokenizer else [f"{directory} has no tokenizer: texts of the checkpoint are numbers"]
    return notes + _rounding(incoming)


def import_llama2c(file: Path, save: Path, options: ImportOptions) -> list[str]:
    """The same for a `.bin` file of llama2.c, whose tokenizer has to be given."""
    source = Llama2cFile(file)
    hf = Values(source.config, str(file))
    family = family_of(hf)
    args = family.to_args(hf) | {"bf16": options.dtype == "bf16"}
    with published(save, "--save") as partial:
        (partial / KEPT).mkdir()
        options = _with_copied_tokenizer(options, partial / KEPT)
        model = _Model(family, args, hf.integer("vocab_size"), options, len(source.shapes))
        check_sources(model.plan, source.shapes, str(file))
        incoming = Incoming(model.plan, model.config.model, model.dtypes, source.read)
        _write(partial, save, model, incoming)
    return _rounding(incoming)


def _with_copied_tokenizer(options: ImportOptions, kept: Path) -> ImportOptions:
    """The tokenizer's files are copied beside the checkpoint, where they can be; without one given, those in `kept`."""
    if not options.tokenizer or export_tokenizer(options.tokenizer, kept):
        return replace(options, tokenizer=tokenizer_args(kept))
    return options


class _Model:
    """The model that the files hold: its configuration, and what each of its parameters is made of.

    args: fields of the configuration. available: number of tensors in the files. identity: of the tokenizer, None
    without one, when texts are numbers.
    """

    def __init__(self, family: Family, args: Mapping[str, Any], vocab: int, options: ImportOptions, available: int):
        self.tokenizer = dict(options.tokenizer)
        self.args = {**args, **(self.tokenizer | {"vocab_size": vocab} if self.tokenizer else {})}
        values = {**self.args, "seq_length": options.seq_length or min(args["max_position_embeddings"], LONGEST)}
        if self.tokenizer:
            config = model_of(values)
            tokenizer = build_tokenizer(config.data)
            if tokenizer.vocab_size > vocab:
                raise ValueError(
                    f"--tokenizer-model {config.data.tokenizer_model}: {tokenizer.vocab_size} tokens, but the model's "
                    f"'vocab_size' is {vocab}: give the model's own tokenizer"
                )
            vocab, self.identity = tokenizer.vocab_size, tokenizer_identity(tokenizer)
        else:
            config, self.identity = model_of({**values, "vocab_size": max(vocab - 1, 1)}), None
        self.config = with_vocab_size(config, vocab)
        tensors = model_tensors(self.config, available)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.plan = make_plan(family.rules, shapes, self.config.model)
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def with_flags(self, **values: Any) -> _Model:
        """The same model with other flags."""
        other = copy(self)
        other.args = {**self.args, **values}
        other.config = replace(self.config.replace(**values), given={**self.config.given, **values})
        return other


def check_claims(m: ModelConfig, available: int) -> None:
    """Raises ValueError for more layers and experts than there are tensors, before anything is sized by them."""
    claimed = m.num_layers + (m.mtp_num_layers or 0)
    if claimed <= available:
        claimed += sum(m.moe_layers) * (m.num_experts or 0)
    if claimed > available:
        raise ValueError(f"the configuration has {claimed} layers and experts, but the files only {available} tensors")


def model_tensors(config: Config, available: int) -> dict[str, torch.Tensor]:
    """Global name -> dtype and logical global shape (on "meta") of all that a checkpoint keeps of a model.

    Those are its parameters and the experts' biases, whatever layout the run had. available: number of tensors in the
    files. Raises what `check_claims` raises, and ValueError for sizes that overflow.
    """
    check_claims(config.model, available)
    try:
        model = build_model(replace(config, parallel=ParallelConfig()), ParallelContext(), "meta")
    except (RuntimeError, OverflowError) as error:  # PyTorch, of a number of bytes past 64 bits
        raise ValueError(f"the configuration's sizes are absurd: {str(error).splitlines()[0]}") from None
    found = {spec.name: meta(spec.shape, param.dtype) for spec, param in named_specs(model)}
    return found | {name.removeprefix(PREFIX): item.tensor for name, item in model.state().items()}


def _is_bf16(options: ImportOptions, hf: Values, source: Source) -> bool:
    """As --dtype says; else BF16 where the matrices are BF16 or FP8. FP16 becomes FP32, which holds it exactly."""
    if options.dtype != "auto":
        return options.dtype == "bf16"
    stored = {stored.dtype for stored in source.tensors.values() if len(stored.shape) == 2}
    return stored <= {torch.bfloat16, torch.float8_e4m3fn}


def _shapes(source: Source, family: Family, config: Config) -> dict[str, tuple[int, ...]]:
    """The source's shapes; a tied model may store its LM head again, if it is the embedding's copy."""
    shapes = source.shapes
    if config.model.untie_embeddings_and_output_weights or HEAD not in shapes:
        return shapes
    embedding = next(rule.theirs for rule in family.rules if rule.ours.startswith("embedding.word_embeddings"))
    if embedding in shapes and not torch.equal(source.read(HEAD), source.read(embedding)):
        raise ValueError(f"{source.directory}: config.json ties the LM head to the embedding, but their weights differ")
    return {name: shape for name, shape in shapes.items() if name != HEAD}


def _kept_in_bf16(model: _Model, source: Source) -> tuple[str, ...]:
    """Our linears that the recipe covers, but the files hold in high precision."""
    recipe = policy.recipe_of(model.config)
    if recipe is None:
        return ()
    return tuple(
        module for module, entry in _linears(model.plan)
        if recipe.covers(module) and any(source.tensors[part].scale is None for part in entry.parts)
    )  # fmt: skip


def _linears(plan: list[Entry]) -> list[tuple[str, Entry]]:
    return [(e.name.removesuffix(".weight"), e) for e in plan if e.name.endswith(".weight") and len(e.shapes[0]) == 2]


def _write(partial: Path, save: Path, model: _Model, incoming: Incoming) -> None:
    """The checkpoint, and the flags to go on with it. Tokenizer paths are those after publication."""
    moved = {
        name: str(value).replace(str(partial), str(save.absolute())) if isinstance(value, str) else value
        for name, value in model.tokenizer.items()
    }
    model = model.with_flags(**moved) if moved else model
    metadata = {
        "progress": Progress().to_json(),
        "schedule": schedule_to_json(build_schedule(model.config)),
        "args": model.config.to_dict(),
    }
    metadata |= {"tokenizer": model.identity} if model.identity else {}
    write_checkpoint(partial, 0, incoming.tensors, incoming.load, metadata)
    write_json(partial / ARGS_FILE, {"hidden_dropout": 0.0, "attention_dropout": 0.0, **model.args})


def _rounding(incoming: Incoming) -> list[str]:
    if not incoming.rounded:
        return []
    dtype = str(incoming.tensors[incoming.rounded[0]].dtype).removeprefix("torch.")
    return [f"values of {len(incoming.rounded)} of {len(incoming.tensors)} tensors were rounded to {dtype}"]
