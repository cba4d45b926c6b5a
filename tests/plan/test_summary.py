"""The report of `--dry-run`."""

import re

import pytest

from megafp8.config import build_config
from megafp8.plan.summary import configuration_lines, dry_run, memory_lines, module_lines, parameter_lines, stage_lines

FP8 = {"bf16": True, "fp8_format": "e4m3"}


def test_modules_with_their_precision(make):
    """CASES 74: which layers run in FP8 and which in BF16; like layers share a line."""
    text = module_lines(
        make("llama", num_layers=6, first_last_layers_bf16=True, keep_modules_in_bf16=("*.fc2",), **FP8)
    )
    rows = {line.split()[0]: line for line in text}
    assert rows["layers.0.attention.qkv"].endswith("bf16")
    assert "fp8 blockwise: input e4m3 1x128, weight e4m3 128x128, grad_output e4m3 1x128" in rows["layers.1-4.mlp.fc1"]
    assert "[128, 64]" in rows["layers.1-4.attention.qkv"]
    assert rows["layers.0-5.mlp.fc2"].endswith("bf16")
    assert rows["layers.5.mlp.fc1"].endswith("bf16")
    assert rows["lm_head"].endswith("bf16")
    assert rows["embedding.word_embeddings"].endswith("bf16")
    assert text[-1].startswith("12 of 25 linears run in FP8")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"fp8_format": "hybrid"}, "tensorwise: input e4m3 tensor, weight e4m3 tensor, grad_output e5m2 tensor; fp32"),
        ({"fp8_format": "e4m3", "fp8_recipe": "mxfp8"}, "mxfp8: input e4m3 1x32, weight e4m3 32x32"),
        ({"fp8_format": "e4m3", "fp8_weight_tile": "1d"}, "weight e4m3 1x128"),
        ({"fp8_format": "e4m3", "fp8_power_of_two_scales": False}, "; fp32 scales"),
    ],
)
def test_recipes_in_words(make, values, words):
    assert any(words in line for line in module_lines(make("llama", bf16=True, **values)))


def test_parameters_in_words(make):
    assert re.search(r"^total .*\(0\.\d{3} million\)$", "\n".join(parameter_lines(make("llama", bf16=True))), re.M)


def test_without_fp8_everything_is_high_precision(make):
    assert all("fp8" not in line for line in module_lines(make("llama")))
    assert module_lines(make("llama"))[-1].startswith("0 of 13 linears run in FP8")


def test_given_and_derived_values_are_marked(make):
    lines = {line.split()[1]: line for line in configuration_lines(make("llama", bf16=True)) if len(line.split()) > 2}
    assert lines["hidden-size"].startswith(" * ")
    assert lines["kv-channels"].startswith(" + ")
    assert lines["disable-bias-linear"].startswith(" * ")
    assert lines["disable-bias-linear"].endswith("True")
    assert any(line.startswith("   seed") and line.endswith("1234") for line in configuration_lines(make()))


def test_parameters_and_padding(make):
    text = "\n".join(parameter_lines(make("llama")))
    assert "257 tokens in 384 rows" in text
    assert f"{(384 - 257) * 64 * 2:,}" in text


def test_memory_table_adds_up(make):
    lines = memory_lines(make("llama", **FP8))
    rows = [(line, float(line.split()[-2].replace(",", ""))) for line in lines if line.endswith("MiB")]
    owners = [number for line, number in rows if not line.startswith(" ")]
    assert sum(owners[:-1]) == pytest.approx(owners[-1], abs=0.05 * len(owners))
    by_module = [number for line, number in rows if line.startswith("  ")]
    held = next(number for line, number in rows if line.startswith("held at the peak"))
    assert sum(by_module) == pytest.approx(held, abs=0.05 * len(by_module))


def test_memory_of_every_stage(make):
    """In a pipeline a line a stage, and the details of the one that needs most."""
    values = {"num_layers": 8, "pipeline_model_parallel_size": 4, "global_batch_size": 32, "world_size": 4}
    lines = memory_lines(make("llama", **FP8 | values))
    stages = [line.split() for line in lines[1:5]]
    assert [(row[0], row[6]) for row in stages] == [("0", "4"), ("1", "3"), ("2", "2"), ("3", "1")]
    assert lines[5] == "stage 0, the largest:"
    assert any(line.startswith("held at the peak, 4 microbatches x stages") for line in lines)


def test_whole_report(make):
    config = make("llama", **FP8)
    again = build_config(env={}, **config.given)  # as parse_args gives it: the vocabulary not yet known
    text = dry_run(again)
    for title in ("configuration", "notes", "modules", "parameters", "memory of one rank", "work"):
        assert f"== {title}" in text
    assert "64 tokens an iteration, in 1 microbatch(es) a rank" in text
    assert max(map(len, text.splitlines())) < 160


def test_a_wrong_pattern_ends_the_dry_run(make):
    config = build_config(env={}, **make("llama", keep_modules_in_bf16=("layer.0.*",), **FP8).given)
    with pytest.raises(ValueError, match="'layer.0.\\*' matches no linear"):
        dry_run(config)


def test_pipeline_stages(make):
    config = make("llama", num_layers=8)
    assert stage_lines(config) == []
    config = config.replace(num_virtual_stages_per_pipeline_rank=2, pipeline_model_parallel_size=2)
    assert stage_lines(config)[:2] == [
        "rank 0    embedding, layers 0-1; layers 4-5",
        "rank 1    layers 2-3; layers 6-7, loss",
    ]
