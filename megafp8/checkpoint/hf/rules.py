"""Rules: which tensors of a Hugging Face model make up which of ours, and the plan they give for one model.

    Rule("layers.{i}.mlp.fc1.weight", ("model.layers.{i}.mlp.gate_proj.weight", "model.layers.{i}.mlp.up_proj.weight"),
         STACKED)

Placeholders: {i} a layer, {e} an expert, {k} a prediction depth, {field} "weight" or "bias". In their names also
{mtp}, the layer number under which DeepSeek files a prediction depth: the number of layers plus {k}.

Our names and shapes come from the model itself. Every one is matched by exactly one rule, and every name of theirs is
used exactly once: what is left over on either side is an error, as is a shape that doesn't fit.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from megafp8.checkpoint.hf.layouts import SAME, Layout
from megafp8.config.model import ModelConfig

_PLACEHOLDERS = {"i": r"\d+", "e": r"\d+", "k": r"\d+", "field": "weight|bias"}
_SHOWN = 3


@dataclass(frozen=True)
class Rule:
    """ours: name pattern of a parameter; theirs: patterns of the tensors it is made of, in the layout's order."""

    ours: str
    theirs: tuple[str, ...] | str
    layout: Layout = SAME

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        escaped = re.escape(self.ours).replace(r"\{", "{").replace(r"\}", "}")
        for name, what in _PLACEHOLDERS.items():
            escaped = escaped.replace(f"{{{name}}}", f"(?P<{name}>{what})")
        return re.compile(escaped)

    def names(self, ours: str, model: ModelConfig) -> tuple[str, ...] | None:
        """Their names for a parameter of ours, None when the rule is not for it."""
        match = self._pattern.fullmatch(ours)
        if match is None:
            return None
        values = dict(match.groupdict())
        if "k" in values:
            values["mtp"] = str(model.num_layers + int(values["k"]))
        theirs = (self.theirs,) if isinstance(self.theirs, str) else self.theirs
        return tuple(name.format(**values) for name in theirs)


@dataclass(frozen=True)
class Entry:
    """One parameter of ours and what it is made of. shape: ours; parts: their names; shapes: theirs."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    layout: Layout

    def join(self, tensors: Sequence[Tensor], model: ModelConfig) -> Tensor:
        joined = self.layout.join(tensors, model).contiguous()
        assert tuple(joined.shape) == self.shape, (self.name, joined.shape, self.shape)
        return joined

    def split(self, tensor: Tensor, model: ModelConfig) -> list[Tensor]:
        """tensor: in our shape, or with a last dimension of another length (layouts move whole rows)."""
        return [part.contiguous() for part in self.layout.split(tensor, model)]


def make_plan(rules: Iterable[Rule], shapes: Mapping[str, tuple[int, ...]], model: ModelConfig) -> list[Entry]:
    """The entries of a model, in the order of our names.

    shapes: our global name -> logical global shape. Raises ValueError for a name that no rule covers.
    """
    rules = tuple(rules)
    plan = [_entry(rules, name, tuple(shape), model) for name, shape in sorted(shapes.items())]
    made = [part for entry in plan for part in entry.parts]
    assert len(made) == len(set(made)), "two rules make one tensor"
    return plan


def _entry(rules: tuple[Rule, ...], name: str, shape: tuple[int, ...], model: ModelConfig) -> Entry:
    found = [(rule, names) for rule in rules if (names := rule.names(name, model)) is not None]
    assert len(found) < 2, f"two rules cover {name}"
    if not found:
        raise ValueError(f"'{name}' has no place in this family's files; choose another --family")
    rule, names = found[0]
    parts = rule.layout.split(torch.empty(shape, device="meta"), model)
    return Entry(name, shape, names, tuple(tuple(part.shape) for part in parts), rule.layout)


def check_sources(
    plan: Iterable[Entry], found: Mapping[str, tuple[int, ...]], where: str, *, ignored: Sequence[str] = ()
) -> None:
    """Every part that the plan reads must be in `found` (name -> shape), and nothing else.

    ignored: patterns of names that may be there without a use. Raises ValueError, one line, with the first names.
    """
    wanted = {part: shape for entry in plan for part, shape in zip(entry.parts, entry.shapes, strict=True)}
    missing = [name for name in wanted if name not in found]
    unused = [n for n in found if n not in wanted and not any(re.fullmatch(p, n) for p in ignored)]
    if missing:
        raise ValueError(f"{where} lacks {_some(missing)}: its config.json belongs to another model")
    if unused:
        raise ValueError(f"{where} holds {_some(unused)}, for which this family has no rule: nothing was converted")
    for name, shape in wanted.items():
        if tuple(found[name]) != shape:
            raise ValueError(
                f"{where}: '{name}' has the shape {list(found[name])}, its config.json makes it {list(shape)}"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in sorted(names)[:_SHOWN])
    more = len(names) - _SHOWN
    return shown if more <= 0 else f"{shown} and {more} more"
