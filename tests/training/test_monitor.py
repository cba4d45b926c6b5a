"""The monitor: what it counts, that looking changes nothing, and that nobody looks when it is off."""

import json
import math

import pytest
import torch

from megafp8.fp8 import get_recipe, operand_stats
from megafp8.fp8.operand_stats import OperandStats, describe, drift
from megafp8.training.iteration import IterationRunner
from tests.training.runs import RECIPES, flags, metrics, run, tensors, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def numbers(x, quantized):
    stats = OperandStats.empty(2)
    stats.add(1, x, quantized)
    histogram = {i: int(n) for i, n in enumerate(stats.histogram[1]) if n}
    assert not stats.sums[0].any(), "another row was written to"
    return describe(stats.sums[1].tolist(), stats.largest[1].tolist(), histogram), histogram


@pytest.mark.parametrize("orientation", ["rowwise", "colwise"])
@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "mxfp8"])
@pytest.mark.parametrize("role", ["input", "weight", "grad_output"])
def test_numbers_are_those_of_the_definition(recipe, role, orientation):
    x = torch.randn(300, 200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 4, 200)
    x[5, 7], x[200] = 0.0, 1e-30
    quantized = get_recipe(recipe).quantizer(role).quantize(x, orientation == "rowwise", orientation == "colwise")
    found, histogram = numbers(x, quantized)
    value = quantized.dequantize(torch.float64)
    noise = (x.double() - value).square().sum()
    assert found["sqnr_db"] == pytest.approx(10 * math.log10(x.double().square().sum() / noise), abs=1e-6)
    assert found["underflow"] == ((x != 0) & (value == 0)).sum().item() / x.numel()
    assert found["amax"] == x.abs().max().item()
    storage = getattr(quantized, orientation)
    assert sum(histogram.values()) == storage.scale_inv.numel()
    assert found["saturated"] == 0
    assert found["nonfinite"] == 0


def test_saturated_elements_are_those_beyond_rounding():
    """Under a scale from a history: 464 still rounds to 448, what is above has lost more than rounding takes."""
    x = torch.tensor([[448.0, 460.0, 470.0, -1000.0]])
    quantizer = get_recipe("tensorwise").quantizer("input")
    found, _ = numbers(x, quantizer.quantize(x, scale=torch.ones(1)))
    assert found["saturated"] == 0.5


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_element_is_counted_and_does_not_spoil_the_rest(value):
    x = torch.randn(128, 128, generator=torch.Generator().manual_seed(0))
    x[3, 4] = value
    found, _ = numbers(x, get_recipe("blockwise").quantizer("input").quantize(x))
    assert found["nonfinite"] == 1
    assert found["amax"] == math.inf
    assert found["sqnr_db"] > 28


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise", "mxfp8"])
@pytest.mark.parametrize("role", ["input", "weight"])
def test_a_large_operand_is_sampled_in_whole_blocks(monkeypatch, recipe, role):
    rows = torch.logspace(-3, 3, 1000).view(-1, 1)
    x = torch.randn(1000, 256, generator=torch.Generator().manual_seed(0)) * rows
    quantized = get_recipe(recipe).quantizer(role).quantize(x)
    whole, _ = numbers(x, quantized)
    monkeypatch.setattr(operand_stats, "SAMPLED", 3 * 128 * 256)
    stats = OperandStats.empty(1)
    stats.add(0, x, quantized)
    chosen = torch.cat([torch.arange(b * 128, b * 128 + 128) for b in (0, 2, 4)])
    value = quantized.dequantize(torch.float64)[chosen]
    noise = (x[chosen].double() - value).square().sum()
    assert stats.sums[0, 0] == 3 * 128 * 256
    torch.testing.assert_close(stats.sums[0, 4], noise)
    assert stats.largest[0, 0] == whole["amax"], "amaxes come from all elements"


