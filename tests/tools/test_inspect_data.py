"""tools/inspect_data.py: its numbers are the files', its batches are the training loop's."""

import re

import inspect_data
import numpy as np
import pytest

from megafp8.data import SampleCounts, build_datasets, build_tokenizer
from megafp8.data.arguments import run
from tests.data.helpers import data_flags, write_dataset


@pytest.fixture
def corpus(tmp_path):
    """100 documents "<number> is the number of this document." and a second set of dots."""
    texts = [f"{i} is the number of this document." for i in range(100)]
    prefix = write_dataset(tmp_path / "numbers", [np.array([*t.encode(), 256]) for t in texts])
    return prefix, write_dataset(tmp_path / "dots", [np.full(50, ord("."))] * 60)


def inspect(capsys, *flags, code=0):
    assert run(inspect_data.main, ["--seq-length", "64", "--tokenizer-type", "ByteTokenizer", *map(str, flags)]) == code
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


def test_counts(corpus, capsys):
    out = inspect(capsys, "--data-path", corpus[0], "--split", "80,10,10", "--eval-iters", 1)
    assert "ByteTokenizer: 257 ids, end of document 256" in out
    assert re.search(r"numbers: 100 documents, 3490 tokens \(uint16\)", out)
    assert "tokens a document: 34 to 35, median 35; 0 empty" in out
    assert "token ids: 32 to 256" in out
    for split, first, last in (("training", 0, 79), ("validation 'valid'", 80, 89), ("test", 90, 99)):
        assert re.search(rf"{split}: \d+ samples can be drawn\n    .*numbers, documents {first} to {last}, ", out)


def test_blend_preview_and_notes(corpus, capsys):
    out = inspect(
        capsys,
        "--data-path",
        0.25,
        corpus[0],
        0.75,
        corpus[1],
        "--split",
        "100,0,0",
        "--train-iters",
        100,
        "--global-batch-size",
        4,
    )
    assert "100 samples, 25.00%: " in out
    assert "300 samples, 75.00%: " in out
    assert out.count("note: ") == 2  # validation of each data set; a test set was not asked for


def test_batch_is_the_training_loops(corpus, capsys):
    """The text of iteration 3 is samples 2 * global batch size and on, cut where documents end."""
    flags = data_flags(data_path=(corpus[0],), split="80,10,10", seq_length=64)
    train = build_datasets(flags, build_tokenizer(flags), SampleCounts(20), seed=7).train
    common = (
        "--data-path",
        corpus[0],
        "--split",
        "80,10,10",
        "--train-iters",
        5,
        "--global-batch-size",
        4,
        "--seed",
        7,
        "--iteration",
        3,
        "--eval-iters",
        1,
    )
    out = inspect(capsys, *common, "--ids", "--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
    shown = re.findall(r"^        ([\d ]+)$", out, flags=re.MULTILINE)
    ids = [int(word) for line in shown for word in line.split()]
    assert ids == [i for k in range(8, 12) for i in train[k][:-1].tolist()]
    assert out.count("sequence ") == 4
    assert "attends to itself only; no loss at" in out
    assert re.search(r"positions 0 to 3[34]; attends to itself only", out)
    assert " is the number of this document.'" in out
    plain = inspect(capsys, *common, "--rows", 1)
    assert plain.count("sequence ") == 1
    assert "attends" not in plain
    assert "no loss" not in plain


def test_other_splits(corpus, capsys):
    common = ("--data-path", corpus[0], "--split", "80,10,10", "--eval-iters", 2, "--iteration", 1)
    numbers = [int(n) for n in re.findall(r"(\d+) is the", inspect(capsys, *common, "--from", "validation"))]
    assert numbers
    assert all(80 <= n < 90 for n in numbers)


def test_mistakes(corpus, capsys):
    """One line and exit status 2, as training gives."""
    data = ("--data-path", corpus[0])
    cases = [
        ((*data, "--iteration", 0), "--iteration 0: the first is 1"),
        ((*data, "--iteration", 9, "--train-iters", 2, "--global-batch-size", 40), "ends with iteration"),
        ((*data, "--split", "100,0,0", "--iteration", 1, "--from", "test"), "there is no test data"),
        (("--data-path", corpus[0] + "x"), "numbersx.bin"),
        ((), "--data-path"),
        ((*data, "--no-such-flag"), "--no-such-flag"),
    ]
    for flags, message in cases:
        error = inspect(capsys, *flags, code=2)
        assert message in error
        assert error.count("\n") == 1
