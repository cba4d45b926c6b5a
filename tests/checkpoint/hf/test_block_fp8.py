"""Block-FP8 files in and out: ragged grids, the run's own bytes, and refusals. CASES 86."""

import json

import pytest
import torch
from safetensors.torch import save_file

from megafp8.checkpoint import find_checkpoint
from megafp8.checkpoint.hf.block_fp8 import BlockFP8, carry_over, dequantize, expand, grid
from megafp8.checkpoint.hf.layouts import QKV, SAME, STACKED
from megafp8.checkpoint.hf.rules import Rule, make_plan
from megafp8.checkpoint.hf.values import Values
from megafp8.config import parse_args
from megafp8.config.model import ModelConfig
from megafp8.fp8 import get_recipe
from megafp8.step import Phase, StepContext
from megafp8.training.hf_export import ExportOptions, export_hf
from megafp8.training.hf_import import ARGS_FILE
from megafp8.training.inference import load_trained
from tests.checkpoint.hf.models import LLAMA, VOCAB, Case, assert_same_bytes, convert, make, weights

SCALE = "weight_scale_inv"
ALIGNED = Case("aligned", "Llama", {**LLAMA, "head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
                                    "intermediate_size": 256})  # fmt: skip
RAGGED = Case("ragged", "Llama", {**LLAMA, "intermediate_size": 172})
RUN = {"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "blockwise"}


def blockwise(x, **axes):
    row = get_recipe("blockwise", **axes).quantizer("weight").quantize(x).rowwise
    return row.data, row.scale_inv.contiguous()


@pytest.mark.parametrize("shape", [(576, 2048), (100, 130), (128, 128), (1, 1), (129, 257)])
def test_ragged_grids(shape):
    """CASES 86: ceil(N / 128) x ceil(K / 128) scales, to be multiplied by; error within half a step."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    data, scale_inv = blockwise(x)
    assert scale_inv.shape == grid(shape) == (-(-shape[0] // 128), -(-shape[1] // 128))
    back = dequantize(data, scale_inv)
    assert torch.equal(back, data.float() * expand(scale_inv, shape))
    # E4M3: 3 mantissa bits, so half a step is 2^-4 of the value, or half of the smallest subnormal 2^-9
    bound = torch.maximum(x.float().abs() * 2**-4, expand(scale_inv, shape) * 2**-10)
    assert ((back - x.float()).abs() <= bound).all()


def as_run(found, **fields):
    """The same checkpoint as if a run with other flags had saved it."""
    content = json.loads(json.dumps(found.metadata))
    for group in content["args"]["config"].values():
        group.update({name: value for name, value in fields.items() if name in group})
    return type(found)(found.directory, found.iteration, content)


def test_an_aligned_run_exports_the_bytes_it_trains_with(tmp_path):
    """Every part of qkv and fc1 is whole tiles: the file holds the run's bytes and scales, cut, not rounded again."""
    found = as_run(convert(make(ALIGNED, tmp_path / "hf", dtype=torch.bfloat16), tmp_path / "ours"), **RUN)
    notes = export_hf(found, tmp_path / "fp8", ExportOptions(fp8=True))
    assert any("exactly the FP8 bytes" in note for note in notes)
    written = weights(tmp_path / "fp8")
    model = load_trained(tmp_path / "ours", torch.device("cpu"), **RUN).model
    layer = model.layers[0]
    qkv = layer.attention.qkv._own_weight().operand("fprop")
    fc1 = layer.mlp.fc1._own_weight().operand("fprop")
    for name, storage, rows in (
        ("self_attn.q_proj", qkv, slice(0, 256)),
        ("self_attn.k_proj", qkv, slice(256, 384)),
        ("self_attn.v_proj", qkv, slice(384, 512)),
        ("mlp.gate_proj", fc1, slice(0, 256)),
        ("mlp.up_proj", fc1, slice(256, 512)),
        ("mlp.down_proj", layer.mlp.fc2._own_weight().operand("fprop"), slice(None)),
        ("self_attn.o_proj", layer.attention.proj._own_weight().operand("fprop"), slice(None)),
    ):
        data = written[f"model.layers.0.{name}.weight"]
        scale = written[f"model.layers.0.{name}.{SCALE}"]
        assert torch.equal(data.view(torch.uint8), storage.data[rows].view(torch.uint8)), name
        start = (rows.start or 0) // 128
        assert torch.equal(scale, storage.scale_inv[start : start + scale.shape[0]]), name
    assert written["model.embed_tokens.weight"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8"
    assert config["weight_block_size"] == [128, 128]
    assert config["modules_to_not_convert"] == ["lm_head"]


def test_transformers_dequantizes_alike(tmp_path):
    """An independent reader of such files gets the very values."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    found = as_run(convert(make(ALIGNED, tmp_path / "hf", dtype=torch.bfloat16), tmp_path / "ours"), **RUN)
    export_hf(found, tmp_path / "fp8", ExportOptions(fp8=True))
    how = transformers.FineGrainedFP8Config(dequantize=True, modules_to_not_convert=["lm_head"])
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", quantization_config=how, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    written, checked = weights(tmp_path / "fp8"), 0
    for name, tensor in model.state_dict().items():
        if (scale := name.removesuffix("weight") + SCALE) in written:
            assert torch.equal(tensor, dequantize(written[name], written[scale])), name
            checked += 1
    assert checked == 14


def test_training_and_inference_agree_bitwise(tmp_path):
    """A run's logits, and those of its FP8 export loaded again, run through the same forward."""
    found = as_run(convert(make(ALIGNED, tmp_path / "hf", dtype=torch.bfloat16), tmp_path / "ours"), **RUN)
    export_hf(found, tmp_path / "fp8", ExportOptions(fp8=True))
    again = convert(tmp_path / "fp8", tmp_path / "again")
    assert again.metadata["args"]["config"]["fp8"]["fp8_recipe"] == "blockwise"
    tokens = torch.randint(VOCAB, (2, 32), generator=torch.Generator().manual_seed(3))
    step = StepContext(phase=Phase.EVAL)
    with torch.no_grad():
        trained = load_trained(tmp_path / "ours", torch.device("cpu"), **RUN).model(tokens, step=step)
        served = load_trained(tmp_path / "again", torch.device("cpu")).model(tokens, step=step)
        plain = load_trained(tmp_path / "ours", torch.device("cpu")).model(tokens, step=step)
    assert torch.equal(trained, served)
    assert not torch.equal(trained, plain)
    export_hf(again, tmp_path / "fp8-again", ExportOptions(fp8=True, like=tmp_path / "fp8"))
    assert_same_bytes(weights(tmp_path / "fp8-again"), weights(tmp_path / "fp8"))


def test_a_ragged_run_is_quantized_again_and_says_so(tmp_path):
    """Heads of 8 channels share tiles: q, k and v are quantized on their own; fc2 and proj stay the run's."""
    found = as_run(convert(make(RAGGED, tmp_path / "hf", dtype=torch.bfloat16), tmp_path / "ours"), **RUN)
    (note,) = [n for n in export_hf(found, tmp_path / "fp8", ExportOptions(fp8=True)) if "quantized again" in n]
    # The 96 rows of all heads lie in one tile, so q, k and v keep its scale; up starts within a tile of gate.
    assert "2 of 14 weights" in note
    assert "up_proj" in note
    written, original = weights(tmp_path / "fp8"), weights(tmp_path / "hf")
    name = "model.layers.1.mlp.up_proj"
    data, scale_inv = blockwise(original[f"{name}.weight"])
    assert torch.equal(written[f"{name}.weight"].view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(written[f"{name}.{SCALE}"], scale_inv)
    for name, tensor in original.items():
        stored = written[name]
        if stored.dtype == torch.float8_e4m3fn:
            back = dequantize(stored, written[name.removesuffix("weight") + SCALE])
            assert ((back - tensor.float()).norm() / tensor.float().norm()) < 0.04, name
        else:
            assert torch.equal(stored, tensor), name


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"bf16": True}, "trained in high precision"),
        ({"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}, "with recipe tensorwise"),
        ({"bf16": True, "fp8_format": "e4m3", "fp8_recipe": "mxfp8"}, "with recipe mxfp8"),
    ],
)
def test_other_runs_are_quantized_after_training(tmp_path, fields, text):
    found = as_run(convert(make(ALIGNED, tmp_path / "hf", dtype=torch.bfloat16), tmp_path / "ours"), **fields)
    notes = export_hf(found, tmp_path / "fp8", ExportOptions(fp8=True))
    assert any(text in note and "never computed with" in note for note in notes)
    original = weights(tmp_path / "hf")["model.layers.1.mlp.gate_proj.weight"]
    data, scale_inv = blockwise(original)
    written = weights(tmp_path / "fp8")
    assert torch.equal(written["model.layers.1.mlp.gate_proj.weight"].view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(written[f"model.layers.1.mlp.gate_proj.{SCALE}"], scale_inv)


def test_linears_kept_in_bf16_stay_so_both_ways(tmp_path):
    fields = {**RUN, "keep_modules_in_bf16": ["layers.0.*"]}
    found = as_run(convert(make(ALIGNED, tmp_path / "hf", dtype=torch.bfloat16), tmp_path / "ours"), **fields)
    export_hf(found, tmp_path / "fp8", ExportOptions(fp8=True))
    written = weights(tmp_path / "fp8")
    assert written["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
    assert written["model.layers.1.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.up_proj" in config["modules_to_not_convert"]
    assert "model.layers.1.mlp.up_proj" not in config["modules_to_not_convert"]
    again = convert(tmp_path / "fp8", tmp_path / "again").metadata["args"]["config"]["fp8"]
    assert sorted(again["keep_modules_in_bf16"]) == [
        "layers.0.attention.proj", "layers.0.attention.qkv", "layers.0.mlp.fc1", "layers.0.mlp.fc2",
    ]  # fmt: skip


def test_linears_too_small_for_fp8_stay_so_both_ways(tmp_path):
    """The file says what is FP8: what it holds in it runs in it, whatever its size."""
    fields = {**RUN, "small_linears_in_bf16": ["attention.proj"]}
    found = as_run(convert(make(ALIGNED, tmp_path / "hf", dtype=torch.bfloat16), tmp_path / "ours"), **fields)
    export_hf(found, tmp_path / "fp8", ExportOptions(fp8=True))
    written = weights(tmp_path / "fp8")
    assert written["model.layers.0.self_attn.o_proj.weight"].dtype == torch.bfloat16
    assert written["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    again = convert(tmp_path / "fp8", tmp_path / "again").metadata["args"]["config"]["fp8"]
    assert {name.split(".", 2)[2] for name in again["keep_modules_in_bf16"]} == {"attention.proj"}
    assert (again["fp8_small_linears"], again["small_linears_in_bf16"]) == ("fp8", [])


def test_deepseek_scales_with_any_fp32_value(tmp_path):
    """A file as DeepSeek-V3's: FP32 scales, no power of two. Values are bytes times scales, rounded to BF16; quantized
    again they give the same bytes, and scales as near as BF16 is."""
    source = make(ALIGNED, tmp_path / "hf", dtype=torch.bfloat16)
    tensors = weights(source)
    for name in [n for n in tensors if n.endswith("_proj.weight")]:
        tensors[name], scale = blockwise(tensors[name], power_of_two_scales=False)
        tensors[name.removesuffix("weight") + SCALE] = scale
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (source / "config.json").write_text(json.dumps(config))
    found = convert(source, tmp_path / "ours")
    exported = tmp_path / "bf16"
    export_hf(found, exported, ExportOptions(like=source))
    assert "quantization_config" not in json.loads((exported / "config.json").read_text())
    name = "model.layers.0.self_attn.q_proj"
    expected = dequantize(tensors[f"{name}.weight"], tensors[f"{name}.{SCALE}"]).bfloat16()
    assert torch.equal(weights(exported)[f"{name}.weight"], expected)
    flags = ["--config", str(tmp_path / "ours" / ARGS_FILE), "--mock-data", "--tokenizer-type", "NullTokenizer"]
    flags += ["--vocab-size", str(VOCAB - 1), "--seq-length", "32", "--micro-batch-size", "1", "--lr", "1e-3"]
    config = parse_args([*flags, "--train-iters", "1"])
    assert config.fp8.fp8_power_of_two_scales is False
    assert config.fp8.fp8_recipe == "blockwise"
    export_hf(found, tmp_path / "fp8", ExportOptions(fp8=True))
    for key, tensor in weights(tmp_path / "fp8").items():
        if key.endswith(SCALE):
            torch.testing.assert_close(tensor, tensors[key], rtol=2**-8, atol=0)
        else:
            assert torch.equal(tensor.view(torch.uint8), tensors[key].view(torch.uint8)), key


def _plan(ours, theirs, layout, shape, model):
    (entry,) = make_plan([Rule(ours, theirs, layout)], {ours: shape}, model)
    return entry


def test_carry_over_finds_what_can_be_kept():
    model = ModelConfig(num_query_groups=2, kv_channels=64)
    data = torch.randn(2 * 4 * 64, 200).to(torch.float8_e4m3fn)
    scales = torch.rand(4, 2)
    entry = _plan("w", ("q", "k", "v"), QKV, (512, 200), model)  # a group: 128 rows of q, 64 of k, 64 of v
    q, k, v = carry_over(entry, data, scales, model)
    assert torch.equal(q[0].view(torch.uint8), torch.cat([data[:128], data[256:384]]).view(torch.uint8))
    assert torch.equal(q[1], scales[[0, 2]])
    assert k is None
    assert v is None
    entry = _plan("w", ("gate", "up"), STACKED, (2, 100, 200), model)
    gate, up = carry_over(entry, data[:200].reshape(2, 100, 200), scales[:2], model)
    assert torch.equal(gate[1], scales[[0]])
    assert up is None
    entry = _plan("w", "w", SAME, (300, 200), model)
    ((kept, kept_scales),) = carry_over(entry, data[:300], scales[:3], model)
    assert torch.equal(kept.view(torch.uint8), data[:300].view(torch.uint8))
    assert torch.equal(kept_scales, scales[:3])


def test_gpt2_has_no_block_fp8(tmp_path):
    from tests.checkpoint.hf.models import BY_NAME

    found = convert(make(BY_NAME["gpt2"], tmp_path / "hf"), tmp_path / "ours")
    with pytest.raises(ValueError, match="--fp8: gpt2 stores its matrices turned"):
        export_hf(found, tmp_path / "fp8", ExportOptions(fp8=True))
    assert not (tmp_path / "fp8").exists()


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"quant_method": "gptq"}, "'quant_method' is 'gptq'"),
        ({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}, "'fmt' is 'e5m2'"),
        ({"quant_method": "fp8"}, "'weight_block_size' None"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size"),
        ("fp8", "not an object"),
    ],
)
def test_other_quantizations_are_refused(section, text):
    with pytest.raises(ValueError, match=text):
        BlockFP8.of(Values({"quantization_config": section}))


@pytest.mark.parametrize("damage", ["no scales", "another grid", "another dtype", "scales without a weight"])
def test_scales_must_fit(tmp_path, damage):
    found = as_run(convert(make(RAGGED, tmp_path / "hf", dtype=torch.bfloat16), tmp_path / "ours"), **RUN)
    export_hf(found, tmp_path / "fp8", ExportOptions(fp8=True))
    tensors = weights(tmp_path / "fp8")
    name = f"model.layers.0.mlp.up_proj.{SCALE}"
    if damage == "no scales":
        del tensors[name]
    if damage == "another grid":
        tensors[name] = torch.ones(1, 1)
    if damage == "another dtype":
        tensors[name] = tensors[name].to(torch.int32)
    if damage == "scales without a weight":
        tensors[f"model.layers.0.mlp.other.{SCALE}"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "fp8" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="up_proj|other"):
        convert(tmp_path / "fp8", tmp_path / "again")
    assert not (tmp_path / "again").exists()
    assert find_checkpoint(tmp_path / "ours") is not None
