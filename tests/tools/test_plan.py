"""tools/plan.py schedule: what it prints, what it draws, what it refuses."""

import shlex
from pathlib import Path

import plan
import pytest


def run(capsys, *argv: str) -> str:
    assert plan.main(["schedule", *argv]) == 0
    return capsys.readouterr().out


def test_prints_actions_bubble_and_what_is_held(capsys):
    out = run(capsys, "--pipeline-model-parallel-size", "2", "--microbatches", "3").splitlines()
    assert out[0] == "1f1b: 2 ranks x 1 virtual stage(s), 3 microbatches; bubble 25.0%, length 12"
    assert out[1:3] == ["rank 0: F0 F1 B0 F2 B1 B2", "rank 1: F0 B0 F1 B1 F2 B2"]
    assert [row.split() for row in out[4:6]] == [["0", "25.0%", "2", "0"], ["1", "25.0%", "1", "0"]]


def test_bytes_of_activations_and_deferred_gradients(capsys):
    argv = ["--pipeline-model-parallel-size", "2", "--microbatches", "4", "--schedule", "zero-bubble"]
    out = run(capsys, *argv, "--activation-mib", "100", "--deferred-mib", "10").splitlines()
    assert [float(row.split()[-1]) for row in out[4:6]] == [200.0, 110.0]


def test_times_count(capsys):
    argv = ["--pipeline-model-parallel-size", "2", "--microbatches", "1", "--forward-time", "2", "--input-time", "3"]
    assert "length 19" in run(capsys, *argv, "--weight-time", "4", "--message-time", "0.5")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
def test_draws_a_picture(capsys, tmp_path, schedule):
    matplotlib = pytest.importorskip("matplotlib")
    file = tmp_path / "schedule.png"
    argv = ["--pipeline-model-parallel-size", "3", "--num-virtual-stages-per-pipeline-rank", "2"]
    run(capsys, *argv, "--microbatches", "4", "--schedule", schedule, "--output", str(file))
    image = matplotlib.image.imread(file)
    assert image.shape[0] > 100
    assert image.shape[1] > 300
    assert image[..., :3].std() > 0.05, "it is blank"


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("--microbatches", "0", "--microbatches 0: give 1 or more"),
        ("--num-virtual-stages-per-pipeline-rank", "-1", "give 1 or more"),
        ("--microbatch-group-size-per-virtual-pipeline-stage", "1", "--pipeline-model-parallel-size 2; raise it"),
        ("--forward-time", "-1", "--forward-time -1.0: give 0 or more"),
        ("--message-time", "inf", "--message-time inf"),
        ("--output", "/dev/null/x.png", "--output /dev/null/x.png: can't write there"),
        ("--output", "/tmp", "--output /tmp: can't write there"),
    ],
)
def test_mistakes(capsys, flag, value, words):
    argv = ["--pipeline-model-parallel-size", "2", "--microbatches", "3", flag, value]
    assert plan.main(["schedule", *argv]) == 2
    assert words in capsys.readouterr().err


def test_memory_takes_the_flags_of_a_training(capsys):
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --lr 1e-3"
    rest = "--train-iters 5 --tokenizer-type ByteTokenizer --mock-data --bf16 --fp8-format e4m3"
    assert plan.main(["memory", *flags.split(), *rest.split()]) == 0
    out = capsys.readouterr().out
    assert "FP8 copies of weights" in out
    assert "blockwise, FP8 primary" in out
    assert plan.main(["memory", *flags.split(), *rest.split(), "--exp-avg-dtype", "fp8"]) == 2
    assert "--exp-avg-dtype fp8 needs --use-precision-aware-optimizer" in capsys.readouterr().err


SMALL = shlex.split(
    "--num-layers 2 --hidden-size 512 --num-attention-heads 4 --seq-length 512 --lr 1e-3 --train-iters 5 "
    "--tokenizer-type ByteTokenizer --mock-data --bf16 --fp8-format e4m3 --global-batch-size 4"
)
CLUSTER = str(Path(__file__).parents[2] / "examples/clusters/h100_80gb.toml")


@pytest.mark.parametrize("command", ["memory", "forecast", "search"])
def test_linears_that_stay_in_bf16_are_told(command, capsys):
    argv = [command, *(() if command == "memory" else ("--cluster", CLUSTER)), "--gpus", "1", *SMALL]
    argv += () if command == "search" else ("--micro-batch-size", "4")
    told = "attention.proj stays in BF16: at "
    assert plan.main(argv) == 0
    assert sum(line.startswith(told) for line in capsys.readouterr().out.splitlines()) == 1
    assert plan.main([*argv, "--fp8-small-linears", "fp8"]) == 0
    assert "stays in BF16" not in capsys.readouterr().out


def test_a_search_that_finds_nothing_fails(tmp_path, capsys):
    """After it has told why."""
    small = tmp_path / "small.toml"
    small.write_text(Path(CLUSTER).read_text().replace("memory_gib = ", "memory_gib = 4.2  # "))
    argv = ["search", "--cluster", str(small), "--gpus", "1", *SMALL]
    assert plan.main(argv) == 1
    out, err = capsys.readouterr()
    assert out.count("nothing fits; of those found too large the smallest needs ") == 2
    assert err == "plan.py: no layout of 1 GPU(s) fits, in BF16 or in FP8\n"
