"""Conversion from and to Hugging Face models: one small file of rules a family, and streaming of their tensors."""

from __future__ import annotations

from megafp8.checkpoint.hf.deepseek_v3 import DEEPSEEK_V3
from megafp8.checkpoint.hf.family import Family
from megafp8.checkpoint.hf.gpt2 import GPT2
from megafp8.checkpoint.hf.llama import LLAMA, MISTRAL, QWEN2
from megafp8.checkpoint.hf.mixtral import MIXTRAL
from megafp8.checkpoint.hf.qwen3 import QWEN3
from megafp8.checkpoint.hf.qwen3_moe import QWEN3_MOE
from megafp8.checkpoint.hf.values import Values
from megafp8.config import Config

__all__ = ["FAMILIES", "Family", "family_for", "family_of"]

FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, GPT2, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3)
}
"""By model_type, in the order in which `family_for` tries them."""


def family_of(hf: Values) -> Family:
    """The family that a config.json names. Raises ValueError for one that is not built here."""
    kind = hf.text("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"{hf.where}: model_type '{kind}' is not built here, only {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def family_for(config: Config, name: str | None = None) -> Family:
    """The first family that has the model of `config`, or the one called `name` (--family).

    Raises ValueError, naming the flags that stand in the way.
    """
    if name is not None:
        if name not in FAMILIES:
            raise ValueError(f"--family {name}: use one of {', '.join(FAMILIES)}")
        FAMILIES[name].describe(config)
        return FAMILIES[name]
    reasons = []
    for family in FAMILIES.values():
        try:
            family.describe(config)
        except ValueError as error:
            reasons.append(str(error))
        else:
            return family
    shortest = min(reasons, key=len)
    raise ValueError(f"no family of Hugging Face models has this architecture; {shortest}")
