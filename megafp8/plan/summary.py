"""What `--dry-run` prints: configuration, modules with their precision, parameters, memory, FLOPs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megafp8.config import Config, with_vocab_size
from megafp8.config.config import GROUPS, field_table, flag_of, has_flag
from megafp8.data import build_tokenizer
from megafp8.fp8 import Recipe
from megafp8.plan.activations import by_module
from megafp8.plan.flops import attention_flops_per_token, linear_flops_per_token, training_flops_per_token
from megafp8.plan.memory import MemoryPlan, plan_memory
from megafp8.plan.shapes import LinearShape, ParameterShape, linears, parameters

MIB = 1 << 20


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
        "parameters": parameter_lines(config),
        "memory of one rank (estimate)": memory_lines(config),
        "work": work_lines(config),
    }
    return "\n".join(f"== {title}\n" + "\n".join(lines) + "\n" for title, lines in sections.items())


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
    rows = [_Row(*_split_name(linear.name), _describe(linear, high)) for linear in linears(config)]
    lines = [f"{'embedding.word_embeddings':<34} {high}"]
    lines.extend(f"{row.name:<34} {row.text}" for row in _merge(rows))
    covered = sum(linear.recipe is not None for linear in linears(config))
    lines.append(f"{covered} of {len(rows)} linears run in FP8; norms, attention and the loss run in {high} or fp32")
    return lines


def parameter_lines(config: Config) -> list[str]:
    """Returns the number of parameters by part, and in all."""
    found = parameters(config)
    parts = {
        "embedding": [p for p in found if p.name.startswith("embedding.")],
        "one layer": [p for p in found if p.name.startswith("layers.0.")],
        f"{config.model.num_layers} layers": [p for p in found if p.name.startswith("layers.")],
        "final norm": [p for p in found if p.name.startswith("final_norm.")],
        "LM head": [p for p in found if p.name.startswith("lm_head.")],
    }
    lines = [f"{label:<22} {_count(items):>18,}" for label, items in parts.items()]
    padding = sum(p.numel - p.unpadded_numel for p in found)
    lines.append(f"{'total':<22} {_count(found):>18,}  ({_count(found) / 1e9:.3f} billion)")
    lines.append(
        f"{'vocabulary padding':<22} {padding:>18,}  "
        f"({config.model.unpadded_vocab_size:,} tokens in {config.model.padded_vocab_size:,} rows)"
    )
    return lines


def memory_lines(config: Config, plan: MemoryPlan | None = None) -> list[str]:
    """Returns the table of a rank's memory, in MiB."""
    plan = plan_memory(config) if plan is None else plan
    static = {
        "weights": plan.weights,
        "main gradients (fp32)": plan.main_grads,
        "master weights (fp32)": plan.masters,
        "Adam moments (fp32)": plan.moments,
        "FP8 copies of weights": plan.fp8_copies,
    }
    lines = [_row(label, value) for label, value in static.items()]
    tokens = config.train.micro_batch_size * config.data.seq_length
    lines.append(f"activations of one microbatch ({tokens:,} tokens):")
    for item in by_module(plan.activations):
        lines.append(_row(f"  {item.module}: {item.what}", item.bytes))
    lines.append(_row(f"largest short-lived: {plan.extra.what}", plan.extra.bytes))
    lines.append(_row("total", plan.total))
    lines.append("not counted: libraries' workspaces, fragmentation, the CUDA context")
    return lines


def work_lines(config: Config) -> list[str]:
    """Returns tokens and FLOPs of the run."""
    train, length = config.train, config.data.seq_length
    iterations = train.train_iters
    if iterations is None and train.train_samples is not None:
        iterations = train.train_samples // train.global_batch_size
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
        tokens = iterations * step_tokens
        lines.append(f"{iterations:,} iterations: {tokens:,} tokens, {tokens * flops:.3e} FLOP")
    return lines


@dataclass
class _Row:
    """A line of the module list: a name with or without a layer number (`first` to `last`), and its text."""

    before: str
    layer: int | None
    after: str
    text: str
    last: int | None = None

    @property
    def name(self) -> str:
        if self.layer is None:
            return self.before
        numbers = str(self.layer) if self.last in (None, self.layer) else f"{self.layer}-{self.last}"
        return f"{self.before}.{numbers}.{self.after}"


def _split_name(name: str) -> tuple[str, int | None, str]:
    head, _, rest = name.partition(".")
    number, _, tail = rest.partition(".")
    return (head, int(number), tail) if number.isdigit() else (name, None, "")


def _merge(rows: Iterable[_Row]) -> list[_Row]:
    """Joins rows of consecutive layers that say the same."""
    merged: list[_Row] = []
    for row in rows:
        same = [r for r in merged if (r.before, r.after, r.text) == (row.before, row.after, row.text)]
        if same and row.layer is not None and row.layer == (same[-1].last or same[-1].layer) + 1:
            same[-1].last = row.layer
        else:
            merged.append(row)
    return merged


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
    return f"fp8 {recipe.name}: {', '.join(roles)}; {scales} scales"


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
