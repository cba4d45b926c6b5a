"""A real trained Llama, from llama2.c's file: its loss, and the loss of its FP8 forward."""

import struct
from pathlib import Path

import pytest
import torch

from megafp8.checkpoint import find_checkpoint
from megafp8.checkpoint.hf.llama2c import Llama2cFile
from megafp8.training.hf_export import ExportOptions, export_hf
from megafp8.training.hf_import import ImportOptions, import_llama2c
from megafp8.training.hf_verify import largest_difference
from megafp8.training.inference import load_trained
from tests.checkpoint.hf.models import convert

ASSETS = Path(__file__).resolve().parents[2] / "assets"
STORIES = ASSETS / "stories260K"
CPU = torch.device("cpu")


def convert_stories(save: Path, dtype: str = "fp32") -> Path:
    tokenizer = {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(STORIES / "tok512.model")}
    import_llama2c(STORIES / "stories260K.bin", save, ImportOptions(dtype=dtype, tokenizer=tokenizer))
    return save


@pytest.fixture(scope="module")
def stories(tmp_path_factory):
    return convert_stories(tmp_path_factory.mktemp("stories") / "fp32")


@pytest.fixture(scope="module")
def stories_bf16(tmp_path_factory):
    return convert_stories(tmp_path_factory.mktemp("stories") / "bf16", "bf16")


def mean_loss(trained) -> tuple[float, int]:
    """Mean over all tokens of the sample, BOS before each story; and their number."""
    total, count = 0.0, 0
    for story in (ASSETS / "tinystories_sample.txt").read_text().split("<|endoftext|>"):
        if ids := trained.tokenizer.encode(story.strip()):
            tokens = torch.tensor([[trained.tokenizer.bos, *ids]])
            with torch.no_grad():
                loss = trained.model(tokens[:, :-1], step=trained.step, labels=tokens[:, 1:])
            total, count = total + loss.item(), count + len(ids)
    return total / count, count


def test_the_tokenizer_is_copied_beside_the_checkpoint(stories):
    """tests/tools/test_convert_checkpoint.py holds generate_text.py to the author's text."""
    trained = load_trained(stories, CPU)
    assert str(stories) in trained.config.data.tokenizer_model


def test_loss(stories):
    loss, count = mean_loss(load_trained(stories, CPU))
    assert count == 1804
    assert loss == pytest.approx(1.266, abs=1e-3)


@pytest.mark.parametrize("recipe", ["blockwise", "mxfp8", "tensorwise"])
def test_loss_of_the_fp8_forward(stories_bf16, recipe):
    """No size is a multiple of 16, so every tile is ragged: still within 1% of the loss (docs/conversion.md)."""
    fp8_format = "hybrid" if recipe == "tensorwise" else "e4m3"
    fp8 = load_trained(stories_bf16, CPU, fp8_format=fp8_format, fp8_recipe=recipe)
    assert fp8.model.layers[0].mlp.fc1.recipe.name == recipe
    loss, _ = mean_loss(fp8)
    assert loss == pytest.approx(1.266, rel=0.01)
    assert loss != mean_loss(load_trained(stories_bf16, CPU))[0]


def test_fp8_export_keeps_the_loss(stories_bf16, tmp_path):
    """To block-FP8 and back: what a server would compute, within 1% too."""
    export_hf(find_checkpoint(stories_bf16), tmp_path / "fp8", ExportOptions(fp8=True))
    convert(tmp_path / "fp8", tmp_path / "again")
    loss, _ = mean_loss(load_trained(tmp_path / "again", CPU))
    assert loss == pytest.approx(1.266, rel=0.01)


def test_transformers_reads_it_alike(stories, tmp_path):
    pytest.importorskip("transformers")
    found = find_checkpoint(stories)
    export_hf(found, tmp_path / "hf", ExportOptions())
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == (STORIES / "tok512.model").read_bytes()
    assert largest_difference(found, tmp_path / "hf", 64) < 1e-4


def test_untied_and_groups(tmp_path):
    """A file of another shape: every tensor where llama2.c's export puts it."""
    dim, ffn, layers, heads, kv, vocab, context = 8, 12, 2, 4, 2, 11, 16
    generator = torch.Generator().manual_seed(0)
    sizes = [vocab * dim, *[layers * n for n in (dim, dim * dim, dim * kv * 2, dim * kv * 2, dim * dim, dim)],
             *[layers * dim * ffn] * 3, dim, context * 2, vocab * dim]  # fmt: skip
    values = [torch.randn(n, generator=generator) for n in sizes]
    file = tmp_path / "model.bin"
    header = struct.pack("<7i", dim, ffn, layers, heads, kv, -vocab, context)
    file.write_bytes(header + b"".join(v.numpy().tobytes() for v in values))
    opened = Llama2cFile(file)
    assert not opened.config["tie_word_embeddings"]
    assert torch.equal(opened.read("lm_head.weight"), values[-1].view(vocab, dim))
    assert torch.equal(opened.read("model.layers.1.mlp.gate_proj.weight"), values[7].view(layers, ffn, dim)[1])
    assert torch.equal(opened.read("model.layers.1.mlp.down_proj.weight"), values[8].view(layers, dim, ffn)[1])
    assert torch.equal(opened.read("model.layers.0.mlp.up_proj.weight"), values[9].view(layers, ffn, dim)[0])
    q = values[2].view(layers, heads, 2, dim)[1]
    expected = torch.stack([q[:, 0], q[:, 1]], 1)  # heads of 2 channels: one pair, the same either way
    assert torch.equal(opened.read("model.layers.1.self_attn.q_proj.weight"), expected.reshape(dim, dim))
    import_llama2c(file, tmp_path / "ours", ImportOptions())


@pytest.mark.parametrize(
    "damage", ["empty", "short header", "cut", "longer", "negative", "absurd", "many layers", "heads"]
)
def test_damaged_files(tmp_path, damage):
    data = (STORIES / "stories260K.bin").read_bytes()
    fields = list(struct.unpack("<7i", data[:28]))
    if damage == "negative":
        fields[1] = -5
    if damage == "absurd":
        fields[0] = 1 << 30
    if damage == "many layers":
        fields[2] = 1 << 24
    if damage == "heads":
        fields[3] = 7
    spoilt = struct.pack("<7i", *fields) + data[28:]
    spoilt = {"empty": b"", "short header": data[:20], "cut": data[:-4], "longer": data + b"\0"}.get(damage, spoilt)
    (tmp_path / "model.bin").write_bytes(spoilt)
    with pytest.raises(ValueError, match="model.bin"):
        import_llama2c(tmp_path / "model.bin", tmp_path / "ours", ImportOptions())
    assert not (tmp_path / "ours").exists()
