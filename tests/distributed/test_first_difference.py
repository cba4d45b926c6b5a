"""tools/first_difference.py: layouts leave the same trace, and a fault is named where it begins."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import first_difference
import pytest

from megafp8.fp8 import Linear
from tests.distributed.test_training import TP_DP
from tests.training.runs import flags, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def record(output: str, argv: list[str], broken: str | None = None) -> int:
    """`broken`: a linear whose output is a quarter of a per cent too large."""
    original = Linear.forward

    def forward(self, x, step=None):
        y = original(self, x, step)
        return y * 1.0025 if self.name == broken else y

    with mock.patch.object(Linear, "forward", forward):
        return first_difference.main(["record", output, "--steps", "2", "--", *argv])


def compare(capsys, *args: str) -> tuple[int, str]:
    code = first_difference.main(["compare", *map(str, args)])
    return code, capsys.readouterr().out


def test_layouts_are_told_apart_from_faults(pool, corpus, tmp_path, capsys):
    one, again, four, broken = (tmp_path / f"{name}.json" for name in ("one", "again", "four", "broken"))
    argv = flags(corpus, "--qk-layernorm", "--lr", "1e-4", "--global-batch-size", "8")
    for output in (one, again):
        assert pool.run_on(1, record, str(output), argv) == [0]
    assert pool.run_on(4, record, str(four), [*argv, *TP_DP]) == [0] * 4
    assert pool.run_on(2, record, str(broken), [*argv, *TP_DP], "layers.1.mlp.fc1") == [0] * 2
    assert compare(capsys, one, again) == (0, "every tensor has the same bits in both\n")
    code, text = compare(capsys, one, four)
    assert code == 0
    assert "this is rounding" in text
    code, text = compare(capsys, one, broken)
    assert code == 1
    assert "another norm: step 1: output of layers.1.mlp.fc1\n" in text
    assert "2.5e-03 of it" in text
    names = {json.loads(line)["name"] for line in one.read_text().splitlines()}
    assert {"embedding.word_embeddings", "layers.0.attention.q_norm", "lm_head", "layers.1.mlp.fc2.weight"} <= names


def test_mistakes_are_told(corpus, tmp_path, capsys):
    (tmp_path / "empty.json").write_text("")
    assert first_difference.main(["compare", str(tmp_path / "empty.json"), str(tmp_path / "none.json")]) == 2
    assert "no trace there" in capsys.readouterr().err
    recompute = flags(corpus, "--recompute-granularity", "full")
    assert first_difference.main(["record", str(tmp_path / "x.json"), "--", *recompute]) == 2
    assert "--recompute-granularity" in capsys.readouterr().err


def test_what_only_one_trace_has_is_named(tmp_path, capsys):
    entry = {"step": 1, "kind": "main_grad", "name": "a", "norm": 1.0, "hash": 3}
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    one.write_text(json.dumps(entry) + "\n" + json.dumps(entry | {"name": "b"}) + "\n")
    two.write_text(json.dumps(entry) + "\n")
    for pair in ((one, two), (two, one)):
        code, text = compare(capsys, *pair)
        assert code == 1
        assert "only in one of the traces: step 1: main_grad of b" in text
