"""Streaming: memory bounded by the largest tensor, dtypes, prediction depths, and what the tools compare."""

import gc
import json
import weakref

import pytest
import torch

from megafp8.checkpoint import find_checkpoint
from megafp8.checkpoint.hf.compare import differences_of, open_any
from megafp8.checkpoint.hf.source import Source
from megafp8.checkpoint.hf.stored import StoredCheckpoint
from megafp8.checkpoint.hf.values import Values
from megafp8.checkpoint.hf.write import meta, write_checkpoint
from megafp8.config import Config
from megafp8.core.gpt import build_model, initialize
from megafp8.optimizer import ModelWeights
from megafp8.parallel import ParallelContext
from megafp8.params import named_specs
from megafp8.training.hf_export import ExportOptions, export_hf
from megafp8.training.hf_import import ImportOptions, import_hf
from tests.checkpoint.hf.models import BY_NAME, LLAMA, Case, assert_same_bytes, convert, make, weights


class Alive:
    """The bytes of tensors that are alive at once, among those that a method has returned."""

    def __init__(self, monkeypatch, owner, method):
        self.now = self.most = self.largest = 0
        real = getattr(owner, method)

        def watched(this, *args):
            tensor = real(this, *args)
            self.now += tensor.nbytes
            self.most, self.largest = max(self.most, self.now), max(self.largest, tensor.nbytes)
            weakref.finalize(tensor, self._gone, tensor.nbytes)
            return tensor

        monkeypatch.setattr(owner, method, watched)

    def _gone(self, size):
        self.now -= size


def test_memory_is_bounded_by_the_largest_tensor(tmp_path, monkeypatch):
    """Ten layers, of which never more than the parts of one tensor are alive."""
    source = make(Case("deep", "Llama", {**LLAMA, "num_hidden_layers": 10}), tmp_path / "hf")
    gc.collect()
    gc.disable()  # what is freed is freed by reference counts alone
    try:
        alive = Alive(monkeypatch, Source, "read")
        found = convert(source, tmp_path / "ours")
        assert 0 < alive.most <= 3 * alive.largest
        alive = Alive(monkeypatch, StoredCheckpoint, "read")
        export_hf(found, tmp_path / "back", ExportOptions())
        assert 0 < alive.most <= 2 * alive.largest
    finally:
        gc.enable()
    total = sum(tensor.nbytes for tensor in weights(source).values())
    assert total > 10 * alive.largest


