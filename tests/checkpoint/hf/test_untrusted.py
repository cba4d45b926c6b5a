"""Files from anywhere: each fault is refused in one line, and leaves nothing behind."""

import json
import os
import struct
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megafp8.checkpoint import find_checkpoint
from megafp8.training.hf_export import ExportOptions, export_hf
from megafp8.training.hf_import import ImportOptions, import_hf
from tests.checkpoint.hf.models import BY_NAME, make, weights

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make(BY_NAME["llama"], tmp_path_factory.mktemp("original") / "hf")


@pytest.fixture
def model(original, tmp_path):
    """A good model to spoil."""
    copy = tmp_path / "in" / "hf"
    copy.mkdir(parents=True)
    for file in original.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def refused(model: Path, text: str) -> None:
    """from-hf fails with one line that says `text`; nothing but the input is there."""
    root = model.parent.parent
    before = sorted(root.rglob("*"))
    with pytest.raises(ValueError, match=text) as caught:
        import_hf(model, root / "out" / "ours", ImportOptions())
    assert "\n" not in str(caught.value)
    assert [p for p in sorted(root.rglob("*")) if p != root / "out"] == before


def edit_config(model: Path, **changes) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_header(path: Path, header: dict | bytes, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def test_the_model_itself_is_good(model):
    import_hf(model, model.parent / "ours", ImportOptions())
    assert (model.parent / "ours" / "iter_0000000" / "index.json").exists()


@pytest.mark.parametrize("size", [0, 4, 100, -1])
def test_cut_short(model, size):
    data = (model / WEIGHTS).read_bytes()
    (model / WEIGHTS).write_bytes(data[:size])
    refused(model, WEIGHTS)


@pytest.mark.parametrize(
    ("header", "length"),
    [
        (b"{", None),
        (b"\xff\xfe", None),
        (b"[1, 2]", None),
        (b"{}", 1 << 62),
        ({"w": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 8]}}, None),
        ({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, None),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [1 << 50, (1 << 50) + 8]}}, None),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}, None),
        ({"w": {"dtype": "Q4", "shape": [2], "data_offsets": [0, 8]}}, None),
        (b'{"w": ' + b"[" * 100_000, None),
    ],
)
def test_hostile_headers(model, header, length):
    write_header(model / WEIGHTS, header, b"\0" * 8, length)
    refused(model, WEIGHTS)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "a/b.safetensors", "", 5, None])
def test_an_index_that_leaves_the_directory(model, name):
    save_file({"secret": torch.ones(2)}, model.parent / "elsewhere.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": name}}))
    refused(model, "is not a plain file name")


@pytest.mark.parametrize("content", ["{}", "[]", '{"weight_map": 5}', "nonsense", '{"weight_map": {}}'])
def test_an_index_that_is_none(model, content):
    (model / "model.safetensors.index.json").write_text(content)
    refused(model, "index.json")


@pytest.mark.parametrize("file", [WEIGHTS, "config.json", "tokenizer.json", "generation_config.json"])
def test_links_are_not_followed(model, file):
    outside = model.parent / "outside"
    outside.write_bytes((model / file).read_bytes() if (model / file).exists() else b"secret")
    (model / file).unlink(missing_ok=True)
    os.symlink(outside, model / file)
    refused(model, "links are not followed")


def test_a_file_of_the_index_is_missing(model):
    names = dict.fromkeys(weights(model), "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    refused(model, "model-00001-of-00001.safetensors is missing")


def test_pickles_are_not_read(model):
    (model / WEIGHTS).rename(model / "pytorch_model.bin")
    refused(model, "pickled .bin files")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"hidden_size": 1 << 60}, "'hidden_size'"),
        ({"hidden_size": -32}, "'hidden_size'"),
        ({"hidden_size": 1 << 31, "intermediate_size": 1 << 31}, "--hidden-size 2147483648"),
        (
            {"num_attention_heads": 1 << 30, "num_key_value_heads": 1 << 30, "head_dim": 1 << 31},
            "--num-attention-heads",
        ),
        ({"hidden_size": "32"}, "'hidden_size'"),
        ({"hidden_size": True}, "'hidden_size'"),
        ({"hidden_size": 32.5}, "'hidden_size'"),
        ({"num_hidden_layers": 10_000}, "10000 layers and experts, but the files only"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers'"),
        ({"num_hidden_layers": 3}, "lacks 'model.layers.2"),
        ({"num_hidden_layers": 1}, "holds 'model.layers.1"),
        ({"intermediate_size": 53}, r"'model.layers.0.mlp.gate_proj.weight' has the shape"),
        ({"vocab_size": 1 << 30}, "has the shape"),
        ({"num_attention_heads": 0}, "'num_attention_heads'"),
        ({"num_key_value_heads": 3}, "not divisible"),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps'"),
        ({"rms_norm_eps": "1e-5"}, "'rms_norm_eps'"),
        ({"hidden_act": "gelu"}, "only silu is built here"),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'longrope' is not built here"),
        ({"rope_parameters": 3}, "not an object"),
        ({"model_type": "mamba"}, "model_type 'mamba' is not built here"),
        ({"model_type": None}, "has no 'model_type'"),
        ({"attention_bias": True}, "'attention_bias' True with 'mlp_bias' False"),
        ({"tie_word_embeddings": "yes"}, "true or false"),
        ({"tie_word_embeddings": True}, "ties the LM head to the embedding, but their weights differ"),
    ],
)
def test_a_configuration_that_is_not_of_the_model(model, changes, text):
    edit_config(model, **changes)
    refused(model, text)


