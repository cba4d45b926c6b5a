"""Linears that FP8 would slow down stay in BF16: by the shipped measurements, from the configuration alone."""

import json

import pytest
import torch

from megafp8.config import Config, crossover, parse_args, with_vocab_size
from megafp8.fp8 import policy
from megafp8.plan.conversions import conversions
from megafp8.plan.memory import plan_memory
from megafp8.plan.summary import dry_run, module_lines
from megafp8.training.opening import fp8_lines

GROUPS = "--group-query-attention --num-query-groups 2 "
FLAGS = (
    "--num-layers 2 --hidden-size 1024 --ffn-hidden-size 3584 --num-attention-heads 8 --swiglu "
    f"{GROUPS}"
    "--disable-bias-linear --seq-length 1024 --micro-batch-size 2 --train-iters 1 --lr 0 --bf16 --mock-data "
    "--fp8-format e4m3 --tokenizer-type NullTokenizer --vocab-size 99"
)
QKV, PROJ, FC1, FC2, EXPERT = "attention.qkv", "attention.proj", "mlp.fc1", "mlp.fc2", "mlp.experts.0.fc1"
ALL = {QKV, PROJ, FC1, FC2, EXPERT}
ATTENTION = {QKV, PROJ}


def config_of(text="", world=1, flags=FLAGS):
    env = {"WORLD_SIZE": str(world)}
    return with_vocab_size(parse_args([*flags.split(), *text.split()], env=env), 99)


def in_bf16(text="", world=1):
    recipe_of = policy.from_config(config_of(text, world))
    return {name for name in ALL if recipe_of(f"layers.1.{name}") is None}


HYBRID = "--fp8-format hybrid"
HALF = "--hidden-size 512 --ffn-hidden-size 2048"
WIDE = "--hidden-size 2048 --ffn-hidden-size 7168"
TP2, CP4 = "--tensor-model-parallel-size 2", "--context-parallel-size 4"


@pytest.mark.parametrize(
    ("flags", "world", "found"),
    [
        ("", 1, ATTENTION),
        (HYBRID, 1, ATTENTION),  # fc2: 0.997, as good as 1
        ("--micro-batch-size 32", 1, {PROJ}),
        (HALF, 1, {QKV, PROJ, FC2}),
        ("--hidden-size 256 --ffn-hidden-size 512 --kv-channels 32", 1, set()),  # that small nothing was measured
        ("--num-query-groups 8", 1, {PROJ}),  # 3072 x 1024: between 1536 x 1024, slower, and wider ones, faster
        ("--seq-length 256", 1, ATTENTION),  # as at the fewest tokens that were measured
        ("--seq-length 128 --micro-batch-size 1024", 1, {PROJ}),  # as at the most
        (WIDE, 1, set()),
        (f"{WIDE} {TP2} --kv-channels 128 --num-query-groups 8", 2, {PROJ}),  # 2048 x 512 of a rank: as 1024 x 1024
        (f"{CP4} --micro-batch-size 16", 4, ATTENTION),  # 4096 tokens of a rank
        ("--fp8-recipe mxfp8", 1, set()),
        (f"{HYBRID} --fp8-recipe delayed", 1, set()),
        ("--fp8-small-linears bf16", 1, ATTENTION),
        ("--fp8-small-linears fp8", 1, set()),
        (f"{HYBRID} --fp8-small-linears fp8", 1, set()),
        ("--fp8-module-recipes *.qkv=blockwise", 1, {PROJ}),
        ("--fp8-module-recipes layers.0.*=tensorwise", 1, ATTENTION),  # another layer
        ("--keep-modules-in-bf16 *.fc2", 1, {QKV, PROJ, FC2}),
        ("--fp8-small-linears fp8 --fp8-module-recipes *.proj=bf16", 1, {PROJ}),
    ],
)
def test_which_linears_stay_in_bf16(flags, world, found):
    assert in_bf16(flags, world) == found


def test_of_the_shipped_measurements():
    """Whatever was measured decides at its own sizes."""
    assert crossover.table().gpu == "NVIDIA H200"
    assert set(crossover.table().recipes) == {"blockwise", "tensorwise"}
    for recipe, rows in crossover.table().recipes.items():
        for tokens, wide, deep, found, *_ in rows:
            assert crossover.speed(recipe, tokens, wide, deep) == found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_gpu_that_runs_does_not_matter(monkeypatch, device):
    """Nor whether there is one: nobody is asked."""
    for name in ("is_available", "get_device_name", "get_device_properties", "get_device_capability"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: pytest.fail(f"{name} was asked"))
    assert in_bf16(f"--device {device}") == ATTENTION


@pytest.fixture
def measured(monkeypatch):
    """Other measurements: small linears lose, and all at few tokens do."""
    rows = [[128, 1536, 512, 0.8, 1.1], [128, 512, 512, 0.9], [128, 4096, 512, 1.2], [128, 512, 2048, 1.0]]
    rows += [[8, wide, deep, 0.5] for wide, deep in ((1536, 512), (512, 512), (4096, 512), (512, 2048))]
    monkeypatch.setattr(crossover, "table", lambda: crossover.Measured("G", {"blockwise": rows}))
    return "--hidden-size 512 --ffn-hidden-size 2048 --num-query-groups 8 --micro-batch-size 1 --seq-length"


