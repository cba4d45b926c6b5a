"""Faults planted in a run: where they are traced to, which linears fall back to BF16, and that nothing else changes."""

import json
from unittest import mock

import pytest
import torch

from megafp8.fp8 import Linear
from megafp8.training.fallback import Fallbacks
from megafp8.training.iteration import IterationRunner
from megafp8.training.run_log import LIFECYCLE
from tests.training.runs import RECIPES, flags, metrics, run, run_in_new_process, tensors, write_corpus

LAYER = "layers.1.mlp.fc1"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


class _Poison(torch.autograd.Function):
    """The identity, whose gradient is not a number."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * torch.nan


def plant(spoil, *, name=LAYER, iterations=(3,), only_fp8=True):
    """Linears' forward, with `spoil(linear, x, call)` in place of `call(x)` for one of them in some iterations."""
    original = Linear.forward

    def forward(self, x, step=None, **rest):
        def call(x):
            return original(self, x, step, **rest)

        hit = self.name == name and step is not None and step.iteration in iterations and step.records
        return spoil(self, x, call) if hit and not (only_fp8 and self.recipe is None) else call(x)

    return mock.patch.object(Linear, "forward", forward)


def infinite_output(linear, x, call):
    y = call(x)
    y, rest = (y[0], y[1:]) if isinstance(y, tuple) else (y, ())
    y = y.index_fill(0, torch.tensor([5], device=y.device), torch.inf)
    return (y, *rest) if rest else y


def bad_gradient(linear, x, call):
    return call(_Poison.apply(x))


def command(corpus, directory, *extra, recipe="blockwise", iterations=6):
    saving = ("--log-dir", str(directory), "--save", str(directory / "c"))
    return flags(
        corpus, *RECIPES[recipe], "--train-iters", str(iterations), "--eval-iters", "0", "--log-interval", "1", *saving,
        *extra,
    )  # fmt: skip


def events(directory):
    path = directory / "events.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [event for event in found if event["event"] not in LIFECYCLE]


def skipped(directory):
    training = metrics(directory)[0]
    return [line["iteration"] for line in training if line["skipped"]]


@pytest.mark.parametrize(
    ("fault", "role"), [(infinite_output, "output"), (bad_gradient, "grad_input")], ids=["forward", "backward"]
)
def test_the_first_layer_and_role_are_named_once_with_the_samples(corpus, tmp_path, fault, role):
    with plant(fault, iterations=(3, 4, 5)):
        assert run(*command(corpus, tmp_path)) == 0
    assert skipped(tmp_path) == [3, 4, 5]
    (event,) = events(tmp_path)
    assert (event["iteration"], event["first"], event["role"]) == (3, LAYER, role)
    assert event["samples"] == [8, 9], "the first microbatch of the third global batch of 4"
    assert "non-finite values, first in layers.1.mlp.fc1" in event["message"]


def test_a_trace_leaves_no_trace(corpus, tmp_path):
    """A run that traces a skipped step goes on as one that doesn't."""
    for name in ("traced", "not"):
        nothing = mock.patch.object(IterationRunner, "_look_back", return_value=False)
        with plant(infinite_output), nothing if name == "not" else mock.MagicMock():
            assert run(*command(corpus, tmp_path / name, recipe="delayed")) == 0
    assert metrics(tmp_path / "traced")[0] == metrics(tmp_path / "not")[0]
    one, other = (tensors(tmp_path / name / "c" / "iter_0000006") for name in ("traced", "not"))
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert len(events(tmp_path / "traced")) == 1
    assert events(tmp_path / "not") == []


def test_a_weight_that_is_not_finite_is_named_before_all(corpus, tmp_path):
    original = IterationRunner.run

    def run_iteration(self, batches, samples):
        if batches.iteration == 2:
            optimizer = self._parts.optimizer
            optimizer.masters.views["layers.0.attention.qkv.weight"][0, 0] = torch.nan
            optimizer.write_weights()
        return original(self, batches, samples)

    with mock.patch.object(IterationRunner, "run", run_iteration):
        assert run(*command(corpus, tmp_path, iterations=4)) == 0
    first = events(tmp_path)[0]
    assert (first["iteration"], first["first"], first["role"]) == (2, "layers.0.attention.qkv.weight", "weight")
    assert first["samples"] == [4, 7], "all of the global batch"


def test_what_does_not_come_again_is_a_transient_fault(corpus, tmp_path):
    planted = []

    def once(linear, x, call):
        planted.append(linear.name)
        return infinite_output(linear, x, call) if len(planted) == 1 else call(x)

    with plant(once):
        assert run(*command(corpus, tmp_path)) == 0
    assert skipped(tmp_path) == [3]
    (event,) = events(tmp_path)
    assert "transient" in event["message"]
    assert event["first"] is None


