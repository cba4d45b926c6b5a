"""tools/convert_checkpoint.py as its users call it: every command, exit statuses, and what the other tools and
pretrain_gpt.py do with its checkpoints.

CASES 28, 33.
"""

import json
import shutil
from pathlib import Path

import convert_checkpoint
import evaluate
import generate_text
import numpy as np
import pytest
import torch

import pretrain_gpt
from megafp8.checkpoint import find_checkpoint
from megafp8.data import IndexedDatasetBuilder
from megafp8.data.tokenizer.sentencepiece import SentencePieceTokenizer
from tests.checkpoint.hf.models import BY_NAME, assert_same_bytes, make, weights
from tests.training.runs import tensors

ASSETS = Path(__file__).resolve().parents[1] / "assets"
STORIES = ASSETS / "stories260K"
TOKENIZER = ("--tokenizer-model", STORIES / "tok512.model")


def tool(*argv) -> int:
    return convert_checkpoint.main([str(a) for a in argv])


def from_llama2c(save: Path, *extra) -> Path:
    assert tool("from-llama2c", "--bin", STORIES / "stories260K.bin", "--save", save, *TOKENIZER, *extra) == 0
    return save


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    return from_llama2c(tmp_path_factory.mktemp("convert") / "stories")


@pytest.fixture(scope="module")
def stories_bf16(tmp_path_factory):
    return from_llama2c(tmp_path_factory.mktemp("convert") / "stories", "--dtype", "bf16")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The stories as a data set: BOS before each, as the model was trained."""
    prefix = tmp_path_factory.mktemp("corpus") / "stories"
    tokenizer = SentencePieceTokenizer(str(STORIES / "tok512.model"))
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for story in (ASSETS / "tinystories_sample.txt").read_text().split("<|endoftext|>"):
            builder.add_document(np.array([tokenizer.bos, *tokenizer.encode(story.strip())]))
    return prefix


def train(start: Path, corpus: Path, save: Path, *extra: str) -> int:
    """Goes on from a converted checkpoint, with the flags that from-hf wrote beside it."""
    argv = ["--config", start / "model_args.json", "--load", start, "--save", save, "--data-path", corpus]
    argv += ["--split", "100,0,0", "--seq-length", "128", "--micro-batch-size", "2", "--train-iters", "1"]
    argv += ["--lr", "0", "--min-lr", "0", "--eval-iters", "0", "--num-workers", "0", "--device", "cpu"]
    return pretrain_gpt.main([str(a) for a in [*argv, "--make-vocab-size-divisible-by", "96", *extra]])


def test_generate_text_gives_the_authors_text(stories, tmp_path, capsys):
    argv = ["--load", stories, "--temperature", "0", "--num-tokens", "256", "--device", "cpu"]
    assert generate_text.main([str(a) for a in [*argv, "--output", tmp_path / "text"]]) == 0
    assert (tmp_path / "text").read_text() == (STORIES / "expected_greedy.txt").read_text()


def test_evaluate_reads_a_converted_checkpoint(stories, corpus, tmp_path):
    """One sequence over all stories: they see each other, so the loss is near theirs, not equal."""
    argv = ["--load", stories, "--valid-data-path", corpus, "--device", "cpu", "--output", tmp_path / "out.json"]
    assert evaluate.main([str(a) for a in argv]) == 0
    (result,) = json.loads((tmp_path / "out.json").read_text()).values()
    assert result["loss"] == pytest.approx(1.27, abs=0.15)


@pytest.mark.parametrize("extra", [("--finetune",), ("--no-load-optim",)])
@pytest.mark.parametrize("recipe", [(), ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise")])
def test_training_goes_on(stories_bf16, corpus, tmp_path, extra, recipe):
    """CASES 33: weights alone, lr 0, one step: not a bit changes, and the master is the loaded weight."""
    assert train(stories_bf16, corpus, tmp_path / "run", "--weight-decay", "0", *extra, *recipe) == 0
    before = tensors(find_checkpoint(stories_bf16).directory)
    after = tensors(find_checkpoint(tmp_path / "run").directory)
    for name, tensor in before.items():
        assert torch.equal(after[name].reshape(tensor.shape), tensor), name
        master = after[name.replace("model/", "optimizer/master/")]
        assert torch.equal(master.reshape(tensor.shape), tensor.float()), name


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-moe", "gpt2"])
@pytest.mark.parametrize("recipe", [(), ("--fp8-format", "e4m3", "--fp8-recipe", "blockwise")])
def test_families_go_on(tmp_path, name, recipe):
    """Two steps in BF16 and in FP8 from a converted model, and back: every tensor is there, and most have moved."""
    if name == "gpt2" and recipe:
        pytest.skip("the dense path, covered above")
    source = make(BY_NAME[name], tmp_path / "hf", dtype=torch.bfloat16)
    assert tool("from-hf", "--hf", source, "--save", tmp_path / "ours") == 0
    argv = ["--config", tmp_path / "ours" / "model_args.json", "--load", tmp_path / "ours", "--finetune", "--mock-data"]
    argv += ["--tokenizer-type", "NullTokenizer", "--vocab-size", 100, "--seq-length", 16, "--micro-batch-size", 2]
    argv += ["--train-iters", 2, "--lr", "1e-2", "--eval-iters", 0, "--num-workers", 0, "--device", "cpu", *recipe]
    assert pretrain_gpt.main([str(a) for a in [*argv, "--save", tmp_path / "run"]]) == 0
    assert tool("to-hf", "--load", tmp_path / "run", "--hf", tmp_path / "back", "--like", source) == 0
    before, after = weights(source), weights(tmp_path / "back")
    assert before.keys() == after.keys()
    moved = [name for name in before if not torch.equal(before[name], after[name].to(before[name].dtype))]
    assert len(moved) > 0.8 * len(before)
    assert tool("verify", "--load", tmp_path / "run", "--hf", tmp_path / "back") == 0


def test_a_trained_checkpoint_goes_back(stories, corpus, tmp_path, capsys):
    """CASES 28: the vocabulary was padded to 576 in training, the export has its 512 rows; a strict load."""
    transformers = pytest.importorskip("transformers")
    argv = ("--lr", "1e-3", "--min-lr", "1e-3", "--lr-decay-style", "constant", "--finetune")
    assert train(stories, corpus, tmp_path / "run", *argv) == 0
    assert tool("to-hf", "--load", tmp_path / "run", "--hf", tmp_path / "hf") == 0
    written = weights(tmp_path / "hf")
    assert written["model.embed_tokens.weight"].shape == (512, 64)
    assert "lm_head.weight" not in written
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert (config["vocab_size"], config["bos_token_id"], config["eos_token_id"]) == (512, 1, 2)
    assert (tmp_path / "hf" / "tokenizer.model").exists()
    assert tool("verify", "--load", tmp_path / "run", "--hf", tmp_path / "hf") == 0
    assert tool("verify", "--load", stories, "--hf", tmp_path / "hf") == 1  # trained on: other weights
    assert "ABOVE" in capsys.readouterr().out


def test_shards_and_back(tmp_path):
    """A sharded model in, shards out: several files and their index, the same bytes, none above the limit but alone."""
    source = make(BY_NAME["llama"], tmp_path / "hf", max_shard_size="20KB")
    assert (source / "model.safetensors.index.json").exists()
    assert tool("from-hf", "--hf", source, "--save", tmp_path / "ours") == 0
    argv = ("--load", tmp_path / "ours", "--hf", tmp_path / "back", "--max-shard-size", "10kb")
    assert tool("to-hf", *argv) == 0
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    original = weights(source)
    assert_same_bytes(weights(tmp_path / "back"), original)
    assert index["weight_map"].keys() == original.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in original.values())
    for file in set(index["weight_map"].values()):
        held = [original[name].nbytes for name, where in index["weight_map"].items() if where == file]
        assert sum(held) <= 10_000 or len(held) == 1
    assert tool("verify", "--load", tmp_path / "ours", "--hf", tmp_path / "back") == 0
    assert tool("diff", source, tmp_path / "back") == 0


def test_the_tokenizer_travels(tmp_path, capsys):
    """CASES 72: special tokens beyond the vocabulary of the model are refused; files come along both ways."""
    from tokenizers import Tokenizer, models

    source = make(BY_NAME["llama"], tmp_path / "hf")
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(99)}, unk_token="w0"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    assert tool("from-hf", "--hf", source, "--save", tmp_path / "ours") == 0
    found = find_checkpoint(tmp_path / "ours")
    assert found.metadata["tokenizer"]["vocab_size"] == 101
    assert tool("to-hf", "--load", tmp_path / "ours", "--hf", tmp_path / "back") == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    tokenizer.add_special_tokens(["<one too many>"])
    tokenizer.save(str(source / "tokenizer.json"))
    assert tool("from-hf", "--hf", source, "--save", tmp_path / "other") == 2
    assert "102 tokens, but the model's 'vocab_size' is 101" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_info(stories, tmp_path, capsys):
    assert tool("info", stories) == 0
    out = capsys.readouterr().out
    assert "checkpoint of iteration 0" in out
    assert "model: 32 tensors, 260,032 elements, 1.0 MB" in out
    assert tool("info", stories, "--tensors") == 0
    assert "model/layers.4.mlp.fc1.weight  float32 [2, 172, 64]" in capsys.readouterr().out
    assert tool("to-hf", "--load", stories, "--hf", tmp_path / "hf") == 0
    assert tool("info", tmp_path / "hf") == 0
    assert "Hugging Face model llama" in capsys.readouterr().out


def test_diff_prune_average(stories, corpus, tmp_path, capsys):
    argv = ("--lr", "1e-3", "--min-lr", "1e-3", "--lr-decay-style", "constant", "--finetune")
    run, pruned, mean = tmp_path / "run", tmp_path / "pruned", tmp_path / "mean"
    assert train(stories, corpus, run, *argv, "--train-iters", "2", "--save-interval", "1") == 0
    assert tool("diff", run / "iter_0000001", run / "iter_0000002", "--weights") == 1
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "of the norm" in line]) == 32
    assert tool("prune", "--load", run, "--save", pruned) == 0
    assert {name.split("/")[0] for name in tensors(find_checkpoint(pruned).directory)} == {"model"}
    assert find_checkpoint(pruned).iteration == 2
    assert tool("diff", run, pruned, "--weights") == 0
    assert tool("diff", run, pruned) == 1
    assert tool("average", "--load", run, "--steps", "1", "2", "--save", mean) == 0
    one, two = (tensors(run / f"iter_000000{i}") for i in (1, 2))
    for name, tensor in tensors(find_checkpoint(mean).directory).items():
        assert torch.equal(tensor, ((one[name].double() + two[name].double()) / 2).float()), name
    assert train(mean, corpus, tmp_path / "on", "--finetune") == 2  # no model_args.json beside it
    shutil.copy(stories / "model_args.json", mean)
    assert train(mean, corpus, tmp_path / "on", "--finetune") == 0
    assert tool("average", "--load", run, stories, "--save", tmp_path / "again") == 0


def test_averages_are_of_masters(stories_bf16, corpus, tmp_path):
    """BF16 weights that rounding hides: the mean of the FP32 masters, rounded once."""
    argv = ("--lr", "1e-5", "--min-lr", "1e-5", "--lr-decay-style", "constant", "--finetune")
    run = tmp_path / "run"
    assert train(stories_bf16, corpus, run, *argv, "--train-iters", "2", "--save-interval", "1") == 0
    assert tool("average", "--load", run, "--steps", "1", "2", "--save", tmp_path / "mean") == 0
    one, two = (tensors(run / f"iter_000000{i}") for i in (1, 2))
    mean = tensors(find_checkpoint(tmp_path / "mean").directory)
    for name in mean:
        master = name.replace("model/", "optimizer/master/")
        expected = ((one[master].double() + two[master].double()) / 2).float().bfloat16()
        assert torch.equal(mean[name].reshape(-1), expected.reshape(-1)), name


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("from-hf", "--hf", "nowhere", "--save", "out"), "--hf nowhere: no such directory; give one that a"),
        (("to-hf", "--load", "nowhere", "--hf", "out"), "--load nowhere: no such directory"),
        (("to-hf", "--load", "{stories}", "--hf", "out", "--family", "opt"), "--family opt: use one of llama"),
        (("to-hf", "--load", "{stories}", "--hf", "out", "--family", "gpt2"), "family gpt2 has no such model"),
        (("to-hf", "--load", "{stories}", "--hf", "out", "--max-shard-size", "5"), "--max-shard-size 5"),
        (("to-hf", "--load", "{stories}", "--hf", "{stories}"), "is there already"),
        (("to-hf", "--load", "{stories}", "--ckpt-step", "7", "--hf", "out"), "--ckpt-step 7"),
        (("verify", "--load", "{stories}", "--hf", "nowhere"), "--hf nowhere: no Hugging Face model there; to-hf"),
        (("info", "."), "neither a checkpoint"),
        (("prune", "--load", "nowhere", "--save", "out"), "no checkpoint"),
        (("average", "--load", "{stories}", "--save", "out"), "two checkpoints or more"),
        (("average", "--load", "{stories}", "a", "--steps", "1", "--save", "out"), "--steps"),
        (("from-llama2c", "--bin", "nothing.bin", "--save", "out"), "nothing.bin"),
    ],
)
def test_mistakes(stories, tmp_path, monkeypatch, capsys, argv, text):
    """Exit status 2, one line, nothing written."""
    monkeypatch.chdir(tmp_path)
    assert tool(*(a.format(stories=stories) for a in argv)) == 2
    error = capsys.readouterr().err.strip()
    assert text in error
    assert len(error.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_not_exported(stories, tmp_path, capsys):
    copy = tmp_path / "copy"
    shutil.copytree(stories, copy)
    file = copy / "iter_0000000" / "model-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert tool("to-hf", "--load", copy, "--hf", tmp_path / "hf") == 2
    assert "is damaged: checksum" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
