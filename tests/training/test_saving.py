"""--async-save, --load-fallback and their like in real runs."""

import threading

import pytest
import torch

from megafp8.checkpoint import tensor_file
from megafp8.checkpoint.directory import saved_iterations
from megafp8.training.trainer import Trainer
from tests.training.runs import RECIPES, flags, metrics, run, tensors, write_corpus

SHORT = ("--train-iters", "8", "--eval-iters", "0", "--save-interval", "2")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def command(corpus, directory, *extra):
    places = ("--log-dir", str(directory), "--save", str(directory / "c"), "--load", str(directory / "c"))
    return flags(corpus, *RECIPES["delayed"], *SHORT, *places, *extra)


def same_tensors(one, other):
    one, other = tensors(one), tensors(other)
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture(scope="module")
def at_once(corpus, tmp_path_factory):
    directory = tmp_path_factory.mktemp("at_once")
    assert run(*command(corpus, directory)) == 0
    return directory


def test_the_same_run_and_checkpoints_in_the_background(corpus, tmp_path, at_once, capsys):
    """CASES 15: also after a stop and a resume from a checkpoint that was written in the background."""
    assert run(*command(corpus, tmp_path, "--async-save", "--exit-interval", "4")) == 0
    assert saved_iterations(tmp_path / "c") == [2, 4]
    assert run(*command(corpus, tmp_path, "--async-save", "--num-workers", "2")) == 0
    assert saved_iterations(tmp_path / "c") == [2, 4, 6, 8]
    assert metrics(tmp_path) == metrics(at_once)
    for iteration in (2, 4, 6, 8):
        name = f"iter_{iteration:07d}"
        assert same_tensors(tmp_path / "c" / name, at_once / "c" / name), name
    out = capsys.readouterr().out
    assert "MiB of host memory a rank for the copy of the state" in out
    assert out.count("s of which training stood still") == 4


def test_training_goes_on_while_the_disk_is_slow(corpus, tmp_path, monkeypatch):
    """One save at a time: the next one waits for it, and so does the end of the run."""
    gate, blocks, seen = threading.Event(), tensor_file._blocks, []

    def slow(tensor):
        assert gate.wait(300)
        return blocks(tensor)

    advance = Trainer._advance

    def watched(self, samples):
        advance(self, samples)
        seen.append((self.progress.iteration, saved_iterations(tmp_path / "c")))
        if self.progress.iteration == 4:
            gate.set()

    monkeypatch.setattr(tensor_file, "_blocks", slow)
    monkeypatch.setattr(Trainer, "_advance", watched)
    assert run(*command(corpus, tmp_path, "--async-save")) == 0
    assert seen[:4] == [(1, []), (2, []), (3, []), (4, [])]
    assert saved_iterations(tmp_path / "c") == [2, 4, 6, 8]


def test_a_save_that_fails_in_the_background_is_told(corpus, tmp_path, monkeypatch, capsys):
    """The run goes on, and ends as one whose last save failed."""

    def full(tensor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tensor_file, "_blocks", full)
    assert run(*command(corpus, tmp_path, "--async-save")) == 1
    assert saved_iterations(tmp_path / "c") == []
    assert len(metrics(tmp_path)[0]) == 8
    out = capsys.readouterr().out
    assert all(f"could not save iteration {i} to" in out for i in (2, 4, 6, 8))


def test_an_error_in_training_does_not_lose_the_save_before(corpus, tmp_path, monkeypatch):
    advance = Trainer._advance

    def failing(self, samples):
        advance(self, samples)
        if self.progress.iteration == 3:
            raise RuntimeError("a kernel failed")

    monkeypatch.setattr(Trainer, "_advance", failing)
    monkeypatch.setattr("megafp8.checkpoint.background.BackgroundSaver.written", False)  # never seen to be done
    with pytest.raises(RuntimeError, match="a kernel failed"):
        run(*command(corpus, tmp_path, "--async-save"))
    assert saved_iterations(tmp_path / "c") == [2]


def test_the_checkpoint_before_a_damaged_one(corpus, tmp_path, at_once, capsys):
    """Resumed from there, the run is the same again."""
    damaged = at_once / "c" / "iter_0000008" / "optimizer-00000.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    load = ("--log-dir", str(tmp_path), "--save", str(tmp_path / "c"))
    assert run(*command(corpus, at_once, *load)) == 2
    error = capsys.readouterr().err
    assert "optimizer-00000.safetensors is damaged" in error
    assert "--load-fallback takes the checkpoint before" in error
    assert run(*command(corpus, at_once, *load, "--load-fallback")) == 0
    out = capsys.readouterr().out
    assert "taking iteration 6" in out
    assert "resumed from" in out
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert same_tensors(tmp_path / "c" / "iter_0000008", damaged.parent)


@pytest.mark.parametrize("flag", ["--async-save", "--load-fallback", "--load-narrowing"])
def test_flags_without_a_place_are_noted(corpus, capsys, flag):
    once = ("--train-iters", "1", "--lr-warmup-iters", "0", "--eval-iters", "0")
    assert run(*flags(corpus, *once, flag)) == 0
    assert f"{flag}: no effect (without --" in capsys.readouterr().out


def test_weights_into_a_narrower_type(corpus, tmp_path, capsys):
    """FP32 weights into a BF16 run: an error that names the flag, or rounded; their masters stay exact."""
    once = ("--train-iters", "2", "--eval-iters", "0", "--lr-warmup-iters", "1")
    saved = ("--save", str(tmp_path / "c"))
    assert run(*flags(corpus, *once, *saved)) == 0
    capsys.readouterr()
    more = ("--train-iters", "3", "--override-opt_param-scheduler", "--load", str(tmp_path / "c"), "--bf16")
    assert run(*flags(corpus, *once, *more)) == 2
    assert "--load-narrowing" in capsys.readouterr().err
    assert run(*flags(corpus, *once, *more, "--load-narrowing", "--save", str(tmp_path / "d"))) == 0
