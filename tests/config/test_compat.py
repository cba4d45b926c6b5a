"""Flags that people's scripts carry each have a verdict, and are met accordingly (FLAGS of public scripts)."""

import shlex
import typing
from pathlib import Path

import pytest

from megafp8.config import build_parser, compat, parse_args
from megafp8.config.config import GROUPS, field_table, flag_of, has_flag
from megafp8.config.flags import spec_of, value_type
from megafp8.config.parallel import layout_sizes
from tests.config.scripts import MENDS, SCRIPTS, mended, processes, script

ASSETS = Path(__file__).parent / "assets"
FLAGS = [line for line in (ASSETS / "flags.txt").read_text().split("\n") if line.startswith("--")]


def sample(flag: str) -> str:
    """The flag with plausible values, of which a refused or not-yet one has an effect."""
    for entry in compat.FOREIGN:
        if entry.flag == flag:
            return f"{flag} {'7' if entry.nargs else ''}"
    name = next(n for n in field_table() if has_flag(n) and flag_of(n) == flag)
    spec, default = spec_of(field_table()[name][1]), field_table()[name][1].default
    if isinstance(default, bool):
        return flag
    if spec.choices:
        return f"{flag} {spec.choices[-1]}"
    return f"{flag} 4"


def test_list_is_whole():
    assert len(FLAGS) == len(set(FLAGS)) == 249


@pytest.mark.parametrize("flag", FLAGS)
def test_every_flag_has_a_verdict(flag):
    assert compat.verdict(flag) in ("supported", "accepted", "refused", "not yet")


def test_no_flag_has_two_verdicts():
    ours = {flag_of(name) for name in field_table() if has_flag(name)}
    foreign = [entry.flag for entry in compat.FOREIGN]
    assert len(foreign) == len(set(foreign))
    assert not ours & set(foreign)


@pytest.mark.parametrize("flag", [f for f in FLAGS if compat.verdict(f) == "accepted"])
def test_accepted_flags_change_nothing_and_leave_one_log_line(parse, flag):
    plain, with_flag = parse(), parse(sample(flag))
    assert with_flag == plain
    assert with_flag.given == plain.given
    assert len(with_flag.notes) == 1
    assert with_flag.notes[0].startswith(flag)
    assert "without effect" in with_flag.notes[0]


def test_all_refused_flags_are_told_at_once(parse):
    """Nobody wants to start a long script ten times to learn which ten flags to drop."""
    with pytest.raises(ValueError, match="--fp16: .*; --batch-size 4: ") as error:
        parse("--fp16 --batch-size 4")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flag", [f for f in FLAGS if compat.verdict(f) == "refused"])
def test_refused_flags_say_why_and_the_mend(parse, flag):
    with pytest.raises(ValueError) as error:
        parse(sample(flag))
    assert str(error.value).startswith(flag)
    assert "\n" not in str(error.value)
    assert " use --" in str(error.value), str(error.value)


@pytest.mark.parametrize("flag", [f for f in FLAGS if compat.verdict(f) == "not yet"])
def test_not_yet_flags_name_the_feature(parse, flag):
    """In a job of several processes none of them passes."""
    with pytest.raises(ValueError, match="not yet in megafp8") as error:
        parse(sample(flag), env={"WORLD_SIZE": "4"})
    assert flag in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flags",
    [
        "--tensor-model-parallel-size 1",
        "--pipeline-model-parallel-size 1 --context-parallel-size 1",
        "--expert-model-parallel-size 1 --expert-tensor-parallel-size 1",
        "--sequence-parallel",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--tp-comm-overlap",
        "--cuda-graph-impl none",
        "--rope-type rope",
        "--rerun-mode disabled",
        "--data-parallel-sharding-strategy no_shard",
        "--num-distributed-optimizer-instances 1",
        "--cpu-offloading-num-layers 0",
        "--use-tp-pp-dp-mapping",
        "--cp-comm-type p2p",
        "--fp8-monitor-interval 0 --fp8-format e4m3 --bf16",
    ],
)
def test_values_without_effect_pass(parse, flags):
    parse(flags)