def test_a_linear_falls_back_after_k_steps_and_the_run_goes_on(corpus, tmp_path):
    with plant(infinite_output, iterations=range(3, 99)):
        assert run(*command(corpus, tmp_path, "--fp8-fallback-after", "2")) == 0
    assert skipped(tmp_path) == [3, 4], "from the fifth step on the linear runs in BF16"
    nonfinite, fallback = events(tmp_path)
    assert nonfinite["event"] == "nonfinite"
    assert (fallback["event"], fallback["iteration"], fallback["linears"]) == ("fp8-fallback", 4, [LAYER])
    progress = json.loads((tmp_path / "c" / "iter_0000006" / "run.json").read_text())["progress"]
    assert progress["fallen"] == {LAYER: 4}


def test_noise_makes_a_linear_fall_back(corpus, tmp_path):
    """E5M2 gradients have some 25 dB, all else 31: so a limit of 28 hits every linear, by its gradients."""
    argv = command(corpus, tmp_path, "--fp8-monitor-interval", "2", "--fp8-fallback-sqnr", "28", recipe="tensorwise")
    assert run(*argv) == 0
    (event,) = events(tmp_path)
    assert (event["event"], event["iteration"], len(event["linears"])) == ("fp8-fallback", 2, 8)
    lines = (tmp_path / "fp8_monitor.jsonl").read_text().splitlines()
    assert {json.loads(line)["iteration"] for line in lines} == {2}, "then nothing is quantized any more"


PRIMARY = ("--fp8-param-gather", "--use-distributed-optimizer")


@pytest.mark.parametrize("recipe", ["blockwise", pytest.param("delayed", marks=pytest.mark.slow)])
def test_fp8_primary_weights_fall_back_to_the_same_bits(corpus, tmp_path, recipe):
    """With a fallback as without one, FP8 primary weights change no bit of the run; stopped and resumed neither."""
    for name, extra in (("plain", ()), ("primary", PRIMARY), ("resumed", PRIMARY)):
        directory = tmp_path / name
        argv = command(corpus, directory, "--fp8-fallback-after", "1", *extra, recipe=recipe)
        with plant(infinite_output, iterations=range(3, 99)):
            if name == "resumed":
                argv += ["--load", str(directory / "c")]
                assert run(*argv, "--exit-interval", "4") == 0
                assert run_in_new_process(*argv) == 0
            else:
                assert run(*argv) == 0
    for name in ("primary", "resumed"):
        assert metrics(tmp_path / name)[0] == metrics(tmp_path / "plain")[0]
        one, other = (tensors(tmp_path / n / "c" / "iter_0000006") for n in (name, "plain"))
        assert [k for k in one if not torch.equal(one[k], other[k])] == []
    assert skipped(tmp_path / "plain") == [3]


def test_forgotten_on_resume(corpus, tmp_path):
    argv = command(corpus, tmp_path, "--fp8-fallback-after", "1", "--load", str(tmp_path / "c"))
    with plant(infinite_output, iterations=range(3, 99)):
        assert run(*argv, "--exit-interval", "4") == 0
        assert run(*argv, "--fp8-forget-fallbacks") == 0
    assert skipped(tmp_path) == [3, 5], "in FP8 again after the resume, until the fault"


@pytest.mark.parametrize("primary", [pytest.param((), marks=pytest.mark.slow), PRIMARY], ids=["bf16", "fp8-primary"])
def test_there_and_back_changes_no_bit(corpus, tmp_path, primary):
    """Between two steps a linear falls back and returns."""
    original = IterationRunner._change_precisions

    def there_and_back(self, noisy, iteration):
        original(self, noisy, iteration)
        if iteration == 3:
            assert self._fallbacks.fall_back({LAYER, "layers.0.attention.qkv"}, iteration)
            self._fallbacks.give_back([LAYER, "layers.0.attention.qkv"])

    assert run(*command(corpus, tmp_path / "plain", *primary)) == 0
    with mock.patch.object(IterationRunner, "_change_precisions", there_and_back):
        assert run(*command(corpus, tmp_path / "switched", *primary)) == 0
    assert metrics(tmp_path / "plain")[0] == metrics(tmp_path / "switched")[0]
    one, other = (tensors(tmp_path / name / "c" / "iter_0000006") for name in ("plain", "switched"))
    assert [k for k in one if not torch.equal(one[k], other[k])] == []


def test_a_linear_returns_after_its_time(corpus, tmp_path):
    seen = []
    original = Fallbacks.return_due

    def return_due(self, iteration):
        seen.append(sorted(self.since))
        return original(self, iteration)

    with plant(infinite_output), mock.patch.object(Fallbacks, "return_due", return_due):
        assert run(*command(corpus, tmp_path, "--fp8-fallback-after", "1", "--fp8-fallback-for", "2")) == 0
    assert [e["event"] for e in events(tmp_path)] == ["nonfinite", "fp8-fallback", "fp8-return"]
    assert seen == [[], [], [], [LAYER], [LAYER], []]
    assert skipped(tmp_path) == [3]
