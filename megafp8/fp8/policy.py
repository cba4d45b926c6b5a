"""Which recipe each linear gets: name -> recipe, or None for high precision. Decided when the model is built."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from megafp8.config import Config
from megafp8.config.fp8 import DEFAULT_RECIPE
from megafp8.fp8.recipe import Recipe, get_recipe


class Policy:
    """Called with the global name of a linear, e.g. "layers.3.mlp.fc1", while the model is built.

    recipe: of the linears it covers. keep: patterns (`*` matches dots too) of linears kept in high precision;
    `flags` says for each where it comes from, for error messages.
    """

    def __init__(self, recipe: Recipe | None, keep: Iterable[str] = (), flags: dict[str, str] | None = None):
        self.recipe = recipe
        self.keep = tuple(keep)
        self._flags = flags or {}
        self.decisions: dict[str, Recipe | None] = {}

    def __call__(self, name: str) -> Recipe | None:
        kept = any(fnmatchcase(name, pattern) for pattern in self.keep)
        covered = self.recipe is not None and self.recipe.covers(name)
        self.decisions[name] = self.recipe if covered and not kept else None
        return self.decisions[name]

    def check(self) -> None:
        """After the build: raises ValueError for a pattern that matched no linear it was asked about."""
        for pattern in self.keep:
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
        "input_tile": fp8.fp8_input_tile,
        "weight_tile": fp8.fp8_weight_tile,
        "grad_tile": fp8.fp8_grad_tile,
        "input_format": fp8.fp8_input_format,
        "weight_format": fp8.fp8_weight_format,
        "grad_format": fp8.fp8_grad_format,
    }
    if name == "delayed":  # the one recipe whose flags have defaults of their own, Megatron-LM's
        axes["margin"] = fp8.fp8_margin
        axes["amax_history_len"] = fp8.fp8_amax_history_len
        axes["amax_compute_algo"] = fp8.fp8_amax_compute_algo
    return get_recipe(name, **axes)


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
    return Policy(recipe_of(config), flags, flags)
