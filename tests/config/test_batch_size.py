"""--rampup-batch-size: sizes by consumed samples, and what the flags may say."""

import pytest

from megafp8.config import parse_args
from megafp8.config.batch_size import BatchSize, parse_steps
from megafp8.config.train import TrainConfig

RAMP = BatchSize(final=32, start=8, increment=8, samples=300)


def test_sizes_are_megatrons():
    """steps = (32 - 8) / 8, each over 300 / 3 consumed samples."""
    sizes = {0: 8, 99: 8, 100: 16, 199: 16, 200: 24, 299: 24, 300: 32, 301: 32, 10**9: 32}
    assert {consumed: RAMP.at(consumed) for consumed in sizes} == sizes


def test_without_a_ramp_nothing_grows():
    constant = BatchSize.of(TrainConfig(global_batch_size=6))
    assert [constant.at(n) for n in (0, 1, 1000)] == [6, 6, 6]
    assert [constant.iterations(n) for n in (1, 6, 7, 12)] == [1, 1, 2, 2]


@pytest.mark.parametrize("total", [1, 8, 50, 104, 299, 300, 304, 1000, 1001])
def test_iterations_are_those_of_a_run(total):
    consumed = count = 0
    while consumed < total:
        consumed += RAMP.at(consumed)
        count += 1
    assert RAMP.iterations(total) == count
    assert RAMP.samples_of(count) == consumed


STEPS = BatchSize(final=16, samples=100, steps=((0, 8), (40, 32), (100, 16)))


@pytest.mark.parametrize("total", [1, 8, 40, 41, 100, 101, 104, 1000, 1001])
def test_iterations_of_steps_are_those_of_a_run(total):
    consumed = count = 0
    while consumed < total:
        consumed += STEPS.at(consumed)
        count += 1
    assert STEPS.iterations(total) == count
    assert STEPS.samples_of(count) == consumed


def test_steps_are_megatrons():
    """Thresholds are tokens; a batch changes once that many are consumed."""
    steps = parse_steps(["0:768 2.5K:1536", "1M:6144"], seq_length=10)
    assert steps == ((0, 768), (250, 1536), (100_000, 6144))
    sizes = {0: 8, 39: 8, 40: 32, 99: 32, 100: 16, 10**9: 16}
    assert {consumed: STEPS.at(consumed) for consumed in sizes} == sizes


def test_the_global_batch_is_the_largest_step():
    model = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --micro-batch-size 4 --lr 1e-3"
    data = "--mock-data --tokenizer-type ByteTokenizer --train-samples 500"
    config = parse_args(f"{model} {data}".split() + ["--step-batch-size-schedule", "0:4 80:12 160:8"])
    assert config.train.global_batch_size == 12
    assert BatchSize.of(config.train) == BatchSize(8, samples=20, steps=((0, 4), (10, 12), (20, 8)))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("0:4 80", "80 is no TOKENS:SAMPLES"),
        ("0:4 80:0", "80:0 is no TOKENS:SAMPLES"),
        ("8:4", "begin at 0"),
        ("0:4 80:8 80:12", "ascend"),
        ("0:4 80:6", "6 is not divisible"),
        ("0:4 80:8 --global-batch-size 16", "not the largest"),
        ("0:4 80:8 --rampup-batch-size 4 4 100 --global-batch-size 8", "contradicts --rampup-batch-size"),
    ],
)
def test_steps_that_do_not_fit_are_refused(flags, words):
    model = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --micro-batch-size 4 --lr 1e-3"
    data = "--mock-data --tokenizer-type ByteTokenizer --train-samples 500"
    with pytest.raises(ValueError, match=words) as error:
        parse_args(f"{model} {data} --step-batch-size-schedule {flags}".split())
    assert "\n" not in str(error.value)
    assert "--step-batch-size-schedule" in str(error.value)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--rampup-batch-size 8 7 100 --global-batch-size 32 --train-samples 500", "never is --global-batch-size 32"),
        ("--rampup-batch-size 40 8 100 --global-batch-size 32 --train-samples 500", "never is --global-batch-size 32"),
        ("--rampup-batch-size 0 8 100 --global-batch-size 32 --train-samples 500", "give three numbers"),
        ("--rampup-batch-size 3 1 99 --global-batch-size 32 --train-samples 500", "multiples of 4"),
    ],
)
def test_ramps_that_do_not_fit_are_refused(flags, words):

    model = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 8 --micro-batch-size 4 --lr 1e-3"
    data = "--mock-data --tokenizer-type ByteTokenizer"
    with pytest.raises(ValueError, match=words) as error:
        parse_args(f"{model} {data} {flags}".split())
    assert "\n" not in str(error.value)
    assert "--rampup-batch-size" in str(error.value)
