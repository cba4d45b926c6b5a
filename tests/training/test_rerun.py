"""Suspicious iterations run again: transient or real, and the exit codes (docs/trust.md)."""

import json
from unittest import mock

import pytest
import torch

from megafp8.config.train import TrainConfig
from megafp8.training import iteration as iteration_module
from megafp8.training.rerun import MOST_TRANSIENT, Reruns, Spikes, StopRun, bits_of
from megafp8.training.run_log import LIFECYCLE
from tests.training.runs import RECIPES, flags, metrics, run, tensors, write_corpus


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def test_a_jump_is_far_above_the_losses_of_late():
    spikes = Spikes()
    for i in range(40):
        assert not spikes.is_jump(5.0 + 0.01 * (i % 3))
        spikes.add(5.0 + 0.01 * (i % 3))
    assert not spikes.is_jump(5.4), "many deviations, but less than a tenth"
    assert spikes.is_jump(5.6)
    assert not Spikes().is_jump(100.0), "nothing to compare with yet"


def reruns(said, mode="validate_results", spiky=True, saves=True, suspect=None):
    train = TrainConfig(rerun_mode=mode, check_for_spiky_loss=spiky)
    return Reruns(train, saves=saves, suspect=suspect, say=lambda kind, i, message: said.append(kind))


def test_another_result_is_transient_and_the_second_counts():
    said = []
    checks = reruns(said)
    for number in range(MOST_TRANSIENT - 1):
        assert checks.check(number, float("nan"), lambda: 4.0) == 4.0
    with pytest.raises(StopRun) as stop:
        checks.check(9, float("nan"), lambda: 4.0)
    assert stop.value.code == 17
    assert said == ["rerun-transient"] * MOST_TRANSIENT


def test_the_same_bits_end_the_run_only_where_a_restart_can_decide():
    said = []
    with pytest.raises(StopRun) as stop:
        reruns(said).check(7, float("inf"), lambda: float("inf"))
    assert (stop.value.code, stop.value.suspect) == (16, (7, bits_of(float("inf"))))
    assert reruns(said, saves=False).check(7, float("inf"), lambda: float("inf")) == float("inf")
    assert said == ["rerun-same"] * 2


@pytest.mark.parametrize(("loss", "kind"), [(float("inf"), "rerun-real"), (4.0, "rerun-persistent-fault")])
def test_after_the_restart_the_machine_or_the_result_is_convicted(loss, kind):
    said = []
    checks = reruns(said, suspect=(7, bits_of(float("inf"))))
    assert checks.check(7, loss, lambda: pytest.fail("ran again")) == loss
    assert said == [kind]


def test_report_stats_compares_every_iteration():
    said, second = [], iter([1.0, 1.5])
    checks = reruns(said, mode="report_stats", spiky=False)
    for _ in range(2):
        checks.check(1, 1.0, lambda: next(second))
    assert said == ["rerun-differs"]


def command(corpus, directory, *extra, iterations=8):
    saving = ("--log-dir", str(directory), "--save", str(directory / "c"), "--load", str(directory / "c"))
    return flags(
        corpus, *RECIPES["delayed"], "--train-iters", str(iterations), "--eval-iters", "0", "--log-interval", "1",
        *saving, *extra,
    )  # fmt: skip


def events(directory):
    path = directory / "events.jsonl"
    found = [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []
    return [kind for kind in found if kind not in LIFECYCLE]


def wrong_loss(times, iteration=5, value=torch.nan):
    """forward_backward whose result is wrong the first `times` times in one iteration, as by a bit that flipped."""
    original, calls = iteration_module.forward_backward, []

    def forward_backward(model, optimizer, batches, **options):
        output = original(model, optimizer, batches, **options)
        if options["iteration"] == iteration:
            calls.append(1)
            if len(calls) <= times:
                optimizer.grads.state.views["layers.0.mlp.fc1.weight"].fill_(1e9)
                return type(output)(output.loss * value, output.valid_tokens, output.means)
        return output

    return mock.patch.object(iteration_module, "forward_backward", forward_backward)


def assert_same_run(one, other, last="iter_0000008"):
    assert metrics(one)[0] == metrics(other)[0]
    mine, theirs = tensors(one / "c" / last), tensors(other / "c" / last)
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def test_a_transient_fault_leaves_the_run_as_it_would_have_been(corpus, tmp_path):
    assert run(*command(corpus, tmp_path / "good")) == 0
    with wrong_loss(1):
        assert run(*command(corpus, tmp_path / "hit", "--rerun-mode", "validate_results")) == 0
    assert events(tmp_path / "hit") == ["rerun-transient"]
    assert_same_run(tmp_path / "good", tmp_path / "hit")


def test_without_reruns_the_same_fault_costs_the_step(corpus, tmp_path):
    with wrong_loss(1):
        assert run(*command(corpus, tmp_path)) == 0
    assert [line["iteration"] for line in metrics(tmp_path)[0] if line["skipped"]] == [5]


def test_a_result_that_comes_again_is_settled_by_a_restart(corpus, tmp_path):
    """Exit code 16 with the state before the step; the restart, where the fault is gone, makes the run whole."""
    assert run(*command(corpus, tmp_path / "good")) == 0
    argv = command(corpus, tmp_path / "hit", "--rerun-mode", "validate_results")
    with wrong_loss(99):
        assert run(*argv) == 16
    assert (tmp_path / "hit" / "c" / "latest").read_text().strip() == "iter_0000004"
    assert run(*argv) == 0
    assert events(tmp_path / "hit") == ["rerun-same", "stop", "rerun-persistent-fault"]
    assert_same_run(tmp_path / "good", tmp_path / "hit")


def test_ranges_of_bad_data_are_passed_over(corpus, tmp_path):
    assert run(*command(corpus, tmp_path, "--iterations-to-skip", "2", "4:6")) == 0
    lines = metrics(tmp_path)[0]
    assert [line["iteration"] for line in lines] == [1, 3, 7, 8]
    assert lines[-1]["consumed_samples"] == 32
