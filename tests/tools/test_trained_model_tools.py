"""tools/evaluate.py and tools/generate_text.py on a checkpoint of a short real run."""

import json
import math

import evaluate
import generate_text
import pytest
import torch

from megafp8.training.inference import load_trained, pick_token
from tests.training.runs import RECIPES, flags, metrics, run, write_corpus


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(directory of a blockwise run with its checkpoints, prefix of its data)"""
    directory = tmp_path_factory.mktemp("run")
    prefix = write_corpus(directory)
    saving = ("--log-dir", str(directory), "--save", str(directory / "c"))
    assert run(*flags(prefix, *RECIPES["blockwise"], *saving, "--train-iters", "6", "--eval-iters", "1")) == 0
    return directory, prefix


def test_loss_is_the_mean_over_every_token_once(trained, tmp_path, capsys):
    directory, prefix = trained
    argv = ["--load", str(directory / "c"), "--data-path", str(prefix), "--split", "80,20,0", "--device", "cpu"]
    assert evaluate.main([*argv, "--output", str(tmp_path / "out" / "r.json")]) == 0
    (result,) = json.loads((tmp_path / "out" / "r.json").read_text()).values()
    assert result["tokens"] == 8 * 401 - 1  # 20% of 40 documents of 400 bytes and an EOD; the first token is given
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["bytes"] == 8 * 400 - 1  # an EOD is no byte, but its loss counts
    assert result["bits_per_byte"] == pytest.approx(result["loss"] * result["tokens"] / result["bytes"] / math.log(2))
    assert evaluate.main([*argv, "--micro-batch-size", "3", "--output", str(tmp_path / "3.json")]) == 0
    (other,) = json.loads((tmp_path / "3.json").read_text()).values()
    assert other["tokens"] == result["tokens"]
    assert other["loss"] == pytest.approx(result["loss"], rel=1e-5)
    assert other["unigram_entropy"] == pytest.approx(result["unigram_entropy"])


def test_several_named_sets_and_a_limit(trained, tmp_path):
    directory, prefix = trained
    argv = ["--load", str(directory / "c"), "--valid-data-path", str(prefix), str(prefix), "--names", "a", "b"]
    assert evaluate.main([*argv, "--max-samples", "5", "--output", str(tmp_path / "r.json"), "--device", "cpu"]) == 0
    results = json.loads((tmp_path / "r.json").read_text())
    assert list(results) == ["a", "b"]
    assert results["a"] == results["b"]
    assert results["a"]["tokens"] == 5 * 32
    new = ["--valid-data-path", f"x={prefix}", f"y={prefix}"]
    assert evaluate.main([*argv[:2], *new, "--max-samples", "5", "--output", str(tmp_path / "n.json")]) == 0
    assert json.loads((tmp_path / "n.json").read_text()) == {"x": results["a"], "y": results["a"]}
    shares = ["--data-path", f"x={prefix}", f"y={prefix}", "--split", "80,20,0", "--max-samples", "5"]
    assert evaluate.main([*argv[:2], *shares, "--output", str(tmp_path / "s.json")]) == 0
    parts = json.loads((tmp_path / "s.json").read_text())
    assert list(parts) == ["x", "y"]
    assert parts["x"] == parts["y"] != results["a"]


def test_checkpoint_gives_the_loss_the_run_saw(trained):
    """The loaded model evaluates to what the run logged last: weights, recipe and precision are all back."""
    directory, prefix = trained
    model = load_trained(directory / "c", torch.device("cpu"))
    assert model.iteration == 6
    config = model.config
    from megafp8.data import build_datasets, build_loader, sample_counts
    from megafp8.training.step import evaluate as evaluate_batches

    datasets = build_datasets(config.data, model.tokenizer, sample_counts(config), seed=config.train.seed)
    batches = build_loader(
        datasets.valid["valid"], datasets.masks, seq_length=config.data.seq_length, micro_batch_size=2
    )
    loss = evaluate_batches(model.model, batches, count=2, scaling=None, device=torch.device("cpu"))
    assert loss == metrics(directory)[1][-1]["valid_loss"]


def test_greedy_text_is_deterministic_and_written(trained, tmp_path, capsys):
    directory, _ = trained
    argv = ["--load", str(directory / "c"), "--prompt", "ROMEO:", "--num-tokens", "8", "--device", "cpu"]
    texts = []
    for name in ("one", "two"):
        assert generate_text.main([*argv, "--temperature", "0", "--output", str(tmp_path / name)]) == 0
        texts.append((tmp_path / name).read_text())
    assert texts[0] == texts[1]
    assert texts[0].startswith("ROMEO:")
    assert generate_text.main([*argv[:2], "--num-tokens", "40", "--seed", "3", "--device", "cpu"]) == 0  # no prompt


def test_sampling_follows_the_probabilities():
    logits = torch.tensor([0.0, 2.0, 1.0, -50.0])
    generator = torch.Generator().manual_seed(0)

    def draw(**options):
        options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "generator": generator} | options
        return torch.tensor([pick_token(logits, **options) for _ in range(2000)])

    shares = torch.bincount(draw(), minlength=4) / 2000
    assert (shares - logits.softmax(0)).abs().max() < 0.04
    assert set(draw(top_k=2).tolist()) == {1, 2}
    assert set(draw(top_p=0.6).tolist()) == {1}
    assert set(draw(temperature=0).tolist()) == {1}


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--load", "nowhere"], "--load"),
        (["--load", "RUN", "--ckpt-step", "5"], "--ckpt-step 5"),
        (["--load", "RUN", "--temperature", "-1"], "--temperature"),
        (["--load", "RUN", "--temperature", "nan"], "--temperature"),
        (["--load", "RUN", "--seed", "9" * 30], "--seed"),
        (["--load", "RUN", "--top-p", "0"], "--top-p"),
        (["--load", "RUN", "--num-tokens", "0"], "--num-tokens"),
    ],
)
def test_mistakes_of_generate_text(trained, argv, word, capsys):
    argv = [str(trained[0] / "c") if a == "RUN" else a for a in argv]
    assert generate_text.main([*argv, "--device", "cpu"]) == 2
    assert word in capsys.readouterr().err.splitlines()[-1]


def test_mistakes_of_evaluate(trained, capsys):
    load = ["--load", str(trained[0] / "c"), "--device", "cpu"]
    assert evaluate.main([*load, "--data-path", "nowhere"]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert evaluate.main([*load, "--data-path", str(trained[1]), "--split", "100,0,0"]) == 2
    assert "no documents" in capsys.readouterr().err
    assert evaluate.main(["--load", str(trained[0]), "--data-path", str(trained[1])]) == 2
    assert f"no checkpoint there; there is {trained[0] / 'c'}" in capsys.readouterr().err
    prefix = str(trained[1])
    for extra, words in {
        ("--valid-data-path", f"a={prefix}", prefix): f"--valid-data-path {prefix} has no name",
        ("--valid-data-path", f"a={prefix}", f"a={prefix}"): "2 sets and the names a a",
        ("--data-path", f"a={prefix}", "--names", "b"): "--names and NAME=PREFIX",
        ("--data-path", prefix, "--max-samples", "0"): "--max-samples 0: give 1 or more",
        ("--data-path", prefix, "--tensor-model-parallel-size", "2"): "--tensor-model-parallel-size 2",
        ("--data-path", f"a={prefix}.bin"): "give the prefix without its suffix",
        ("--data-path", prefix, "--output", "/"): "--output /: can't write there",
    }.items():
        assert evaluate.main([*load, *extra]) == 2
        assert words in capsys.readouterr().err
