"""Runs in which FP8 would slow some linears down: these compute in BF16, and a resume goes on as the run began."""

import dataclasses

import pytest
import torch

from megafp8.checkpoint import find_checkpoint
from megafp8.config import Config, crossover
from megafp8.training.inference import load_trained
from tests.training.runs import RECIPES, flags, metrics, run, tensors, write_corpus

SIZES = (
    *("--num-layers", "1", "--hidden-size", "512", "--ffn-hidden-size", "3584", "--seq-length", "512"),
    *("--group-query-attention", "--num-query-groups", "2"),
    *("--max-position-embeddings", "512", "--global-batch-size", "2", "--train-iters", "3", "--lr-warmup-iters", "0"),
    *("--eval-iters", "0", "--log-interval", "1"),
)
"""qkv and proj are slower in FP8."""
NAMED = ("--fp8-small-linears", "fp8", "--fp8-module-recipes", "*.attention.qkv=bf16", "*.attention.proj=bf16")
EVERY = ("--fp8-small-linears", "fp8")
PRIMARY = ("--fp8-param-gather", "--use-distributed-optimizer")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents=80)


def trained(corpus, folder, *more, recipe="blockwise"):
    """(training lines, tensors of the last checkpoint) of a run that goes on from `folder`'s checkpoint, if any."""
    saving = ("--save", str(folder), "--load", str(folder), "--log-dir", str(folder / "log"))
    assert run(*flags(corpus, *RECIPES[recipe], *SIZES, *saving, *more)) == 0
    return metrics(folder / "log")[0], tensors(find_checkpoint(folder).directory)


def same(one, other) -> bool:
    return (
        one[0] == other[0]
        and one[1].keys() == other[1].keys()
        and all(torch.equal(one[1][name], other[1][name]) for name in one[1])
    )


@pytest.mark.parametrize("more", [(), PRIMARY], ids=["copies", "primary"])
def test_the_bits_are_those_of_linears_named_one_by_one(corpus, tmp_path, capsys, more):
    by_default = trained(corpus, tmp_path / "default", *more)
    assert capsys.readouterr().out.count("stays in BF16: at 1024 tokens") == 2
    assert same(by_default, trained(corpus, tmp_path / "named", *NAMED, *more))
    assert not same(by_default, trained(corpus, tmp_path / "every", *EVERY, *more))
    assert "stays in BF16" not in capsys.readouterr().out


def test_a_resume_in_other_sizes_keeps_what_computes_in_fp8(corpus, tmp_path, capsys, monkeypatch):
    """For which nothing was measured. The flag decides anew."""
    trained(corpus, tmp_path / "a", "--exit-interval", "1")
    trained(corpus, tmp_path / "b", *NAMED, "--exit-interval", "1")
    capsys.readouterr()
    monkeypatch.setattr(crossover, "table", lambda: crossover.Measured("", {}))
    small = ("--micro-batch-size", "1")
    went_on = trained(corpus, tmp_path / "a", *small)
    told = capsys.readouterr().out
    assert "attention.proj stays in BF16, as in the checkpoint (--fp8-small-linears decides anew)" in told
    assert "changed since the checkpoint: --micro-batch-size: 2 -> 1" in told
    assert "small_linears" not in told
    assert same(went_on, trained(corpus, tmp_path / "b", *small, *NAMED))
    assert load_trained(tmp_path / "a", torch.device("cpu")).model.layers[0].attention.proj.recipe is None
    capsys.readouterr()
    trained(corpus, tmp_path / "a", *small, "--train-iters", "4", *EVERY, "--override-opt_param-scheduler")
    told = capsys.readouterr().out
    assert "changed since the checkpoint: --fp8-small-linears: bf16 -> fp8" in told
    assert "4 of 5 linears in FP8" in told


def test_a_run_of_before_goes_on_in_fp8(corpus, tmp_path, capsys, monkeypatch):
    """Its arguments don't know the flag, and nothing had been measured."""
    whole = trained(corpus, tmp_path / "whole", *EVERY)
    with monkeypatch.context() as before:
        as_dict = Config.to_dict

        def without(self):
            found = as_dict(self)
            for name in ("fp8_small_linears", "small_linears_in_bf16"):
                del found["config"]["fp8"][name]
            return found

        before.setattr(Config, "to_dict", without)
        before.setattr(crossover, "table", lambda: crossover.Measured("", {}))
        trained(corpus, tmp_path / "old", "--exit-interval", "1")
    capsys.readouterr()
    dry = flags(corpus, *RECIPES["blockwise"], *SIZES, "--load", str(tmp_path / "old"), "--dry-run")
    assert run(*dry) == 0
    assert "4 of 5 linears run in FP8" in capsys.readouterr().out, "a dry run says what the run will do"
    assert load_trained(tmp_path / "old", torch.device("cpu")).model.layers[0].attention.proj.recipe is not None
    assert same(whole, trained(corpus, tmp_path / "old"))
    told = capsys.readouterr().out
    assert "attention.qkv, attention.proj in FP8, as in the checkpoint (--fp8-small-linears decides anew)" in told
    assert told.count("changed since the checkpoint") == told.count("--exit-interval: 1 -> None") == 1


def test_another_recipe_or_a_new_start_decides_by_its_flags(corpus, tmp_path, capsys):
    trained(corpus, tmp_path / "bf16", "--exit-interval", "1", recipe="bf16")
    trained(corpus, tmp_path / "every", *EVERY, "--exit-interval", "1")
    capsys.readouterr()
    for folder, more in (("bf16", ()), ("every", ("--finetune",))):
        trained(corpus, tmp_path / folder, *more, "--exit-interval", "2")
        assert capsys.readouterr().out.count("stays in BF16: at 1024 tokens") == 2, folder


def test_a_checkpoint_without_arguments_is_left_to_loading(monkeypatch):
    from megafp8.checkpoint import Found
    from megafp8.config import build_config
    from megafp8.parallel import ParallelContext
    from megafp8.training import going_on

    base = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "micro_batch_size": 1}
    base |= {"lr": 0.0, "train_iters": 1, "mock_data": True, "tokenizer_type": "ByteTokenizer", "load": "somewhere"}
    config = build_config(env={}, **base, bf16=True, fp8_format="e4m3")
    for args in ({}, {"args": 3}, {"args": {"config": {"nothing": {}}}}):
        monkeypatch.setattr(going_on, "find_together", lambda *_, args=args, **more: Found(None, 1, args))
        assert going_on.going_on(config, ParallelContext()) is config
    monkeypatch.setattr(going_on, "find_together", lambda *_, **more: None)
    assert going_on.going_on(config, ParallelContext()) is config
    theirs = dataclasses.replace(config, given={"fp8_small_linears": "bf16"})
    monkeypatch.setattr(going_on, "find_together", lambda *_, **more: pytest.fail("the flag was given"))
    assert going_on.going_on(theirs, ParallelContext()) is theirs
