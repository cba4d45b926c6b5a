"""Linears cut over the tensor-parallel axis: `fp8.Linear` with the right ParamSpecs and CommPlan, nothing of their own.

Column-parallel linears hold a part of the output features (qkv, fc1, the LM head), row-parallel ones a part of the
input features (proj, fc2), so that a pair of them needs one reduction. On one rank both are plain linears.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import nn

from megafp8.core.build import BuildContext
from megafp8.core.tensor_parallel.specs import ZEROS, column_bias, column_weight, replicated, row_weight, vocab_weight
from megafp8.fp8 import CommPlan, Linear, Recipe
from megafp8.fp8.comm import ALONE
from megafp8.fp8.feature_grid import FeatureGrid


def comm_plan(
    kind: str, build: BuildContext, parts: int = 1, size: int = 0, recipe: Recipe | None = None, name: str = ""
) -> CommPlan:
    """What a "column"- or "row"-parallel linear exchanges; `parts` of `size` features each are cut over the ranks.

    Raises ValueError where the cut goes through tiles in a way that no exchange of amaxes mends.
    """
    if build.tp.size == 1:
        return ALONE
    grid = None
    if recipe is not None and (block := recipe.quantizer("weight").spec.tile.block):
        grid = FeatureGrid(parts, size, build.tp, block)
        if grid.aligned:
            grid = None
        elif (recipe.input_tile, recipe.weight_tile, recipe.grad_tile) != ("1d", "2d", "1d"):
            raise ValueError(
                f"--tensor-model-parallel-size {build.tp.size} cuts {size} features of {name} into parts of "
                f"{size // build.tp.size}, no multiple of the recipe's tiles of {block}: that needs its default tiles, "
                "--fp8-input-tile 1d --fp8-weight-tile 2d --fp8-grad-tile 1d; or use another size"
            )
    return CommPlan(build.tp, kind, build.sequence_parallel, build.comm_chunks, grid=grid, sums=build.sums_outputs)


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
        plan = comm_plan("column", build, math.prod(out_shape[:-1]), out_shape[-1], recipe, name)
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
            comm=plan,
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
        plan = comm_plan("row", build, 1, in_features, recipe, name)
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
            comm=plan,
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
