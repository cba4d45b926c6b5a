"""FP8 for people's own models: swaps `nn.Linear` for `fp8.Linear`, in place, around the same parameters."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from megafp8.fp8.delayed import DelayedScaling
from megafp8.fp8.linear import Linear
from megafp8.fp8.recipe import Recipe, get_recipe


def convert(model: nn.Module, recipe: Recipe | str, *, skip: str | Iterable[str] = ()) -> nn.Module:
    """Gives every `nn.Linear` of `model` the recipe; returns the model (another module only if it is one linear).

    recipe: one of `get_recipe`, or its name alone, such as "blockwise".
    skip: patterns of module names to leave alone, such as "lm_head" or "*.router" (`*` matches dots too); one that
        matches no linear is a ValueError. Subclasses of `nn.Linear` are left alone: their owners may bypass `forward`.
    Parameters stay the same objects, so an optimizer built before keeps working, and any optimizer works: weights are
    quantized anew after each change. With a recipe that has a history (delayed), call `model.fp8_scaling.advance()`
    after each optimizer step. A model without any `nn.Linear` is a ValueError too: nothing would be in FP8.
    """
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if not linears:
        raise ValueError(f"{type(model).__name__} has no nn.Linear, so nothing in it would run in FP8")
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in linears):
            raise ValueError(f"skip pattern {pattern!r} matches no nn.Linear; their names: {', '.join(linears)}")
    for name, module in linears.items():
        if any(fnmatchcase(name, pattern) for pattern in skip):
            continue
        swapped = _swapped(name, module, recipe)
        if not name:
            model = swapped
            break
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, swapped)
    history = DelayedScaling.of(model)
    if history is not None:
        model.fp8_scaling = history
        for module in model.modules():
            if isinstance(module, Linear):
                module.history = history
    return model


def _swapped(name: str, module: nn.Linear, recipe: Recipe) -> Linear:
    linear = Linear(
        module.in_features,
        module.out_features,
        module.bias is not None,
        recipe=recipe,
        params_dtype=module.weight.dtype,
        device="meta",
        name=f"{name or 'linear'}.weight",
    )
    linear.weight, linear.bias = module.weight, module.bias
    return linear.train(module.training)
