"""Stop and resume = no stop, bit for bit: metrics, weights, moments, histories and random states (CASES 15, 16, 60)."""

import copy
import dataclasses

import pytest
import torch

from megafp8.checkpoint import find_checkpoint
from tests.cases import quick
from tests.training.runs import RECIPES, flags, metrics, run, run_in_new_process, tensors, write_corpus

LAST = "iter_0000010"
TEN = ("--train-iters", "10", "--eval-interval", "5")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def command(corpus, directory, recipe, *extra):
    saving = ("--log-dir", str(directory), "--save", str(directory / "c"), "--load", str(directory / "c"))
    return flags(corpus, *RECIPES[recipe], *TEN, *saving, *extra)


def assert_equal_runs(one, other, first_iteration):
    (training, validation), (training_2, validation_2) = metrics(one), metrics(other)
    assert [t["iteration"] for t in training_2] == list(range(1, 11))
    assert training[first_iteration - 1 :] == training_2[first_iteration - 1 :]
    assert validation == validation_2
    state, state_2 = tensors(one / "c" / LAST), tensors(other / "c" / LAST)
    assert state.keys() == state_2.keys()
    different = [name for name in state if not torch.equal(state[name], state_2[name])]
    assert not different


@pytest.mark.parametrize("recipe", quick(RECIPES, RECIPES.keys() - {"bf16"}))
def test_stop_at_3_of_10_and_resume(corpus, tmp_path, recipe):
    """Dropout is on, since its random numbers must go on as well; resumed twice in a row, in new processes."""
    dropout = ("--hidden-dropout", "0.1", "--attention-dropout", "0.1")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert run(*command(corpus, whole, recipe, *dropout)) == 0
    assert run(*command(corpus, parts, recipe, *dropout, "--exit-interval", "3")) == 0
    assert (parts / "c" / "latest").read_text().strip() == "iter_0000003"
    assert run_in_new_process(*command(corpus, parts, recipe, *dropout, "--exit-interval", "7")) == 0
    assert (parts / "c" / "latest").read_text().strip() == "iter_0000007"
    assert run_in_new_process(*command(corpus, parts, recipe, *dropout)) == 0
    assert_equal_runs(whole, parts, first_iteration=1)


def test_evaluation_and_saves_change_nothing(corpus, tmp_path):
    plain, busy = tmp_path / "plain", tmp_path / "busy"
    assert run(*command(corpus, plain, "delayed", "--eval-interval", "1000")) == 0
    assert run(*command(corpus, busy, "delayed", "--eval-interval", "3", "--save-interval", "4")) == 0
    assert metrics(plain)[0] == metrics(busy)[0]
    one, other = tensors(plain / "c" / LAST), tensors(busy / "c" / LAST)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("recipe", ["blockwise", "delayed"])
def test_recompute_changes_nothing(corpus, tmp_path, recipe):
    """CASES 22: the recompute pass uses the scales of the first pass, and records nothing."""
    for name, extra in {"kept": (), "full": ("--recompute-granularity", "full")}.items():
        assert run(*command(corpus, tmp_path / name, recipe, *extra)) == 0
    assert_equal_runs(tmp_path / "kept", tmp_path / "full", first_iteration=1)


def test_loading_without_optimizer_starts_the_schedule_afresh(corpus, tmp_path):
    """CASES 16: the iteration goes on, the learning rate warms up again, and a later resume remembers that."""
    first, second = tmp_path / "a", tmp_path / "b"
    assert run(*command(corpus, first, "fp32", "--exit-interval", "4")) == 0
    load = ("--load", str(first / "c"), "--no-load-optim")
    assert run(*command(corpus, second, "fp32", *load, "--exit-interval", "7")) == 0
    assert run(*command(corpus, second, "fp32")) == 0
    whole, resumed = metrics(first)[0], metrics(second)[0]
    assert [line["iteration"] for line in resumed] == list(range(5, 11))
    assert [line["learning_rate"] for line in resumed[:4]] == [line["learning_rate"] for line in whole[:4]]


def test_changed_arguments_are_printed(corpus, tmp_path, capsys):
    assert run(*command(corpus, tmp_path, "fp32", "--exit-interval", "2")) == 0
    again = ("--exit-interval", "4", "--ckpt-step", "2", "--clip-grad", "0.5")
    assert run(*command(corpus, tmp_path, "fp32", *again)) == 0
    out = capsys.readouterr().out
    assert "changed since the checkpoint: --clip-grad: 1.0 -> 0.5" in out
    assert "--ckpt-step" not in out


WRONG = {
    "no progress": lambda run: run.pop("progress"),
    "progress is text": lambda run: run.update(progress="x"),
    "negative counter": lambda run: run["progress"].update(iteration=-3),
    "no schedule": lambda run: run.pop("schedule"),
    "schedule is a list": lambda run: run.update(schedule=[1]),
    "empty schedule": lambda run: run["schedule"].clear(),
    "no arguments": lambda run: run.pop("args"),
    "arguments are a number": lambda run: run.update(args=3),
    "tokenizer is a number": lambda run: run.update(tokenizer=3),
}


@pytest.fixture(scope="module")
def saved(corpus, tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    assert run(*flags(corpus, "--save", directory, "--exit-interval", "2", "--eval-iters", "0")) == 0
    return directory


@pytest.mark.parametrize("case", WRONG)
def test_a_whole_run_file_of_another_kind(corpus, saved, capsys, monkeypatch, case):
    """What passes all checksums may still come from elsewhere: one line, no traceback."""

    def other(_, load, step=None, **choose):
        found = find_checkpoint(load, step, **choose)
        metadata = copy.deepcopy(dict(found.metadata))
        WRONG[case](metadata)
        return dataclasses.replace(found, metadata=metadata)

    monkeypatch.setattr("megafp8.training.checkpointing.find_together", other)
    assert run(*flags(corpus, "--load", saved)) == 2
    captured = capsys.readouterr()
    assert captured.err.count("error: ") == 1
    assert str(saved) in captured.err
    assert "] iteration" not in captured.out


def test_data_that_ends_before_the_resume(corpus, saved, capsys, monkeypatch):
    """Before training starts, like every other mistake."""

    def far(_, load, step=None, **choose):
        found = find_checkpoint(load, step, **choose)
        progress = found.metadata["progress"] | {"consumed_samples": 10**6}
        return dataclasses.replace(found, metadata=found.metadata | {"progress": progress})

    monkeypatch.setattr("megafp8.training.checkpointing.find_together", far)
    assert run(*flags(corpus, "--load", saved)) == 2
    assert "1000000 samples were consumed but the data has" in capsys.readouterr().err