@pytest.mark.parametrize("changes", [{"num_local_experts": 100_000}, {"num_local_experts": 5}])
def test_absurd_numbers_of_experts(tmp_path, changes):
    model = make(BY_NAME["mixtral"], tmp_path / "in" / "hf")
    edit_config(model, **changes)
    refused(model, "layers and experts, but the files|lacks 'model.layers.0.block_sparse_moe.experts.4")


@pytest.mark.parametrize("content", ["", "{", "[]", "3", "\udcff", "{" * 100_000])
def test_a_configuration_that_is_none(model, content):
    (model / "config.json").write_text(content, errors="surrogateescape")
    refused(model, "config.json")


@pytest.mark.parametrize("change", ["more", "fewer", "twice"])
def test_names_without_a_counterpart(model, change):
    """CASES 27."""
    tensors = weights(model)
    if change == "more":
        tensors["model.layers.0.mlp.extra_proj.weight"] = torch.ones(2, 2)
    if change == "fewer":
        del tensors["model.norm.weight"]
    if change == "twice":  # with and without the stem that old files lack
        tensors["norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, model / WEIGHTS, {"format": "pt"})
    refused(model, {"more": "extra_proj", "fewer": "lacks 'model.norm.weight'", "twice": "model.norm.weight"}[change])


def test_old_files_without_the_stem(model):
    """GPT-2's own files name `wte.weight`; Llama's base models `layers.0...`."""
    tensors = {name.removeprefix("model."): tensor for name, tensor in weights(model).items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, model / WEIGHTS, {"format": "pt"})
    import_hf(model, model.parent / "ours", ImportOptions())


def test_a_tied_model_may_store_its_head(tmp_path):
    """CASES 84: the copy is checked and dropped: no duplicate storage."""
    model = make(BY_NAME["llama-1-group-tied"], tmp_path / "hf")
    tensors = weights(model)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model / WEIGHTS, {"format": "pt"})
    import_hf(model, tmp_path / "ours", ImportOptions())
    index = json.loads((tmp_path / "ours" / "iter_0000000" / "index.json").read_text())["index"]
    assert "model/lm_head.weight" not in index["tensors"]


def test_an_existing_directory_is_not_touched(model):
    save = model.parent / "ours"
    save.mkdir()
    (save / "precious").write_text("data")
    with pytest.raises(ValueError, match="is there already"):
        import_hf(model, save, ImportOptions())
    assert [p.name for p in save.iterdir()] == ["precious"]


def test_killed_midway_nothing_is_published(model, monkeypatch):
    """A disk that fills up while tensors are written."""
    from megafp8.checkpoint import tensor_file

    real, written = tensor_file.ChecksumWriter.write, []

    def write(self, data):
        written.append(len(data))
        if len(written) > 12:
            raise OSError(28, "No space left on device")
        real(self, data)

    monkeypatch.setattr(tensor_file.ChecksumWriter, "write", write)
    with pytest.raises(OSError, match="No space left"):
        import_hf(model, model.parent / "ours", ImportOptions())
    assert sorted(p.name for p in model.parent.iterdir()) == ["hf"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda run: run.pop("args"), "holds no run's arguments: no 'args'"),
        (lambda run: run.update(args=5), "holds no run's arguments"),
        (lambda run: run["args"]["config"]["model"].update(num_layers="2"), "holds no run's arguments"),
        (lambda run: run["args"]["config"].update(secret={}), "unknown group"),
        (lambda run: run["args"]["config"]["model"].update(num_layers=10**9), "1000000000 layers and experts"),
        (lambda run: run["args"]["config"]["model"].update(hidden_size=48), "is not as the checkpoint's own arguments"),
    ],
)
def test_a_strangers_checkpoint(model, change, text):
    """to-hf of a checkpoint whose run.json was made up: its checksums are right, its arguments aren't."""
    save = model.parent / "ours"
    import_hf(model, save, ImportOptions())
    found = find_checkpoint(save)
    run = json.loads(json.dumps(found.metadata))
    change(run)
    with pytest.raises(ValueError, match=text) as caught:
        export_hf(replace(found, metadata=run), model.parent / "out", ExportOptions())
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in model.parent.iterdir()) == ["hf", "ours"]
