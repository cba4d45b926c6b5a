"""What `--dry-run` prints: configuration, modules with their precision, parameters, memory, FLOPs."""

from __future__ import annotations

import re
from collections.abc import Iterable

from megafp8.config import Config, with_vocab_size
from megafp8.config.batch_size import BatchSize
from megafp8.config.config import GROUPS, field_table, flag_of, has_flag
from megafp8.config.crossover import why
from megafp8.config.pipeline import pipeline_stages, stages_of_rank
from megafp8.data import build_tokenizer
from megafp8.fp8 import Recipe, policy
from megafp8.plan.activations import by_module
from megafp8.plan.flops import attention_flops_per_token, linear_flops_per_token, training_flops_per_token
from megafp8.plan.memory import GIB, MIB, MemoryPlan, plan_stages
from megafp8.plan.shapes import LinearShape, ParameterShape, active_parameter_count, linears, parameters

LATER = ("activations", "temporaries")
"""Owners with lines of their own below the others."""
EXPERT, LAYER = r"(.*\.experts\.)(\d+)(\..*)", r"(layers\.|mtp\.)(\d+)(\..*)"


def dry_run(config: Config) -> str:
    """Returns the whole report of a configuration, as text.

    Only the tokenizer is loaded, for the size of the vocabulary; the model is not built.

    Raises:
        ValueError: the tokenizer can't be loaded, or a pattern of `--keep-modules-in-bf16` matches nothing.
    """
    config = with_vocab_size(config, build_tokenizer(config.data).vocab_size)
    sections = {
        "configuration (* given, + derived)": configuration_lines(config),
        "notes": list(config.notes) or ["none"],
        "modules": module_lines(config),
        "pipeline stages": stage_lines(config),
        "parameters": parameter_lines(config),
        "memory of one rank (estimate)": memory_lines(config),
        "work": work_lines(config),
    }
    return "\n".join(f"== {title}\n" + "\n".join(lines) + "\n" for title, lines in sections.items() if lines)


def configuration_lines(config: Config) -> list[str]:
    """Returns a line per field, by group: `*` marks flags that were given, `+` other values than the defaults."""
    lines = []
    for group in GROUPS:
        lines.append(f"[{group}]")
        for section, name, value in config.items():
            if section == group:
                mark = "*" if config.is_given(name) else "+" if value != field_table()[name][1].default else " "
                label = flag_of(name).removeprefix("--") if has_flag(name) else f"({name})"
                lines.append(f" {mark} {label:<42} {_shown(name, value)}")
    return lines


def module_lines(config: Config) -> list[str]:
    """Returns a line per linear, layers that are alike together, with its shape and precision (CASES 74)."""
    high = "bf16" if config.train.bf16 else "fp32"
    found = linears(config)
    rows = [(linear.name, _describe(linear, high)) for linear in found]
    lines = [f"{'embedding.word_embeddings':<38} {high}"]
    lines.extend(f"{name:<38} {text}" for name, text in _merge(_merge(rows, EXPERT), LAYER))
    covered = sum(linear.recipe is not None for linear in found)
    lines.append(f"{covered} of {len(found)} linears run in FP8; norms, attention and the loss run in {high} or fp32")
    return lines + small_linear_lines(config)


def small_linear_lines(config: Config) -> list[str]:
    """Returns a line per part of a layer that stays in BF16 because FP8 doesn't pay at its size."""
    recipe_of = policy.from_config(config)
    for linear in linears(config):
        recipe_of(linear.name)
    return [why(config, part) for part in config.fp8.small_linears_in_bf16
            if any(name.endswith(f".{part}") for name in recipe_of.small)]  # fmt: skip


def stage_lines(config: Config) -> list[str]:
    """Returns what each pipeline rank holds; nothing without a pipeline."""
    size = config.parallel.pipeline_model_parallel_size
    if size == 1:
        return []
    stages = pipeline_stages(config.model, config.parallel)
    ranks = ("; ".join(map(str, stages_of_rank(stages, size, rank))) for rank in range(size))
    lines = [f"rank {rank:<4} {held}" for rank, held in enumerate(ranks)]
    return [*lines, f"schedule {config.parallel.pipeline_schedule}; tools/plan.py schedule draws it"]


def parameter_lines(config: Config) -> list[str]:
    """Returns the number of parameters by part, and in all."""
    found = parameters(config)
    last = f"layers.{config.model.num_layers - 1}."
    parts = {
        "embedding": [p for p in found if p.name.startswith("embedding.")],
        "first layer": [p for p in found if p.name.startswith("layers.0.")],
        "last layer": [p for p in found if p.name.startswith(last)],
        f"{config.model.num_layers} layers": [p for p in found if p.name.startswith("layers.")],
        "multi-token prediction": [p for p in found if p.name.startswith("mtp.")],
        "final norm": [p for p in found if p.name.startswith("final_norm.")],
        "LM head": [p for p in found if p.name.startswith("lm_head.")],
    }
    lines = [f"{label:<22} {_count(items):>18,}" for label, items in parts.items() if items or label == "LM head"]
    if config.model.num_experts is not None:
        lines.append(f"{'used by one token':<22} {active_parameter_count(config):>18,}")
    padding = sum(p.numel - p.unpadded_numel for p in found)
    lines.append(f"{'total':<22} {_count(found):>18,}  ({_in_words(_count(found))})")
    lines.append(
        f"{'vocabulary padding':<22} {padding:>18,}  "
        f"({config.model.unpadded_vocab_size:,} tokens in {config.model.padded_vocab_size:,} rows)"
    )
    return lines


def _in_words(count: int) -> str:
    return f"{count / 1e9:.3f} billion" if count >= 1e8 else f"{count / 1e6:.3f} million"


