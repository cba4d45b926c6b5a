"""Linears cut over the tensor-parallel axis: `fp8.Linear` with the right ParamSpecs and CommPlan, nothing of their own.

Column-parallel linears hold a part of the output features (qkv, fc1, the LM head), row-parallel ones a part of the
input features (proj, fc2), so that a pair of them needs one reduction. On one rank both are plain linears.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from megafp8.core.build import BuildContext
from megafp8.core.tensor_parallel.specs import ZEROS, column_bias, column_weight, replicated, row_weight, vocab_weight
from megafp8.fp8 import CommPlan, Linear, Recipe
from megafp8.fp8.comm import ALONE
from megafp8.fp8.recipe import ROLES


def comm_plan(kind: str, build: BuildContext) -> CommPlan:
    """What a "column"- or "row"-parallel linear exchanges."""
    if build.tp.size == 1:
        return ALONE
    return CommPlan(build.tp, kind, build.sequence_parallel, build.comm_chunks)


def check_tiles(name: str, side: str, features: int, recipe: Recipe | None, build: BuildContext) -> None:
    """Raises ValueError where the cut of `features` goes through tiles of the recipe, rather than between them."""
    blocks = {recipe.quantizer(role).spec.tile.block for role in ROLES} - {0} if recipe is not None else set()
    if build.tp.size > 1 and any(features // build.tp.size % block for block in blocks):
        block = max(blocks)
        raise ValueError(
            f"--tensor-model-parallel-size {build.tp.size} cuts the {features} {side} features of {name} into parts of "
            f"{features // build.tp.size}, which the recipe's tiles of {block} don't divide: use another size, "
            f"--fp8-recipe tensorwise, or --keep-modules-in-bf16 '*.{name.rpartition('.')[2]}'"
        )


class ColumnParallelLinear(Linear):
    """y = x W^T + b, output features cut.

    name: global name. out_shape: `(out,)`, or stacked parts that are cut alike, such as SwiGLU's `(2, ffn)`.
    expert: belongs to an expert (no bias).
    """

    def __init__(
        self,
        name: str,
        in_features: int,
        out_shape: tuple[int, ...],
        *,
        bias: bool,
        init_std: float,
        requantize_input: bool = False,
        expert: bool = False,
        build: BuildContext,
    ) -> None:
        weight = replace(column_weight(f"{name}.weight", out_shape, in_features, init_std, build.tp), expert=expert)
        recipe = build.recipe_of(name)
        check_tiles(name, "output", out_shape[-1], recipe, build)
        super().__init__(
            in_features,
            weight.local_shape[0],
            bias,
            recipe=recipe,
            weight_spec=weight,
            bias_spec=column_bias(f"{name}.bias", out_shape, build.tp) if bias else None,
            params_dtype=build.dtype,
            device=build.device,
            name=name,
            requantize_input=requantize_input,
            comm=comm_plan("column", build),
            gemm_backend=build.gemm_backend,
        )


class RowParallelLinear(Linear):
    """y = x W^T + b, input features cut; the bias is added once, to the sum over the ranks."""

    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        init_std: float,
        requantize_input: bool = False,
        expert: bool = False,
        build: BuildContext,
    ) -> None:
        weight = replace(row_weight(f"{name}.weight", out_features, in_features, init_std, build.tp), expert=expert)
        recipe = build.recipe_of(name)
        check_tiles(name, "input", in_features, recipe, build)
        sharded = build.sequence_parallel
        super().__init__(
            weight.local_shape[1],
            out_features,
            bias,
            recipe=recipe,
            weight_spec=weight,
            bias_spec=replicated(f"{name}.bias", (out_features,), ZEROS, gradient_is_part=sharded) if bias else None,
            params_dtype=build.dtype,
            device=build.device,
            name=name,
            requantize_input=requantize_input,
            comm=comm_plan("row", build),
            gemm_backend=build.gemm_backend,
        )


class LMHead(Linear):
    """Logits of this rank's part of the padded vocabulary; always high precision. No bias.

    tied: the word embedding's weight, when the head shares it.
    """

    def __init__(self, name: str, build: BuildContext, tied: nn.Parameter | None = None) -> None:
        spec = vocab_weight(f"{name}.weight", build)
        super().__init__(
            spec.local_shape[1],
            spec.local_shape[0],
            False,
            weight_spec=spec,
            params_dtype=build.dtype,
            comm=comm_plan("column", build),
            device=build.device if tied is None else "meta",
        )
        if tied is not None:
            self.weight = tied