@pytest.mark.parametrize("orientation", ["rowwise", "colwise"])
@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "tensorwise"])
def test_rows_that_fill_experts_up_are_no_tiles(recipe, orientation):
    """Of experts' rows that arrive in FP8: filled up with zeros or not, the same amax, scales and histogram. And a
    tile of zeros whose scale, 1, is in between is no tile, where one of that scale with values is."""
    quantizer, block = get_recipe(recipe).quantizer("input"), 128
    rows = torch.randn(block, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows[0, 0] = 448
    found = []
    for filled in (rows, torch.cat([rows, torch.zeros(block, 96).bfloat16()])):
        made = quantizer.quantize(filled, orientation == "rowwise", orientation == "colwise")
        stats = OperandStats.empty(1)
        stats.add(0, None, made)
        found.append((stats.largest.tolist(), stats.histogram[0].nonzero().tolist(), stats.histogram.sum().item()))
    assert found[0] == found[1]
    nobody = OperandStats.empty(1)
    nobody.add(0, None, quantizer.quantize(torch.zeros(block, 96).bfloat16(), True, False))
    assert not nobody.histogram.any()


def test_drift_is_how_far_scales_moved():
    assert drift({10: 5, 12: 5}, {10: 5, 12: 5}) == 0
    assert drift({10: 5}, {14: 2}) == 1.0, "four quarters of an octave"
    assert drift({10: 1, 14: 1}, {10: 1, 18: 1}) == 0.5


def lines_of(directory):
    return [json.loads(line) for line in (directory / "fp8_monitor.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
def test_on_or_off_changes_no_bit(corpus, tmp_path, recipe):
    argv = flags(corpus, *RECIPES[recipe], "--train-iters", "6", "--eval-iters", "0")
    for name, extra in (("on", ("--fp8-monitor-interval", "2")), ("off", ())):
        saving = ("--log-dir", str(tmp_path / name), "--save", str(tmp_path / name / "c"))
        assert run(*argv, *saving, *extra) == 0
    assert metrics(tmp_path / "on")[0] == metrics(tmp_path / "off")[0]
    one, other = (tensors(tmp_path / name / "c" / "iter_0000006") for name in ("on", "off"))
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert not (tmp_path / "off" / "fp8_monitor.jsonl").exists()
    lines = lines_of(tmp_path / "on")
    assert [line["iteration"] for line in lines] == [2] * 24 + [4] * 24 + [6] * 24
    assert {line["role"] for line in lines} == {"input", "weight", "grad_output"}
    assert all(22 < line["sqnr_db"] < 40 for line in lines), "some operand was compared with another one"
    assert all((line["drift_octaves"] is None) == (line["iteration"] == 2) for line in lines)


def test_nobody_looks_when_it_is_off(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(IterationRunner, "_report", lambda *_: pytest.fail("looked"))
    assert (
        run(*flags(corpus, *RECIPES["blockwise"], "--train-iters", "1", "--eval-iters", "0", "--lr-warmup-iters", "0"))
        == 0
    )


@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
def test_fp8_primary_weights_are_compared_with_their_masters(corpus, tmp_path, recipe):
    """The same numbers as with BF16 weights, since the bytes are the same."""
    argv = flags(corpus, *RECIPES[recipe], "--train-iters", "2", "--eval-iters", "0", "--lr-warmup-iters", "0")
    argv += ["--fp8-monitor-interval", "2"]
    primary = ("--fp8-param-gather", "--use-distributed-optimizer")
    for name, extra in (("primary", primary), ("plain", ())):
        assert run(*argv, "--log-dir", str(tmp_path / name), *extra) == 0
    mine, theirs = lines_of(tmp_path / "primary"), lines_of(tmp_path / "plain")
    for line, other in zip(mine, theirs, strict=True):
        if line["role"] == "weight":
            line, other = ({k: v for k, v in x.items() if k != "amax"} for x in (line, other))  # only bounded there
        assert line == other
