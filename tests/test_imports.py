"""Imports run one way, and optional packages are imported where they are used.

config, parallel, params, step <- kernels <- fp8 <- core; optimizer, checkpoint and data on the side; only training,
plan, tools and pretrain_gpt.py import everything. Checked on the syntax trees of the whole repository.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# part -> parts of megafp8 that it may import, itself included by rule
ALLOWED = {
    "config": set(),
    "meter": set(),
    "parallel": {"config", "meter"},
    "lone": {"config", "meter", "parallel"},
    "params": {"parallel"},
    "step": {"params", "parallel"},
    "kernels": {"config", "parallel", "params", "step"},
    "fp8": {"config", "parallel", "params", "step", "kernels"},
    "core": {"config", "meter", "parallel", "params", "step", "kernels", "fp8"},
    "optimizer": {"config", "parallel", "params", "step", "kernels", "fp8"},
    "checkpoint": {"config", "parallel", "params"},
    "data": {"config", "parallel"},
}
EVERYTHING = {"training", "plan", "tools", "pretrain_gpt", "root"}
OPTIONAL = {
    *("datasets", "wandb", "matplotlib", "tiktoken", "tensorboard", "rich", "tqdm", "transformers", "pyarrow"),
    *("sentencepiece", "tokenizers", "ml_dtypes", "megatron"),
}


def sources() -> dict[Path, str]:
    """Every Python file of the project -> the part it belongs to."""
    found = {}
    for path in (ROOT / "megafp8").rglob("*.py"):
        inside = path.relative_to(ROOT / "megafp8").with_suffix("").parts
        found[path] = "root" if inside == ("__init__",) else inside[0]
    for folder in ("kernels", "tools"):
        found |= dict.fromkeys((ROOT / folder).rglob("*.py"), folder)
    if (ROOT / "pretrain_gpt.py").exists():
        found[ROOT / "pretrain_gpt.py"] = "pretrain_gpt"
    return found


SOURCES = sources()


def package_of(path: Path) -> list[str]:
    """The package a module lies in, as its relative imports see it."""
    parts = list(path.relative_to(ROOT).parts[:-1])
    return ["megafp8", *parts] if parts[:1] == ["kernels"] else parts


def imported(path: Path, tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields the dotted name of everything that a tree imports, with its node."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom):
            base = package_of(path)[: len(package_of(path)) - node.level + 1] if node.level else []
            module = ".".join([*base, *((node.module or "").split(".") if node.module else [])])
            for alias in node.names:
                yield f"{module}.{alias.name}", node


def at_module_level(tree: ast.Module) -> ast.Module:
    """The tree without the bodies of functions, whose imports wait until they are called, and of TYPE_CHECKING."""

    class Strip(ast.NodeTransformer):
        def visit_FunctionDef(self, node):  # noqa: N802
            return None

        visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

        def visit_If(self, node):  # noqa: N802
            if "TYPE_CHECKING" in ast.unparse(node.test):
                return None
            return self.generic_visit(node)

    return Strip().visit(tree)


def forbidden_parts(path: Path, part: str, text: str) -> list[str]:
    """The imports of a file that go against the direction, wherever they stand in it."""
    if part in EVERYTHING:
        return []
    return [
        f"line {node.lineno}: {name}"
        for name, node in imported(path, ast.parse(text))
        if name.startswith("megafp8.") and name.split(".")[1] not in ALLOWED[part] | {part, "__version__"}
    ]


def optional_at_import(path: Path, text: str) -> list[str]:
    """The optional packages that importing a file would import."""
    tree = at_module_level(ast.parse(text))
    return [f"line {node.lineno}: {name}" for name, node in imported(path, tree) if name.split(".")[0] in OPTIONAL]


def ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_imports_run_one_way(path):
    part = SOURCES[path]
    assert part in ALLOWED or part in EVERYTHING, f"{ids(path)}: a new part of megafp8; say here what it may import"
    assert forbidden_parts(path, part, path.read_text()) == []


@pytest.mark.parametrize("path", SOURCES, ids=ids)
def test_optional_packages_are_imported_where_used(path):
    assert optional_at_import(path, path.read_text()) == []


def test_there_is_something_to_check():
    assert {"config", "fp8", "core", "optimizer", "data", "kernels"} <= set(SOURCES.values())


@pytest.mark.parametrize(
    ("file", "text", "found"),
    [
        ("megafp8/config/x.py", "import megafp8.fp8.recipe", True),
        ("megafp8/config/x.py", "def f():\n    from megafp8.fp8 import get_recipe", True),
        ("megafp8/config/x.py", "from ..fp8 import get_recipe", True),
        ("megafp8/config/x.py", "from .. import fp8", True),
        ("megafp8/config/x.py", "from megafp8 import fp8", True),
        ("megafp8/config/x.py", "from .flags import flag", False),
        ("megafp8/fp8/x.py", "from megafp8.core.gpt import GPTModel", True),
        ("megafp8/fp8/x.py", "from megafp8.kernels.quantize import f", False),
        ("kernels/x.py", "from megafp8.fp8 import get_recipe", True),
        ("kernels/x.py", "from .quantize import f", False),
        ("megafp8/data/x.py", "from megafp8.core import gpt", True),
        ("megafp8/training/x.py", "from megafp8.core import gpt", False),
    ],
)
def test_the_direction_test_sees_what_it_should(file, text, found):
    path = ROOT / file
    part = path.parent.name
    assert bool(forbidden_parts(path, part, text)) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import tqdm", True),
        ("from tqdm.auto import tqdm", True),
        ("try:\n    import rich\nexcept ImportError:\n    rich = None", True),
        ("class A:\n    import pyarrow", True),
        ("def f():\n    import datasets", False),
        ("class A:\n    def f(self):\n        import datasets", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers", False),
        ("import torch", False),
    ],
)
def test_the_optional_test_sees_what_it_should(text, found):
    assert bool(optional_at_import(ROOT / "megafp8" / "x.py", text)) == found
