"""Checks of the FP8 flags against each other."""

from megafp8.config.config import Config, flag_of
from megafp8.config.fp8 import RECIPES
from megafp8.config.module_recipes import module_recipes
from megafp8.config.validate.limits import plain

COVERAGE = (
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "keep_modules_in_bf16",
)


def fp8_on(c: Config) -> str | None:
    given = [name for name in c.given if name.startswith("fp8_") or name in COVERAGE]
    if not c.fp8.enabled and given:
        value = c.given[given[0]]
        shown = flag_of(given[0]) + ("" if isinstance(value, bool) else f" {plain(value)}")
        return f"{shown} needs --fp8-format; add --fp8-format e4m3 or hybrid, or leave it out"
    if c.fp8.enabled and not c.train.bf16:
        return f"--fp8-format {c.fp8.fp8_format} needs --bf16; add it"
    return None


def fp8_recipe(c: Config) -> str | None:
    if not c.fp8.enabled:
        return None
    if c.fp8.fp8_recipe not in RECIPES:
        return f"--fp8-recipe {c.fp8.fp8_recipe}: no such recipe; use one of {', '.join(RECIPES)}"
    if c.fp8.fp8_format == "hybrid" and not RECIPES[c.fp8.fp8_recipe].hybrid:
        return f"--fp8-recipe {c.fp8.fp8_recipe} takes e4m3 only, not --fp8-format hybrid; use --fp8-format e4m3"
    return None


def fp8_axes(c: Config) -> str | None:
    """Flags that only some recipes take."""
    if not c.fp8.enabled:
        return None
    traits, recipe = RECIPES[c.fp8.fp8_recipe], f"--fp8-recipe {c.fp8.fp8_recipe}"
    for name in ("fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_margin"):
        if c.is_given(name) and not traits.history:
            return f"{flag_of(name)} {c.value(name)} needs --fp8-recipe delayed, not {c.fp8.fp8_recipe}; leave one out"
    for name in ("fp8_input_tile", "fp8_weight_tile", "fp8_grad_tile"):
        if c.is_given(name) and not traits.tiled:
            return f"{flag_of(name)} {c.value(name)}: {recipe} has one scale a tensor; use blockwise or mxfp8"
    if c.fp8.fp8_fast_accumulation and traits.tiled:
        return (
            f"--fp8-fast-accumulation: {recipe} adds up its tiles in FP32; leave it out, or use tensorwise or delayed"
        )
    if c.is_given("fp8_power_of_two_scales") and not traits.power_of_two:
        return f"--[no-]fp8-power-of-two-scales: scales of {recipe} are always powers of two; leave it out"
    if c.is_given("fp8_amax_epsilon") and not traits.power_of_two:
        return f"--fp8-amax-epsilon {c.fp8.fp8_amax_epsilon}: {recipe} has no epsilon; leave it out"
    for name in ("fp8_input_format", "fp8_weight_format", "fp8_grad_format"):
        if c.value(name) == "e5m2" and not traits.hybrid:
            return f"{flag_of(name)} e5m2: {recipe} takes e4m3 only; leave it out"
    return None


def fp8_pairs(c: Config) -> str | None:
    """What meets in a GEMM: none multiplies two operands with square tiles, none two in e5m2."""
    if not c.fp8.enabled:
        return None
    tiles = {"input": c.fp8.fp8_input_tile or "1d", "weight": c.fp8.fp8_weight_tile or "2d"}
    tiles["grad"] = c.fp8.fp8_grad_tile or "1d"
    formats = {"input": c.fp8.fp8_input_format, "weight": c.fp8.fp8_weight_format}
    formats["grad"] = c.fp8.fp8_grad_format or ("e5m2" if c.fp8.fp8_format == "hybrid" else "e4m3")
    for a, b in (("input", "weight"), ("grad", "weight"), ("input", "grad")):
        if tiles[a] == tiles[b] == "2d" and RECIPES[c.fp8.fp8_recipe].tiled:
            return f"--fp8-{a}-tile 2d meets --fp8-{b}-tile 2d in a GEMM; make one of them 1d"
        if formats[a] == formats[b] == "e5m2":
            return f"--fp8-{a}-format e5m2 meets --fp8-{b}-format e5m2 in a GEMM; make one of them e4m3"
    return None


def fp8_coverage(c: Config) -> str | None:
    f = c.fp8
    for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
        if c.is_given(name) and not f.first_last_layers_bf16:
            return f"{flag_of(name)} {c.value(name)} needs --first-last-layers-bf16; add it"
    ends = f.num_layers_at_start_in_bf16 + f.num_layers_at_end_in_bf16
    if f.first_last_layers_bf16 and ends > c.model.num_layers:
        return (
            f"--num-layers-at-start-in-bf16 {f.num_layers_at_start_in_bf16} and --num-layers-at-end-in-bf16 "
            f"{f.num_layers_at_end_in_bf16} are more than --num-layers {c.model.num_layers}; lower them"
        )
    if any(not pattern.strip() for pattern in f.keep_modules_in_bf16):
        return "--keep-modules-in-bf16 '': a pattern is empty; give module names such as 'layers.*.mlp.fc2'"
    return None


def fp8_modules(c: Config) -> str | None:
    """Recipes of some linears: well formed, and possible."""
    try:
        chosen = module_recipes(c.fp8.fp8_module_recipes, RECIPES)
    except ValueError as error:
        return str(error)
    for entry in chosen:
        if entry.fp8_format == "hybrid" and not RECIPES[entry.recipe].hybrid:
            return f"{entry.text}: {entry.recipe} takes e4m3 only; leave ':hybrid' out"
    return None


def fp8_backend(c: Config) -> str | None:
    if c.train.device == "cpu" and c.fp8.fp8_gemm_backend in ("triton", "cublaslt"):
        return f"--fp8-gemm-backend {c.fp8.fp8_gemm_backend} needs a GPU, not --device cpu; use auto or reference"
    if c.fp8.fp8_fast_accumulation and c.train.device == "cpu":
        return "--fp8-fast-accumulation is about a GPU's tensor cores, not --device cpu; leave it out"
    if c.fp8.fp8_fast_accumulation and c.fp8.fp8_gemm_backend == "reference":
        return "--fp8-fast-accumulation is not for --fp8-gemm-backend reference, which is exact; leave one out"
    if c.fp8.fp8_param_gather and not c.optimizer.use_distributed_optimizer:
        return "--fp8-param-gather needs --use-distributed-optimizer; add it"
    return None


def fp8_watching(c: Config) -> str | None:
    """Statistics must go somewhere, and fallbacks need something to go by."""
    f, shown = c.fp8, f"--fp8-monitor-interval {c.fp8.fp8_monitor_interval}"
    if f.fp8_fallback_sqnr is not None and not f.fp8_monitor_interval:
        return f"--fp8-fallback-sqnr {f.fp8_fallback_sqnr} needs --fp8-monitor-interval, which measures it; add it"
    nowhere = c.logging.log_dir is None and c.logging.tensorboard_dir is None and f.fp8_fallback_sqnr is None
    if f.fp8_monitor_interval and nowhere:
        return f"{shown} writes into --log-dir or --tensorboard-dir; give one"
    if f.fp8_fallback_for and f.fp8_fallback_after is None and f.fp8_fallback_sqnr is None:
        return f"--fp8-fallback-for {f.fp8_fallback_for} needs --fp8-fallback-after or --fp8-fallback-sqnr; add one"
    if f.fp8_forget_fallbacks and c.checkpoint.load is None:
        return "--fp8-forget-fallbacks is about a checkpoint; give --load"
    return None
