"""tools/evaluate.py on several processes: the numbers of one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training.runs import RECIPES, flags, run, write_corpus


def evaluated(argv: list[str]) -> int:
    import torch

    from tools import evaluate

    torch.set_num_threads(1)
    return evaluate.main(argv)


def evaluate_on(pool, world: int, argv: list[str], output: Path, *extra: str) -> dict:
    assert pool.run_on(world, evaluated, [*argv, "--output", str(output), *extra]) == [0] * world
    return json.loads(output.read_text())


@pytest.mark.parametrize("recipe", ["bf16", "tensorwise"])
def test_numbers_do_not_depend_on_the_processes(pool, tmp_path, recipe):
    """Data-parallel ranks run one process's microbatches: the same to 1e-12, the short last ones too. Layouts that
    cut the model round differently."""
    prefix = write_corpus(tmp_path)
    saving = ("--save", str(tmp_path / "c"), "--eval-iters", "0", "--lr-warmup-iters", "0")
    assert run(*flags(prefix, *RECIPES[recipe], *saving, "--train-iters", "2")) == 0
    sets = ["--valid-data-path", f"a={prefix}", f"b={prefix}"]
    argv = ["--load", str(tmp_path / "c"), *sets, "--micro-batch-size", "3", "--max-samples", "23", "--device", "cpu"]
    one = evaluate_on(pool, 1, argv, tmp_path / "1.json")
    assert one["a"] == one["b"]
    assert one["a"]["tokens"] == 23 * 32
    for world in (2, 4):
        assert evaluate_on(pool, world, argv, tmp_path / f"{world}.json") == {
            name: pytest.approx(numbers, rel=1e-12, abs=0) for name, numbers in one.items()
        }
    layouts = {"tp": ("--tensor-model-parallel-size", "2"), "pp": ("--pipeline-model-parallel-size", "2")}
    if recipe == "bf16":
        for name, layout in layouts.items():
            cut = evaluate_on(pool, 4, argv, tmp_path / f"{name}.json", *layout)
            assert cut == {name: pytest.approx(numbers, rel=1e-3) for name, numbers in one.items()}
            assert cut["a"]["bytes"] == one["a"]["bytes"]
