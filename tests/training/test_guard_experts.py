"""Faults of experts that compute as one: they are named together, and fall back together, whoever of them it was."""

import json
from unittest import mock

import pytest
import torch

from megafp8.fp8.grouped_linear import GroupedLinear
from megafp8.training.iteration import IterationRunner
from tests.training.runs import metrics, run, tensors, write_corpus
from tests.training.test_guard import LAYER, PRIMARY, command, events, infinite_output, plant, skipped

EXPERTS = "layers.1.mlp.experts"
MOE = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--moe-layer-freq", "[0,1]"),
    *("--moe-router-load-balancing-type", "none"),
)
OF_ALL = [f"{EXPERTS}.{number}.{kind}" for number in range(4) for kind in ("fc1", "fc2")]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def spoilt(iterations, experts=EXPERTS, number=2, nobodys=False):
    """fc2's output in FP8: infinite in a row of one expert, or in the rows behind the last one's, nobody's."""
    original = GroupedLinear.__call__

    def call(self, x, ends, step=None, **options):
        y, first = original(self, x, ends, step, **options), self.linears[0]
        hit = first.name.startswith(f"{experts}.") and first.name.endswith(".fc2")
        if hit and first.recipe is not None and step.records and step.iteration in iterations:
            rows = torch.arange(len(y))
            bad = rows >= ends[-1] if nobodys else rows == ends[number - 1]
            assert bad.any()
            y = torch.where(bad[:, None], torch.inf, y)
        return y

    return mock.patch.object(GroupedLinear, "__call__", call)


@pytest.mark.parametrize("extra", [(), PRIMARY], ids=["bf16", "fp8-primary"])
def test_the_experts_of_a_layer_fall_back_together(corpus, tmp_path, extra):
    with spoilt(range(3, 99)):
        assert run(*command(corpus, tmp_path, "--fp8-fallback-after", "1", *MOE, *extra)) == 0
    nonfinite, fallback = events(tmp_path)
    assert (nonfinite["first"], nonfinite["role"]) == (EXPERTS, "output")
    assert fallback["linears"] == OF_ALL
    assert skipped(tmp_path) == [3], "from the fourth step on they run in BF16"


def test_rows_that_are_nobodys_are_no_finding(corpus, tmp_path):
    """Buffers are longer than what is routed; behind it may be anything, and it goes nowhere: the layer after the
    experts is to blame."""
    with spoilt((3,), "layers.0.mlp.experts", nobodys=True), plant(infinite_output):
        batch = ("--micro-batch-size", "4", "--global-batch-size", "8")  # such that tiles leave rows over
        assert run(*command(corpus, tmp_path, *MOE, "--moe-layer-freq", "[1,0]", *batch)) == 0
    assert skipped(tmp_path) == [3]
    (event,) = events(tmp_path)
    assert (event["first"], event["role"]) == (LAYER, "output")


def test_one_experts_noise_makes_all_of_its_kind_fall_back(corpus, tmp_path):
    """Else they could not run as one any more, and ranks would send each other rows of different formats. They return
    together, too, and all of it changes no bit when it happens between two steps."""
    original, fallen = IterationRunner._change_precisions, []

    def there_and_back(self, noisy, iteration):
        original(self, noisy, iteration)
        if iteration == 3:
            fallen.extend(self._fallbacks.fall_back({f"{EXPERTS}.1.fc1"}, iteration))
            self._fallbacks.give_back(fallen)

    assert run(*command(corpus, tmp_path / "plain", *MOE)) == 0
    with mock.patch.object(IterationRunner, "_change_precisions", there_and_back):
        assert run(*command(corpus, tmp_path / "switched", *MOE)) == 0
    assert fallen == OF_ALL[::2]
    assert metrics(tmp_path / "plain")[0] == metrics(tmp_path / "switched")[0]
    one, other = (tensors(tmp_path / name / "c" / "iter_0000006") for name in ("plain", "switched"))
    assert [k for k in one if not torch.equal(one[k], other[k])] == []


@pytest.mark.parametrize("recipe", ["blockwise", pytest.param("delayed", marks=pytest.mark.slow)])
def test_looking_at_experts_changes_no_bit(corpus, tmp_path, recipe):
    for name, extra in (("on", ("--fp8-monitor-interval", "2")), ("off", ())):
        assert run(*command(corpus, tmp_path / name, *MOE, *extra, recipe=recipe)) == 0
    assert metrics(tmp_path / "on")[0] == metrics(tmp_path / "off")[0]
    one, other = (tensors(tmp_path / name / "c" / "iter_0000006") for name in ("on", "off"))
    assert [k for k in one if not torch.equal(one[k], other[k])] == []
    lines = [json.loads(line) for line in (tmp_path / "on" / "fp8_monitor.jsonl").read_text().splitlines()]
    assert {line["linear"] for line in lines if "experts" in line["linear"]} == set(OF_ALL)