@pytest.mark.parametrize(
    ("stored", "dtype", "becomes"),
    [
        (torch.float32, "auto", "float32"),
        (torch.bfloat16, "auto", "bfloat16"),
        (torch.float16, "auto", "float32"),
        (torch.float32, "bf16", "bfloat16"),
        (torch.bfloat16, "fp32", "float32"),
    ],
)
def test_precision(tmp_path, stored, dtype, becomes):
    """FP16 becomes FP32, which holds it exactly; where values are rounded, a note says so."""
    source = make(BY_NAME["llama"], tmp_path / "hf", dtype=stored)
    notes = import_hf(source, tmp_path / "ours", ImportOptions(dtype=dtype))
    assert any("rounded to bfloat16" in note for note in notes) is ((stored, dtype) == (torch.float32, "bf16"))
    found = find_checkpoint(tmp_path / "ours")
    assert Config.from_dict(found.metadata["args"]).train.bf16 is (becomes == "bfloat16")
    export_hf(found, tmp_path / "back", ExportOptions(like=tmp_path / "ours" / "hf"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == becomes
    wanted = {name: tensor.to(getattr(torch, becomes)) for name, tensor in weights(source).items()}
    assert_same_bytes(weights(tmp_path / "back"), wanted)


def test_biases_of_experts_stay_fp32(tmp_path):
    found = convert(make(BY_NAME["deepseek-v3"], tmp_path / "hf"), tmp_path / "ours")
    export_hf(found, tmp_path / "back", ExportOptions(dtype="bf16"))
    written = weights(tmp_path / "back")
    biases = {name for name, tensor in written.items() if tensor.dtype == torch.float32}
    assert biases == {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2)}


DEPTH_NAMES = {
    *("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight", "input_layernorm.weight"),
    *("post_attention_layernorm.weight", "self_attn.q_a_proj.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    *("mlp.gate.weight", "mlp.gate.e_score_correction_bias", "mlp.experts.7.up_proj.weight"),
    *("mlp.shared_experts.down_proj.weight", "self_attn.o_proj.weight"),
}


def test_prediction_depths_of_deepseek(tmp_path):
    """Under the layer numbers after the last, as DeepSeek-V3's own files; copies of embedding and head are not read."""
    from safetensors.torch import save_file

    found = convert(make(BY_NAME["deepseek-v3"], tmp_path / "hf"), tmp_path / "ours")
    config = Config.from_dict(found.metadata["args"]).replace(mtp_num_layers=1)
    model = build_model(config, ParallelContext(), "cpu")
    initialize(model, 5)
    state = {**ModelWeights(named_specs(model)).state(), **model.state()}
    items = {n if n.startswith("model/") else f"model/{n}": item.tensor for n, item in state.items()}
    (tmp_path / "run").mkdir()
    described = {name: meta(tuple(tensor.shape), tensor.dtype) for name, tensor in items.items()}
    write_checkpoint(tmp_path / "run", 3, described, items.__getitem__, {"args": config.to_dict()})
    export_hf(find_checkpoint(tmp_path / "run"), tmp_path / "out", ExportOptions())
    written = weights(tmp_path / "out")
    depth = {n.removeprefix("model.layers.3.") for n in written if n.startswith("model.layers.3.")}
    assert depth >= DEPTH_NAMES
    assert torch.equal(written["model.layers.3.enorm.weight"], items["model/mtp.0.embedding_norm.weight"])
    assert torch.equal(written["model.layers.3.eh_proj.weight"], items["model/mtp.0.eh_proj.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"] == 1
    copies = {
        "model.layers.3.embed_tokens.weight": written["model.embed_tokens.weight"].clone(),
        "model.layers.3.shared_head.head.weight": written["lm_head.weight"].clone(),
    }
    save_file(written | copies, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    again = convert(tmp_path / "out", tmp_path / "again")
    assert Config.from_dict(again.metadata["args"]).model.mtp_num_layers == 1
    with open_any(tmp_path / "run") as a, open_any(tmp_path / "again") as b:
        assert differences_of(a, b, lambda tensor: tensor) == []


def test_differences(tmp_path):
    def opened(name, tensors):
        (tmp_path / name).mkdir()
        described = {n: meta(tuple(t.shape), t.dtype) for n, t in tensors.items()}
        write_checkpoint(tmp_path / name, 0, described, tensors.__getitem__, {})
        return open_any(tmp_path / name)

    nan = torch.tensor([1.0, float("nan")])
    one = {"model/same": nan, "model/off": torch.ones(4), "model/shape": torch.ones(2), "model/mine": torch.ones(1),
           "model/dtype": torch.ones(3), "optimizer/step": torch.tensor(5)}  # fmt: skip
    two = {"model/same": nan, "model/off": torch.tensor([1, 1, 1, 1.5]), "model/shape": torch.ones(3),
           "model/dtype": torch.ones(3).bfloat16(), "model/theirs": torch.ones(1),
           "optimizer/step": torch.tensor(6)}  # fmt: skip
    with opened("a", one) as a, opened("b", two) as b:
        lines = differences_of(a, b, lambda tensor: tensor)
    assert lines == [
        "only in the first: model/mine",
        "only in the second: model/theirs",
        "model/dtype: torch.float32 and torch.bfloat16, equal values",
        "model/off: differ by 5.000e-01 at most, 2.500e-01 of the norm",
        "model/shape: shape [2] and [3]",
        "optimizer/step: 1 of 1 elements differ",
    ]


def test_values_name_file_and_key():
    hf = Values({"a": 3, "b": None, "c": "x", "d": 2.5, "e": {"f": 1}, "g": 0}, "config.json")
    assert hf.integer("a") == 3
    assert hf.integer("b", 7) == 7
    assert hf.integer("missing", None) is None
    assert hf.number("d") == 2.5
    assert hf.section("e").integer("f") == 1
    assert hf.section("missing").content == {}
    assert hf.count("g") == hf.count("missing") == 0
    for call, text in (
        (lambda: hf.integer("missing"), "config.json has no 'missing'"),
        (lambda: hf.integer("c"), "'c' is 'x', not an integer"),
        (lambda: hf.integer("g"), "'g' is '0', not an integer from 1"),
        (lambda: hf.flag("a", True), "'a' is '3', not true or false"),
        (lambda: hf.section("e").text("f"), "config.json: e: 'f' is '1', not a text"),
        (lambda: hf.require("c", "y", "z"), "'c' is 'x'; only y or z is built here"),
    ):
        with pytest.raises(ValueError, match="config.json") as caught:
            call()
        assert text in str(caught.value)
