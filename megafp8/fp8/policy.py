"""Which recipe each linear gets: name -> recipe, or None for high precision. Decided when the model is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields
from fnmatch import fnmatchcase

import torch

from megafp8.config import Config
from megafp8.config.crossover import is_small
from megafp8.config.fp8 import DEFAULT_RECIPE
from megafp8.config.module_recipes import FLAG, module_recipes
from megafp8.fp8 import gemm
from megafp8.fp8.recipe import RECIPES, Recipe, get_recipe


class Policy:
    """Called with the global name of a linear, e.g. "layers.3.mlp.fc1", while the model is built.

    recipe: of the linears it covers. others: (pattern, recipe) of linears that get another one, None for high
    precision; the last that matches counts. keep: patterns of linears kept in high precision whatever else is said.
    In patterns `*` matches dots too. flags: for each pattern where it comes from, for error messages. too_small:
    whether FP8 would slow a linear down, by its name; not asked about those that `others` names. small: those that are.
    """

    def __init__(
        self,
        recipe: Recipe | None,
        keep: Iterable[str] = (),
        flags: dict[str, str] | None = None,
        others: Iterable[tuple[str, Recipe | None]] = (),
        too_small: Callable[[str], bool] = lambda name: False,
    ):
        self.recipe = recipe
        self.keep = tuple(keep)
        self.others = tuple(others)
        self._flags, self._too_small = flags or {}, too_small
        self.decisions: dict[str, Recipe | None] = {}
        self.small: set[str] = set()

    def __call__(self, name: str) -> Recipe | None:
        recipe, named = self.recipe, False
        for pattern, other in self.others:
            if fnmatchcase(name, pattern):
                recipe, named = other, True
        kept = any(fnmatchcase(name, pattern) for pattern in self.keep)
        covered = recipe is not None and recipe.covers(name) and not kept
        if covered and not named and self._too_small(name):
            self.small.add(name)
            covered = False
        self.decisions[name] = recipe if covered else None
        return self.decisions[name]

    def check(self) -> None:
        """After the build: raises ValueError for a pattern that matched no linear it was asked about."""
        for pattern in (*self.keep, *(pattern for pattern, _ in self.others)):
            if not any(fnmatchcase(name, pattern) for name in self.decisions):
                flag = self._flags.get(pattern, "--keep-modules-in-bf16")
                example = next(iter(self.decisions), "layers.0.mlp.fc1")
                raise ValueError(
                    f"{flag} {pattern!r} matches no linear: linears are named like {example!r} and '*' matches anything"
                )


def recipe_of(config: Config) -> Recipe | None:
    """The recipe that the flags ask for; None without --fp8-format."""
    fp8 = config.fp8
    if not fp8.enabled:
        return None
    name = fp8.fp8_recipe or DEFAULT_RECIPE[fp8.fp8_format]
    axes = {
        "fp8_format": fp8.fp8_format,
        "power_of_two_scales": fp8.fp8_power_of_two_scales,
        "amax_epsilon": fp8.fp8_amax_epsilon or None,
        "fast_accumulation": fp8.fp8_fast_accumulation or None,
        "input_tile": fp8.fp8_input_tile,
        "weight_tile": fp8.fp8_weight_tile,
        "grad_tile": fp8.fp8_grad_tile,
        "input_format": fp8.fp8_input_format,
        "weight_format": fp8.fp8_weight_format,
        "grad_format": fp8.fp8_grad_format,
    }
    history = {  # flags with defaults of their own, Megatron-LM's: for recipes that have a history
        "margin": fp8.fp8_margin,
        "amax_history_len": fp8.fp8_amax_history_len,
        "amax_compute_algo": fp8.fp8_amax_compute_algo,
    }
    own = {axis.name for axis in fields(RECIPES[name])}
    return get_recipe(name, **axes, **{axis: value for axis, value in history.items() if axis in own})


def from_config(config: Config) -> Policy:
    """The policy of a configuration: the recipe of its flags, and what they keep in BF16."""
    fp8, flags = config.fp8, {}
    if fp8.enabled and fp8.first_last_layers_bf16:
        layers = config.model.num_layers
        start, end = fp8.num_layers_at_start_in_bf16, fp8.num_layers_at_end_in_bf16
        for number in [*range(min(start, layers)), *range(max(layers - end, 0), layers)]:
            flags[f"layers.{number}.*"] = "--first-last-layers-bf16"
    if fp8.enabled:
        flags |= dict.fromkeys(fp8.keep_modules_in_bf16, "--keep-modules-in-bf16")
    keep, chosen = tuple(flags), module_recipes(fp8.fp8_module_recipes, RECIPES)
    flags |= {entry.pattern: FLAG for entry in chosen if entry.pattern not in flags}
    others = [(e.pattern, e.recipe and get_recipe(e.recipe, fp8_format=e.fp8_format)) for e in chosen]
    return Policy(recipe_of(config), keep, flags, others, lambda name: is_small(config, name))


def check_gemms(recipes: Iterable[Recipe | None], backend: str, device: torch.device) -> None:
    """Before a model is built: raises ValueError where the backend that is asked for can't run a recipe's GEMMs.

    recipes: of the model's linears.
    """
    for recipe in dict.fromkeys(recipes):
        reason = None if recipe is None else gemm.refusal(recipe, device, backend)
        if reason is not None:
            raise ValueError(f"--fp8-gemm-backend {backend} with --fp8-recipe {recipe.name}: {reason}; use auto")
