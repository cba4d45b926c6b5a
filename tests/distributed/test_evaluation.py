"""tools/evaluate.py on several processes: the numbers of one."""

from __future__ import annotations

import json
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

from tests.training.runs import RECIPES, flags, run, write_corpus


def evaluated(argv: list[str]) -> int:
    import torch

    from tools import evaluate

    torch.set_num_threads(1)
    return evaluate.main(argv)


def mistaken(argv: list[str]) -> tuple[int, str]:
    with redirect_stderr(StringIO()) as err:
        return evaluated(argv), err.getvalue()


def says(line: str, ranks: tuple[int, ...], joined: bool) -> str:
    """What a rank says of a mistake that `ranks` make; joined: while they are in a job."""
    import os

    from megafp8.config.mistakes import say_mistake
    from megafp8.parallel import abandon_parallel

    if not joined:
        abandon_parallel()
    with redirect_stderr(StringIO()) as err:
        if int(os.environ["RANK"]) in ranks:
            say_mistake(line)
    return err.getvalue()


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


def test_a_mistake_of_all_ranks_is_told_once(pool, tmp_path):
    prefix = write_corpus(tmp_path)
    saving = ("--save", str(tmp_path / "c"), "--eval-iters", "0", "--lr-warmup-iters", "0", "--train-iters", "1")
    assert run(*flags(prefix, *saving)) == 0
    argv = ["--load", str(tmp_path / "c"), "--data-path", str(prefix), "--device", "cpu"]
    for given, words in ((("--tensor-model-parallel-size", "3"), "3"), (("--split", "100,0,0"), "no documents")):
        codes, said = zip(*pool.run_on(2, mistaken, [*argv, *given]), strict=True)
        assert codes == (2, 2)
        assert sorted(map(bool, said)) == [False, True]
        assert words in "".join(said)
        assert "".join(said).count("\n") == 1


def test_who_tells_of_a_mistake(pool):
    """In a job the first that makes it; before, of flags and files, the first of the machine."""
    assert pool.run_on(3, says, "a line", (2,), True) == ["", "", "a line\n"]
    assert sorted(pool.run_on(3, says, "a line", (0, 1, 2), True)) == ["", "", "a line\n"]
    assert pool.run_on(3, says, "a line", (0, 1, 2), False) == ["a line\n", "", ""]
