"""`--fp8-module-recipes`: which linears get another recipe than the rest, as patterns on the command line or in a file.

    layers.*.mlp.fc2=tensorwise:hybrid      a recipe, and its --fp8-format where it isn't the recipe's own
    layers.0.*=bf16                         none
    @recipes.txt                            a file of such lines; what follows a '#' is a comment

`*` matches anything, dots too. Of several patterns that match a linear the last one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

FLAG = "--fp8-module-recipes"
HIGH_PRECISION = "bf16"


class ModuleRecipe(NamedTuple):
    """recipe: None for high precision; fp8_format: None for the recipe's own. text: as it was given."""

    pattern: str
    recipe: str | None
    fp8_format: str | None
    text: str


def module_recipes(items: Iterable[str], known: Iterable[str]) -> list[ModuleRecipe]:
    """Returns what `items` say, files read, in order.

    Args:
        items: the flag's values.
        known: names of recipes.

    Raises:
        ValueError: an item is no `PATTERN=RECIPE`, names an unknown recipe, or a file that can't be read.
    """
    return [_parse(line, shown, tuple(known)) for item in items for line, shown in _lines(item)]


def _lines(item: str) -> Iterator[tuple[str, str]]:
    """The assignments behind an item, each with how messages show it."""
    if not item.startswith("@"):
        yield item.strip(), f"{FLAG} {item!r}"
        return
    try:
        text = Path(item[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ValueError(f"{FLAG} {item}: the file can't be read ({reason}); give another") from None
    for number, line in enumerate(text.splitlines(), 1):
        if line := line.partition("#")[0].strip():
            yield line, f"{FLAG} {item} line {number}, {line!r}"


def _parse(line: str, shown: str, known: tuple[str, ...]) -> ModuleRecipe:
    pattern, equals, value = (part.strip() for part in line.partition("="))
    if not pattern or not equals:
        raise ValueError(f"{shown}: write PATTERN=RECIPE, such as 'layers.*.mlp.fc2=tensorwise'")
    recipe, _, fp8_format = value.partition(":")
    if recipe == HIGH_PRECISION and not fp8_format:
        return ModuleRecipe(pattern, None, None, shown)
    if recipe not in known:
        raise ValueError(f"{shown}: no recipe {recipe!r}; use {HIGH_PRECISION} or one of {', '.join(known)}")
    if fp8_format not in ("", "e4m3", "hybrid"):
        raise ValueError(f"{shown}: no format {fp8_format!r}; use e4m3 or hybrid")
    return ModuleRecipe(pattern, recipe, fp8_format or None, shown)
