"""Memory of weights, gradients and optimizer in other precisions."""

from __future__ import annotations

from megafp8.config import Config, with_vocab_size
from megafp8.config.crossover import with_small_linears
from megafp8.data import build_tokenizer
from megafp8.plan.memory import plan_memory
from megafp8.plan.rank_parameters import rank_parameters

RECIPES = {
    "bf16": {"fp8_format": None, "fp8_recipe": None},
    "tensorwise": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8 32x32": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
    "mxfp8 1x32": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8", "fp8_weight_tile": "1d"},
}
STATES = {
    "fp32": {},
    "remainders": {"store_param_remainders": True},
    "bf16 moments": {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    "fp8 moments": {"exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
    "remainders, fp8 moments": {
        "store_param_remainders": True,
        "exp_avg_dtype": "fp8",
        "exp_avg_sq_dtype": "fp8",
    },
}
PLAIN = {
    "fp8_input_tile": None,
    "fp8_weight_tile": None,
    "fp8_grad_tile": None,
    "fp8_param_gather": False,
    "use_precision_aware_optimizer": False,
    "store_param_remainders": False,
    "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32",
}
"""What the variants start from, whatever the configuration's own choices are."""


def with_vocabulary(config: Config) -> Config:
    """The configuration with the size of its vocabulary. Raises ValueError when its tokenizer can't be loaded."""
    return with_vocab_size(config, build_tokenizer(config.data).vocab_size)


def variants(config: Config) -> dict[str, Config]:
    """The configuration in other precisions, by what they are; those that its own flags rule out are left out."""
    found = {}
    base = config.replace(**PLAIN)
    if not config.train.bf16:
        return {"fp32": base}
    for recipe, flags in RECIPES.items():
        found[f"{recipe}, BF16 weights"] = base.replace(**flags)
        if recipe != "bf16":
            found[f"{recipe}, FP8 primary"] = base.replace(**flags, fp8_param_gather=True)
    for state, flags in STATES.items():
        if flags:
            found[f"bf16, {state}"] = base.replace(**RECIPES["bf16"], use_precision_aware_optimizer=True, **flags)
    return {name: with_small_linears(variant) for name, variant in found.items()}


def in_bf16(config: Config) -> Config:
    """The same job without FP8, whatever else is asked for."""
    return config.replace(fp8_format=None, fp8_recipe=None, fp8_param_gather=False, moe_fp8_dispatch=False,
                          moe_fp8_combine_grad=False)  # fmt: skip


def comparison_lines(config: Config, device: str = "cpu") -> list[str]:
    """A table: bytes a parameter of weights, FP8 copies, gradients and optimizer in each precision, on a rank of the
    first pipeline stage."""
    numel = sum(p.numel for p in rank_parameters(config))
    lines = [
        f"{'bytes a parameter':<36}{'weights':>9}{'copies':>9}{'grads':>9}{'optimizer':>11}{'sum':>9}{'of BF16':>9}"
    ]
    reference = None
    for name, variant in variants(config).items():
        plan = plan_memory(variant, device)
        parts = [plan.weights, plan.fp8_copies, plan.main_grads, plan.masters + plan.moments]
        reference = sum(parts) if reference is None else reference
        w, c, g, o = (part / numel for part in parts)
        total = sum(parts) / numel
        lines.append(f"{name:<36}{w:9.3f}{c:9.3f}{g:9.3f}{o:11.3f}{total:9.3f}{sum(parts) / reference:9.4f}")
    return lines
