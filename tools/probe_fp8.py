#!/usr/bin/env python3
"""Which linears of a trained model bear FP8, under which recipe, and which flags keep a loss budget.

    tools/probe_fp8.py --load runs/quickstart/checkpoints --data-path runs/quickstart/data_text_document \\
        --split 90,10,0 --output runs/quickstart/probe --budget 0.0025

Each linear alone (of experts all of a layer's together) is computed as each recipe would, all three operands and one at
a time; what that does to the loss, to its output and to the gradient goes into a ranked table and a heat map. An
outlier test multiplies one input channel by 1000. At last the whole model runs in FP8, and linears go back to BF16, the
worst first, until the loss is within --budget: `flags.json` is that configuration, for `pretrain_gpt.py --config`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from evaluate import add_load_and_data, open_sets

from megafp8.config.tool_parser import ToolParser

OUTLIER, WORSE = 1000.0, 1.05
MENDS = {  # flags that may help against an outlier channel -> recipe and its axes
    "--fp8-recipe blockwise": ("blockwise", {"fp8_format": "e4m3"}),
    "--fp8-recipe mxfp8": ("mxfp8", {"fp8_format": "e4m3"}),
    "--fp8-input-format e5m2": ("tensorwise", {"input_format": "e5m2", "grad_format": "e4m3"}),
}


def build_parser() -> argparse.ArgumentParser:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_load_and_data(parser, "a data set, read from its beginning")
    parser.add_argument("--names", nargs="+", metavar="NAME", help=argparse.SUPPRESS)
    parser.add_argument("--micro-batch-size", type=int, default=4, metavar="N", help="samples at once (default: 4)")
    parser.add_argument("--batches", type=int, default=4, metavar="N", help="microbatches to measure on (default: 4)")
    parser.add_argument(
        "--recipes", nargs="+", default=["tensorwise", "blockwise", "mxfp8", "delayed"], metavar="NAME",
        help="recipes to probe; flags.json prefers the first ones (default: tensorwise blockwise mxfp8 delayed)",
    )  # fmt: skip
    parser.add_argument("--budget", type=float, default=0.0025, metavar="X", help="relative loss gap (default: 0.0025)")
    parser.add_argument("--top", type=int, default=25, metavar="N", help="rows of the table that are printed")
    parser.add_argument("--tokenizer-model", metavar="PATH", help="where the tokenizer lies now, if it has moved")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: auto")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory for what is written")
    return parser


def read_batches(trained, args) -> list:
    """The first microbatches of the validation data, on the device. ValueError when there are too few samples."""
    from megafp8.data import build_loader

    sets, masks = open_sets(args, trained)
    loader = build_loader(
        next(iter(sets.values())),
        masks,
        seq_length=trained.config.data.seq_length,
        micro_batch_size=args.micro_batch_size,
        drop_last=False,
    )
    batches = [batch.to(trained.device) for _, batch in zip(range(args.batches), loader, strict=False)]
    if len(batches) < args.batches:
        raise ValueError(f"--batches {args.batches}: the data has only {len(batches)}; give fewer, or more data")
    return batches


def probe_linears(probe, recipes: dict) -> list[dict]:
    """A row a unit, recipe and role."""
    from tqdm import tqdm

    from megafp8.fp8.recipe import ROLES

    rows, work = [], [(r, u) for r in recipes for u in probe.units if probe.covers(recipes[r], u) and u in probe.called]
    for recipe, linear in tqdm(work, unit="linear", disable=not sys.stderr.isatty(), leave=False):
        for role in ("all", *ROLES):
            effect = probe.measure({linear: recipes[recipe]}, None if role == "all" else (role,))
            rows.append(
                {
                    "linear": linear,
                    "recipe": recipe,
                    "role": role,
                    "loss_change": effect.loss / probe.base.loss - 1,
                    "output_error": effect.output_error,
                    "cosine": effect.cosine,
                }
            )
    return rows


def probe_outliers(probe, recipes: dict) -> list[dict]:
    """A row a recipe: the output's error without and with an outlier channel, where it hurts most, and a mend."""
    from megafp8.fp8 import get_recipe
    from megafp8.training.probe import outlier_error

    candidates = {flag: get_recipe(name, **axes) for flag, (name, axes) in MENDS.items()}
    inputs, rows = {linear: x for linear, x in probe.inputs().items() if len(x)}, []  # an expert may have no rows
    for name, recipe in recipes.items():
        errors = {}
        for linear, x in inputs.items():
            weight = probe.linears[linear].weight.detach()
            errors[linear] = tuple(outlier_error(x, weight, recipe, factor) for factor in (1.0, OUTLIER))
        worst = max(errors, key=lambda linear: errors[linear][1] / max(errors[linear][0], 1e-9))
        plain, spoilt = errors[worst]
        x, weight = inputs[worst], probe.linears[worst].weight.detach()
        mended = {flag: outlier_error(x, weight, other, OUTLIER) for flag, other in candidates.items()}
        best, mend, rest = min(mended, key=mended.get), None, spoilt
        if spoilt > WORSE * plain:
            helps = mended[best] < spoilt / WORSE
            mend, rest = (best, mended[best]) if helps else (f"--keep-modules-in-bf16 {worst}", 0.0)
        rows.append({"recipe": name, "linear": worst, "plain": plain, "outlier": spoilt, "mend": mend, "mended": rest})
    return rows