@pytest.mark.parametrize(
    ("tokens", "found"),
    [(128, ATTENTION), (4, ALL - {EXPERT}), (999, ATTENTION), (64, ATTENTION), (62, set()), (17, set())],
)
def test_by_the_nearest_that_is_near(measured, tokens, found):
    """Fewer tokens than were measured count as the fewest, more as the most; what lies between is near one or not."""
    assert in_bf16(f"{measured} {tokens}") == found


def test_measurements_that_are_equally_near_count_alike(monkeypatch):
    """Whatever their order in the file."""
    rows = [[1024, 1024, 1024, 0.5], [4096, 1024, 1024, 2.0], [4096, 4096, 1024, 9.0]]
    for order in (rows, rows[::-1]):
        monkeypatch.setattr(crossover, "table", lambda order=order: crossover.Measured("G", {"blockwise": order}))
        assert crossover.speed("blockwise", 2048, 1024, 1024) == pytest.approx(1.0)
        assert crossover.speed("blockwise", 1024, 1024, 1024) == pytest.approx(0.5)
        assert crossover.speed("blockwise", 2048, 400, 1024) is None


def test_the_first_gpu_of_the_file_counts(monkeypatch, tmp_path):
    path = tmp_path / "crossover.json"
    monkeypatch.setattr(crossover, "TABLE", path)
    monkeypatch.setattr(crossover, "table", crossover.table.__wrapped__)  # asked anew
    rows = [[2048, 1024, 1024, 1.5, 1.5]]
    path.write_text(json.dumps({"B": {"blockwise": rows}, "A": {"blockwise": [[*rows[0][:3], 0.5, 0.5]]}}))
    assert crossover.table().gpu == "B"
    assert in_bf16() == set()
    path.write_text("{}")
    assert in_bf16() == set()


def test_latent_attention_has_no_qkv():
    """Its projections down and up were not measured; the last one is like any other's."""
    latent = "--multi-latent-attention --q-lora-rank 256 --kv-lora-rank 256 --qk-head-dim 128 --qk-pos-emb-head-dim 64"
    latent = f"--position-embedding-type rope {latent} --v-head-dim 128"
    config = config_of(latent, flags=FLAGS.replace(GROUPS, ""))
    assert config.fp8.small_linears_in_bf16 == (PROJ,)
    recipe_of = policy.from_config(config)
    assert all(recipe_of(f"layers.0.attention.{part}") for part in ("q_down", "q_up", "kv_down", "kv_up"))


LINE = (
    "attention.proj stays in BF16: at 2048 tokens, 1024 x 1024, FP8 (blockwise) has 0.73 of BF16's speed, by what was "
    "measured near it on NVIDIA H200 (--fp8-small-linears fp8: FP8 anyway)"
)


def test_it_is_said_once_with_the_numbers_and_the_flag():
    lines = fp8_lines(config_of(), torch.device("cpu"))
    assert lines.count(LINE) == 1
    assert sum("stays in BF16" in line for line in lines) == 2
    assert lines[0].startswith("precision: 4 of 9 linears in FP8, the rest bf16")
    report = dry_run(config_of())
    assert report.count(LINE) == 1
    assert "4 of 9 linears run in FP8" in report


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--fp8-small-linears fp8", set()),
        ("--keep-modules-in-bf16 *.proj", {QKV}),  # said by the list
        ("--fp8-module-recipes *.proj=tensorwise", {QKV}),
        ("--num-experts 4 --moe-ffn-hidden-size 512", ATTENTION),
        (f"{HYBRID} --num-experts 4 --moe-ffn-hidden-size 512", ATTENTION),  # no fc2 but the experts'
        ("--hidden-size 128 --ffn-hidden-size 256", set()),
    ],
)
def test_nothing_is_said_of_what_it_does_not_decide(flags, parts):
    lines = [line for line in module_lines(config_of(flags)) if "stays in BF16" in line]
    assert {line.split()[0] for line in lines} == parts


def test_what_is_planned_is_that_of_linears_named_one_by_one():
    """Memory and the ledger of conversions."""
    named = config_of("--fp8-small-linears fp8 --fp8-module-recipes *.attention.qkv=bf16 *.attention.proj=bf16")
    every = config_of("--fp8-small-linears fp8")
    small = config_of()
    assert plan_memory(small) == plan_memory(named) != plan_memory(every)
    assert conversions(small) == conversions(named) != conversions(every)
    assert not any("attention.proj" in c.place for c in conversions(small))


def test_arguments_remember_what_was_decided(monkeypatch):
    """And those of before the flag say that all was FP8."""
    config = config_of()
    saved = json.loads(config.to_json())
    monkeypatch.setattr(crossover, "table", lambda: crossover.Measured("G", {}))
    assert Config.from_dict(saved).fp8.small_linears_in_bf16 == ("attention.qkv", "attention.proj")
    for name in ("fp8_small_linears", "small_linears_in_bf16"):
        del saved["config"]["fp8"][name]
    assert Config.from_dict(saved) == config.replace(small_linears_in_bf16=())