def test_empty_wandb_project_passes(parse):
    parse("--wandb-project ''")


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--fp16", "use --bf16"),
        ("--fp8-hybrid", "use --fp8-format hybrid"),
        ("--enable-cuda-graph", "use --cuda-graph-impl local"),
        ("--use-megatron-fsdp", "use --use-distributed-optimizer"),
        ("--use-torch-fsdp2", "use --use-distributed-optimizer"),
        ("--optimizer-cpu-offload", "use --use-distributed-optimizer"),
        ("--muon-momentum 0.9", "use --optimizer adam"),
        ("--optimizer muon", "use --optimizer adam"),
        ("--patch-tokenizer-type Qwen3Tokenizer", "HuggingFaceTokenizer"),
        ("--qk-nope-head-dim 3", "use --qk-head-dim"),
        ("--batch-size 3", "use --micro-batch-size"),
        ("--inference-max-requests 3", "inference, which is out of scope"),
        ("--rl-prompts-per-eval 3", "reinforcement learning, which is out of scope"),
        ("--vision-pretraining", "vision and other modalities, which is out of scope"),
        ("--export-kd-teacher-load x", "distillation and post-training, which is out of scope"),
    ],
)
def test_hard_ones(parse, flag, words):
    with pytest.raises(ValueError) as error:
        parse(flag)
    assert words in str(error.value)


def test_all_missing_features_are_named_at_once(parse):
    with pytest.raises(ValueError) as error:
        parse("--eval-global-batch-size 8 --use-checkpoint-args")
    text = str(error.value)
    assert "a batch size of its own for evaluation (--eval-global-batch-size 8)" in text
    assert "flags read from a checkpoint (--use-checkpoint-args)" in text


def test_foreign_flags_take_their_values():
    """A value is never left over to be read as something else."""
    for entry in compat.FOREIGN:
        values = {0: [], 1: ["x"], "*": ["x", "y"]}.get(entry.nargs, ["x"] * 3)
        namespace, rest = build_parser().parse_known_args([entry.flag, *values])
        assert rest == []
        assert namespace.foreign == [(entry.flag, tuple(values))]


# Whole lists of public scripts: what is still missing, and that the rest of the list is a valid configuration.


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_carry_known_flags_only(name):
    unknown = [w for w in script(name).split() if w.startswith("--") and compat.verdict(w) is None]
    assert unknown == []


@pytest.mark.parametrize("name", [name for name, missing in SCRIPTS.items() if missing])
def test_scripts_are_told_every_missing_feature(name):
    text = script(name).replace("--fp16", "")
    with pytest.raises(ValueError) as error:
        parse_args(shlex.split(text), env={}, check_files=False)
    for feature in SCRIPTS[name]:
        assert f"{feature} (" in str(error.value)
    listed = str(error.value).removeprefix("not yet in megafp8: ").removesuffix("; leave these out")
    assert {part.split(" (")[0] for part in listed.split("); ")} == SCRIPTS[name]


@pytest.mark.parametrize("name", SCRIPTS)
def test_rest_of_the_script_parses_after_the_mends(name):
    for number, mend in enumerate(MENDS[name]):
        kept = mended(name, number)
        broken = f"{kept} {mend.flags}" if mend.flags.split()[0] not in kept else kept
        with pytest.raises(ValueError) as error:
            parse_args(broken.split(), env={"WORLD_SIZE": processes(kept)}, check_files=False)
        assert mend.flags in str(error.value)
        assert mend.words in str(error.value)
    text = mended(name)
    config = parse_args(text.split(), env={"WORLD_SIZE": processes(text)}, check_files=False)
    assert config.optimizer.lr > 0
    sizes = layout_sizes(config.parallel)
    assert 1 in (sizes["dp"], sizes["edp"])
    for word in text.split():
        if compat.verdict(word) == "accepted":
            assert any(note.startswith(word) for note in config.notes), word


def test_fields_have_types_that_argparse_knows():
    for group in GROUPS.values():
        for name, hint in typing.get_type_hints(group).items():
            assert value_type(hint) in (int, float, str, bool), name