def choose(probe, recipes: dict, rows: list[dict], budget: float, config) -> list[dict]:
    """A row a recipe: which linears have to stay in BF16, which do since FP8 would slow them down in a run of `config`,
    and the gap that is left; the best choice first."""
    from megafp8.config.crossover import is_small, with_small_linears
    from megafp8.training.probe import keep_within
    from megafp8.training.probe_report import FLAGS, harm

    found = []
    for name, recipe in recipes.items():
        own = sorted((r for r in rows if r["recipe"] == name and r["role"] == "all"), key=harm, reverse=True)
        runs = with_small_linears(config.replace(**FLAGS[name]))
        small = [unit for unit in probe.units if is_small(runs, unit)]
        kept, gap = keep_within(probe, recipe, [row["linear"] for row in own], budget, small)
        found.append({"recipe": name, "kept": kept, "small": small, "gap": gap, "met": abs(gap) <= budget})
    return sorted(found, key=lambda row: (not row["met"], len(row["kept"])))


def report(args, trained, probe, recipes: dict) -> dict:
    """Measures, prints and writes everything; returns what goes into probe.json."""
    from megafp8.training import probe_report

    rows = probe_linears(probe, recipes)
    print(f"loss in high precision: {probe.base.loss:.6f} over {args.batches} microbatches\n")
    print(probe_report.table(rows, args.top))
    outliers = probe_outliers(probe, recipes)
    print(f"\none input channel x {OUTLIER:g}, error of all the others:\n{probe_report.outlier_table(outliers)}")
    choices = choose(probe, recipes, rows, args.budget, trained.config)
    print(f"\nthe whole model, budget {args.budget:.3%}:")
    for choice in choices:
        kept = ", ".join(map(probe.pattern, choice["kept"])) or "nothing"
        kept += f"; {len(choice['small'])} too small for FP8" if choice["small"] else ""
        missed = "" if choice["met"] else "  (missed)"
        print(f"  {choice['recipe']:10}  gap {choice['gap']:+.4%}  in BF16: {kept}{missed}")
    probe_report.heat_map(rows, args.output / "heatmap.png")
    best = choices[0]
    kept = [probe.pattern(unit) for unit in best["kept"]]
    given, small = dict(trained.config.to_dict()["given"]), trained.config.fp8.fp8_small_linears
    flags = probe_report.flags_file(given, best["recipe"], kept, small)
    (args.output / "flags.json").write_text(flags)
    print(f"\nwritten to {args.output}: probe.json, heatmap.png, flags.json ({best['recipe']})")
    if silent := sorted(probe.units.keys() - probe.called):
        print(f"note: not probed, since they did not compute: {', '.join(silent)}")
    return {"base_loss": probe.base.loss, "budget": args.budget, "rows": rows, "outliers": outliers, "choices": choices}


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        from megafp8.fp8 import get_recipe
        from megafp8.training.build import pick_device
        from megafp8.training.inference import load_trained
        from megafp8.training.probe import Probe
        from megafp8.training.probe_report import FLAGS

        if unknown := [name for name in args.recipes if name not in FLAGS]:
            raise ValueError(f"--recipes {unknown[0]}: no such recipe; use {', '.join(FLAGS)}")
        if args.batches < 1 or not args.budget >= 0:
            raise ValueError("--batches: give 1 or more; --budget: give 0 or more")
        try:
            args.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--output {args.output}: {error.strerror}; name a directory") from None
        recipes = {name: get_recipe(name, fp8_format=FLAGS[name]["fp8_format"]) for name in args.recipes}
        device = pick_device(args.device)
        trained = load_trained(args.load, device, step=args.ckpt_step, tokenizer_model=args.tokenizer_model)
        probe = Probe(trained.model, read_batches(trained, args), recipes.values())
        found = report(args, trained, probe, recipes)
    except ValueError as error:
        print(f"probe_fp8.py: error: {error}", file=sys.stderr)
        return 2
    (args.output / "probe.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0 if found["choices"][0]["met"] else 1


if __name__ == "__main__":
    sys.exit(main())
