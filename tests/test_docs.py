"""The README and docs/: links and anchors lead somewhere, named files and flags exist, every page can be reached, and
the code of docs/extending.md does what the page says."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from megafp8.checkpoint.hf.values import Values
from megafp8.config import build_config, with_vocab_size
from megafp8.config.parse import build_parser
from megafp8.core.pipeline.schedules import Action, Kind, Schedule, peak_microbatches, simulate
from megafp8.fp8 import gemm
from megafp8.fp8.recipe import Recipe
from megafp8.plan.shapes import parameters

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
OTHERS = {
    *("--nproc-per-node", "--max-restarts", "--nodes", "--local-dir", "--signal", "--append"),
    # torchrun, sbatch, hf, wandb
    *("--capture-range", "--capture-range-end", "--model", "--model_args", "--tasks", "--batch_size", "--include_path"),
    # nsys, lm_eval
}
"""Flags of other programs that the pages name."""
A_STEP_ON_PAPER = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "kv_channels": 32}


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(name: str) -> list[tuple[str, str]]:
    """(path from the repository's root, anchor) of a page's links into the repository."""
    found = []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(TEXTS[name])):
        if not target.startswith("https://"):
            path, _, anchor = target.partition("#")
            path = (ROOT / name).parent / path if path else ROOT / name
            found.append((path.resolve().relative_to(ROOT).as_posix(), anchor))
    return found


@pytest.mark.parametrize("name", TEXTS)
def test_links_and_anchors_resolve(name):
    for path, anchor in links(name):
        assert (ROOT / path).exists(), path
        assert not anchor or anchor in anchors(TEXTS[path]), f"{path}#{anchor}"


def test_every_page_is_reached_from_the_readme():
    reached, rest = set(), ["README.md"]
    while rest:
        name = rest.pop()
        if name not in reached and name in TEXTS:
            reached.add(name)
            rest += [path for path, _ in links(name)]
    assert set(TEXTS) - reached == set()


def named_files(text: str) -> set[str]:
    """Files of the repository that a text names, `*` and `{a,b}` written out as patterns."""
    folders, endings = "tools|examples|tests|megafp8|kernels", "py|sh|json|md|ipynb|toml"
    names = re.findall(rf"(?<![\w./{{}}-])((?:{folders})/[\w./*,{{}}-]*\.(?:{endings}))\b", text)
    return set(names)


def exists(name: str) -> bool:
    head, brace, rest = name.partition("{")
    if brace:
        options, _, tail = rest.partition("}")
        return all(exists(head + option + tail) for option in options.split(","))
    return any(ROOT.glob(name))


@pytest.mark.parametrize("name", TEXTS)
def test_named_files_exist(name):
    assert {file for file in named_files(TEXTS[name]) if not exists(file)} == set()


def flags_of_tools() -> set[str]:
    """First arguments of `add_argument`, or of what it was called for short, in the tools and what they share."""
    found = set()
    for path in [*(ROOT / "tools").glob("*.py"), *(ROOT / "megafp8").rglob("*.py")]:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "add_argument" in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("add_argument", "add"):
                texts = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
                found |= {text for text in texts if isinstance(text, str) and text.startswith("--")}
    return found


def test_named_flags_exist():
    known = set(build_parser()._option_string_actions) | flags_of_tools() | OTHERS
    unknown = {}
    for name, text in TEXTS.items():
        text = text.partition("\n## Wrong command lines\n")[0]  # it has mistakes, and tests of its own
        text = re.sub(r"--\w+(?:-\w+)*-\*|^.*\bpip install\b.*$", "", text, flags=re.MULTILINE)
        flags = set(re.findall(r"(?<![\w-])--[a-zA-Z][\w-]*(?<!-)", text))
        if strange := {flag for flag in flags if flag not in known}:
            unknown[name] = strange
    assert unknown == {}


def test_the_map_of_the_house_names_every_plan():
    text = TEXTS["docs/design.md"]
    text = re.sub(r"\{([\w,]+)\}(\w+)", lambda m: " ".join(f"{name}{m[2]}" for name in m[1].split(",")), text)
    named = set(re.findall(r"\w+", text))
    for folder in ("megafp8", "megafp8/plan"):
        assert {path.stem for path in (ROOT / folder).glob("[a-z]*.py")} - named == set(), folder


def test_cases_have_tests():
    """Every row of docs/cases.md is named by a test."""
    rows = set(re.findall(r"^\| (\d\d) \|", TEXTS["docs/cases.md"], re.MULTILINE))
    assert len(rows) > 50
    named = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for numbers in re.findall(r"CASES ((?:\d\d(?: \([^)]*\))?(?:,\s+| and )?)+)", path.read_text()):
            named |= set(re.findall(r"\b\d\d\b", numbers))
    assert rows - named == set()


# ------------------------------------------------------------------------------------------ docs/extending.md


def taught(title: str) -> str:
    """The Python of a section of docs/extending.md."""
    section = TEXTS["docs/extending.md"].partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return code


def test_the_taught_recipe_multiplies():
    names = {"dataclass": dataclass, "ClassVar": ClassVar, "Recipe": Recipe}
    exec(taught("A recipe"), names)
    recipe = names["Fine"]()
    x, w = torch.randn(37, 200), torch.randn(70, 200)
    a, b = recipe.quantizer("input").quantize(x).rowwise, recipe.quantizer("weight").quantize(w).rowwise
    expected = a.dequantize(torch.float64) @ b.dequantize(torch.float64).t()
    y = gemm.fprop(a, b, out_dtype=torch.float32).double()
    assert (y - expected).norm() < 1e-6 * expected.norm()
    assert a.scale_inv.shape == (37, 4)
    assert b.scale_inv.shape == (2, 4)


def test_the_taught_family_goes_there_and_back():
    names = {}
    exec(taught("A model family"), names)
    family = names["SEED_OSS"]
    values = {"micro_batch_size": 1, "train_iters": 1, "lr": 0.0, "mock_data": True, "vocab_size": 100}
    values |= {"tokenizer_type": "NullTokenizer", "seq_length": 8, "position_embedding_type": "rope"}
    values |= {"swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "add_qkv_bias": True}
    values |= {"untie_embeddings_and_output_weights": True, "max_position_embeddings": 8, "norm_epsilon": 1e-6}
    config = build_config(env={}, **(values | A_STEP_ON_PAPER))
    content = family.describe(config)
    assert (content["head_dim"], content["architectures"]) == (32, ["SeedOssForCausalLM"])
    with pytest.raises(ValueError, match="attention_out_bias"):
        family.to_args(Values(content | {"attention_out_bias": True}))
    for parameter in parameters(with_vocab_size(config, 100)):
        assert [rule.names(parameter.name, config.model) is not None for rule in family.rules].count(True) == 1


def test_the_taught_schedule_runs():
    names = {"Action": Action, "Kind": Kind}
    exec(taught("A pipeline schedule"), names)
    actions = names["_lazy"](2, 3)
    timeline = simulate(Schedule("lazy", 2, 2, 3, (actions,) * 2))
    assert timeline.bubble == 0.5
    assert peak_microbatches(actions) == 2  # one microbatch in two chunks