def memory_lines(config: Config, plans: list[MemoryPlan] | None = None) -> list[str]:
    """Returns the table of a rank's memory, in MiB: in a pipeline of all stages, then of the one that needs most."""
    plans = plan_stages(config) if plans is None else plans
    stage = max(range(len(plans)), key=lambda number: plans[number].total)
    lines = stage_memory_lines(plans) + [f"stage {stage}, the largest:"] if len(plans) > 1 else []
    return lines + _owner_lines(config, plans[stage])


def stage_memory_lines(plans: list[MemoryPlan]) -> list[str]:
    """Returns a line for each pipeline rank, in GiB. held: pairs of microbatch and virtual stage in flight."""
    lines = [f"{'stage':>5}{'weights':>10}{'grads':>9}{'optimizer':>11}{'copies':>9}{'activations':>13}{'held':>6}"
             f"{'temporary':>11}{'total GiB':>11}"]  # fmt: skip
    for number, p in enumerate(plans):
        parts = [p.weights, p.main_grads, p.masters + p.moments, p.fp8_copies, p.in_flight]
        w, g, o, c, a, t = (size / GIB for size in (*parts, p.extra.bytes + p.messages + p.workspaces))
        total = p.total / GIB
        lines.append(f"{number:>5}{w:>10.2f}{g:>9.2f}{o:>11.2f}{c:>9.2f}{a:>13.2f}{p.pairs:>6}{t:>11.2f}{total:>11.2f}")
    return lines


def _owner_lines(config: Config, plan: MemoryPlan) -> list[str]:
    tokens = config.train.micro_batch_size * config.data.seq_length
    lines = [_row(label, size) for label, size in plan.owners.items() if size and label not in LATER]
    lines.append(f"activations of one microbatch ({tokens:,} tokens):")
    lines += [_row(f"  {a.module}: {a.what}", a.bytes) for a in by_module(plan.activations) if a.bytes]
    shown = "" if plan.pairs == 1 else f", {plan.pairs} microbatches x stages"
    lines.append(_row(f"held at the peak{shown}", plan.in_flight))
    lines.append(_row(f"largest short-lived: {plan.extra.what}", plan.extra.bytes))
    lines.append(_row("total", plan.total))
    lines.append("not counted: the CUDA context, NCCL's buffers, fragmentation")
    return lines


def work_lines(config: Config) -> list[str]:
    """Returns tokens and FLOPs of the run."""
    train, length = config.train, config.data.seq_length
    iterations = train.train_iters
    if iterations is None and train.train_samples is not None:
        iterations = BatchSize.of(train).iterations(train.train_samples)
    step_tokens = train.global_batch_size * length
    micro = train.global_batch_size // (train.micro_batch_size * config.parallel.data_parallel_size)
    flops = training_flops_per_token(config)
    forward = linear_flops_per_token(config) + attention_flops_per_token(config)
    share = attention_flops_per_token(config) / forward
    lines = [
        f"{step_tokens:,} tokens an iteration, in {micro} microbatch(es) a rank",
        f"{flops / 1e9:.4g} GFLOP a token, forward and backward ({share:.1%} causal attention)",
    ]
    if iterations is not None:
        tokens = BatchSize.of(train).samples_of(iterations) * length
        lines.append(f"{iterations:,} iterations: {tokens:,} tokens, {tokens * flops:.3e} FLOP")
    return lines


def _merge(rows: Iterable[tuple[str, str]], pattern: str) -> list[tuple[str, str]]:
    """Joins (name, text) rows that say the same where names differ in one number only, and it counts up.

    pattern: of names with that number, whose groups are what comes before it, the number, and what comes after.
    """
    merged: list[list[str]] = []
    last: dict[tuple[str, str, str], tuple[list[str], int, int]] = {}  # -> row, its first and last number
    for name, text in rows:
        match = re.fullmatch(pattern, name)
        before, number, after = match.groups() if match else (name, "", "")
        row, first, previous = last.get((before, after, text), (None, 0, 0))
        if match and row is not None and int(number) == previous + 1:
            row[0] = f"{before}{first}-{number}{after}"
        else:
            row, first = [name, text], int(number or 0)
            merged.append(row)
        if match:
            last[before, after, text] = row, first, int(number)
    return [(name, text) for name, text in merged]


def _describe(linear: LinearShape, high: str) -> str:
    shape = f"[{linear.out_features}, {linear.in_features}]"
    return f"{shape:<18} {high if linear.recipe is None else describe_recipe(linear.recipe)}"


def describe_recipe(recipe: Recipe) -> str:
    """Returns a recipe in words: each role's number format and tile, and the kind of scales."""
    roles = []
    for role in ("input", "weight", "grad_output"):
        spec = recipe.quantizer(role).spec
        block = spec.tile.block
        tile = {"tensor": "tensor", "1d": f"1x{block}", "2d": f"{block}x{block}"}[spec.tile.kind]
        roles.append(f"{role} {spec.format.name} {tile}")
    scales = recipe.quantizer("weight").spec.scale.value
    fast = "; fast accumulation in fprop" if recipe.fast_accumulation else ""
    return f"fp8 {recipe.name}: {', '.join(roles)}; {scales} scales{fast}"


def _count(items: Iterable[ParameterShape]) -> int:
    return sum(p.unpadded_numel for p in items)


def _row(label: str, size: int) -> str:
    return f"{label:<52} {size / MIB:>14,.1f} MiB"


def _shown(name: str, value: object) -> str:
    """A value as the flag means it: a switch that stores False is shown by whether it was given."""
    if isinstance(value, bool) and field_table()[name][1].default is True:
        return str(not value)
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
