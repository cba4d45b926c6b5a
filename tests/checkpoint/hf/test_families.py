"""Every family against transformers: logits after from-hf, the same bytes and a strict load after to-hf, and faults
that shapes don't show.

CASES 25, 26, 27, 28, 50, 84.
"""

import json
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from megafp8.checkpoint.hf import FAMILIES, family_for, family_of
from megafp8.checkpoint.hf import layouts as L
from megafp8.checkpoint.hf.family import differences
from megafp8.checkpoint.hf.values import Values
from megafp8.config import Config, parse_args
from megafp8.training.hf_export import ExportOptions, export_hf
from megafp8.training.hf_import import ARGS_FILE
from megafp8.training.hf_verify import largest_difference
from megafp8.training.inference import load_trained
from tests.checkpoint.hf.models import BY_NAME, CASES, TOKENS, VOCAB, assert_same_bytes, convert, make, weights


@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_and_back(case, tmp_path):
    """CASES 25, 26, 27, 50, 84: FP32 logits within 1e-4; from-hf, to-hf gives the same bytes and configuration."""
    source, target = make(case, tmp_path / "hf"), tmp_path / "back"
    found = convert(source, tmp_path / "ours")
    assert largest_difference(found, source, TOKENS) < 1e-4
    export_hf(found, target, ExportOptions(like=tmp_path / "ours" / "hf"))
    assert_same_bytes(weights(target), weights(source))
    assert json.loads((target / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert (target / "generation_config.json").exists()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_config_without_the_original(case, tmp_path):
    """A config.json made of our flags alone: transformers loads it strictly, and computes the same."""
    from transformers import AutoModelForCausalLM

    source, target = make(case, tmp_path / "hf"), tmp_path / "back"
    found = convert(source, tmp_path / "ours")
    export_hf(found, target, ExportOptions(family=json.loads((source / "config.json").read_text())["model_type"]))
    assert_same_bytes(weights(target), weights(source))
    model, info = AutoModelForCausalLM.from_pretrained(target, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    assert largest_difference(found, target, TOKENS) < 1e-4
    assert model.config.vocab_size == VOCAB
    untied = "lm_head.weight" in weights(source)
    assert model.config.tie_word_embeddings is not untied


@pytest.mark.parametrize(
    ("name", "family"),
    [("llama", "llama"), ("llama-biases", "llama"), ("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gpt2", "gpt2"),
     ("mixtral", "mixtral"), ("qwen3-moe", "qwen3_moe"), ("qwen3-moe-not-normalized", "qwen3_moe"),
     ("deepseek-v3", "deepseek_v3"), ("mistral", "mistral")],
)  # fmt: skip
def test_the_family_is_found_by_the_architecture(name, family, tmp_path):
    """A run that nobody converted: the first family that can say all that its flags say."""
    found = convert(make(BY_NAME[name], tmp_path / "hf"), tmp_path / "ours")
    config = Config.from_dict(found.metadata["args"])
    assert family_for(config).model_type == family


def test_what_a_run_changed_is_put_over_the_original(tmp_path):
    """Continued with longer positions and another theta: config.json says so, and keeps the rest."""
    source = make(BY_NAME["llama-3"], tmp_path / "hf")
    original = json.loads((source / "config.json").read_text()) | {"bos_token_id": 5, "note": "ours"}
    (source / "config.json").write_text(json.dumps(original))
    found = convert(source, tmp_path / "ours")
    content = json.loads(json.dumps(found.metadata))
    changes = {"rotary_base": 999.0, "use_rope_scaling": False, "max_position_embeddings": 128}
    content["args"]["config"]["model"].update(changes)
    longer = replace(found, metadata=content)
    export_hf(longer, tmp_path / "back", ExportOptions(like=source))
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 999.0}
    assert "rope_scaling" not in written
    assert (written["max_position_embeddings"], written["bos_token_id"], written["note"]) == (128, 5, "ours")
    assert largest_difference(longer, tmp_path / "back", TOKENS) < 1e-4


# ----------------------------------------------------------------------------------------------- faults, planted


def all_q_all_k_all_v(parts, model):
    return torch.cat(list(parts))


def up_gate(parts, model):
    return torch.stack(tuple(parts)[::-1])


def neighbours(parts, model):
    q, k, v = parts
    return L._group_qkv((L.rows_interleaved(q, model.kv_channels), L.rows_interleaved(k, model.kv_channels), v), model)


def groups_reversed(parts, model):
    q, k, v = parts
    flipped = [x.reshape(model.num_query_groups, -1, *x.shape[1:]).flip(0).reshape(x.shape) for x in (k, v)]
    return L._group_qkv((q, *flipped), model)


def _with_layout(family, field, join):
    """The family with another way to join the tensors of a rule."""
    rules = tuple(
        replace(rule, layout=replace(rule.layout, join=join)) if field in rule.ours else rule for rule in family.rules
    )
    return replace(family, rules=rules)


@pytest.mark.parametrize("fault", [None, all_q_all_k_all_v, neighbours, groups_reversed, up_gate])
def test_wrong_layouts_show_in_the_logits(fault, tmp_path, monkeypatch):
    """CASES 25, 26: wrong GQA grouping, rotary layout or gate/up order have the right shapes, and other logits."""
    source = make(BY_NAME["llama-8-heads-2-groups"], tmp_path / "hf")
    if fault:
        field = ".fc1." if fault is up_gate else ".qkv."
        monkeypatch.setitem(FAMILIES, "llama", _with_layout(FAMILIES["llama"], field, fault))
    difference = largest_difference(convert(source, tmp_path / "ours"), source, TOKENS)
    assert difference < 1e-4 if fault is None else difference > 1e-2


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v3"])
def test_permuted_experts_show_in_the_logits(name, tmp_path, monkeypatch):
    """CASES 27: experts 0 and 1 exchanged."""
    source = make(BY_NAME[name], tmp_path / "hf")
    family = family_of(Values(json.loads((source / "config.json").read_text())))

    def exchanged(rule):
        swap = {"0": "1", "1": "0"}
        if ".experts.{e}." not in rule.ours:
            return rule

        class Exchanged(type(rule)):
            def names(self, ours, model):
                found = super().names(ours, model)
                if found is None:
                    return None
                number = ours.split(".experts.")[1].split(".")[0]
                return tuple(n.replace(f".experts.{number}.", f".experts.{swap.get(number, number)}.") for n in found)

        return Exchanged(rule.ours, rule.theirs, rule.layout)

    monkeypatch.setitem(
        FAMILIES, family.model_type, replace(family, rules=tuple(exchanged(rule) for rule in family.rules))
    )
    assert largest_difference(convert(source, tmp_path / "ours"), source, TOKENS) > 1e-2


@pytest.mark.parametrize("name", ["llama-8-heads-2-groups", "qwen3", "qwen2"])
def test_a_run_with_interleaved_rotation_exports(name, tmp_path):
    """Rows of q and k, their biases and their norms are put in the order that files have."""
    source = make(BY_NAME[name], tmp_path / "hf")
    found = convert(source, tmp_path / "ours")
    content = json.loads(json.dumps(found.metadata))
    content["args"]["config"]["model"]["rotary_interleaved"] = True
    other = replace(found, metadata=content)  # the same numbers, so another model
    assert largest_difference(other, source, TOKENS) > 1e-2
    export_hf(other, tmp_path / "back", ExportOptions())
    assert largest_difference(other, tmp_path / "back", TOKENS) < 1e-4


def test_every_expert_lies_where_its_number_says(tmp_path):
    """CASES 27: expert e filled with e, in and out."""
    source = make(BY_NAME["qwen3-moe"], tmp_path / "hf")
    tensors = weights(source)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensor.fill_(float(name.split(".experts.")[1].split(".")[0]))
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    found = convert(source, tmp_path / "ours")
    with safe_open(found.directory / "model-00000.safetensors", "pt") as opened:
        experts = [name for name in opened.keys() if ".experts." in name]  # noqa: SIM118
        assert len(experts) == 2 * 6 * 2
        for name in experts:
            tensor = opened.get_tensor(name)
            assert (tensor == float(name.split(".experts.")[1].split(".")[0])).all(), name
    export_hf(found, tmp_path / "back", ExportOptions())
    assert_same_bytes(weights(tmp_path / "back"), tensors)


def test_model_args_are_flags(tmp_path):
    """What from-hf writes for --config parses, and makes the same architecture."""
    found = convert(make(BY_NAME["deepseek-v3-yarn"], tmp_path / "hf"), tmp_path / "ours")
    flags = ["--config", str(tmp_path / "ours" / ARGS_FILE), "--seq-length", "32", "--micro-batch-size", "1"]
    flags += ["--train-iters", "1", "--lr", "1e-3", "--mock-data", "--tokenizer-type", "NullTokenizer"]
    config = parse_args([*flags, "--vocab-size", str(VOCAB - 1)])
    assert not differences(config, Config.from_dict(found.metadata["args"]))


def test_a_converted_deepseek_runs_in_the_tools(tmp_path):
    """generate_text.py and evaluate.py load it: the experts' biases, which are no parameters, come along."""
    source = make(BY_NAME["deepseek-v3"], tmp_path / "hf")
    trained = load_trained(convert(source, tmp_path / "ours").directory, torch.device("cpu"))
    stored = weights(source)
    for number, router in zip((1, 2), trained.model.routers(), strict=True):
        assert torch.equal(router.expert_bias, stored[f"model.layers.{number}.mlp.gate.e_score_correction_bias"])
        assert router.expert_bias.abs().max() > 0
