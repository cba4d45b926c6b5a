"""From flags to data sets: splits, blends, validation sets, and users' mistakes."""

from types import SimpleNamespace

import numpy as np
import pytest

from megafp8.config import parse_args
from megafp8.config.resolve import padded_vocab_size
from megafp8.data import SampleCounts, build_datasets, build_loader, build_tokenizer, sample_counts
from megafp8.data.indexed import IndexedDataset
from tests.data.helpers import data_flags, random_documents, write_dataset

COUNTS = SampleCounts(train=100, valid=20, test=10)


def build(counts=COUNTS, seed=1, tokenizer=None, **flags):
    flags = data_flags(**flags)
    return build_datasets(flags, tokenizer or build_tokenizer(flags), counts, seed=seed)


def constant_documents(value: int, number: int, length: int = 40) -> list[np.ndarray]:
    return [np.full(length, value) for _ in range(number)]


@pytest.fixture
def corpora(tmp_path):
    """Prefixes a, b, c: all ids of a are 1, of b 2, of c 3; b has half as many documents as a."""
    return {
        name: write_dataset(tmp_path / name, constant_documents(value, number))
        for name, value, number in (("a", 1, 200), ("b", 2, 100), ("c", 3, 100))
    }


def share(dataset, number, value) -> float:
    return np.mean([dataset[i][0] == value for i in range(number)])


def test_splits_share_no_document(tmp_path):
    """CASES 71: every document has its own id here, and the splits' samples never meet."""
    prefix = write_dataset(tmp_path / "set", [np.full(20, i) for i in range(200)])
    sets = build(data_path=(prefix,), split="90,8,2")
    seen = [
        set(np.concatenate([part[i] for i in range(len(part))]))
        for part in (sets.train, sets.valid["valid"], sets.test)
    ]
    assert seen[0] == set(range(180))
    assert seen[1] == set(range(180, 196))
    assert seen[2] == set(range(196, 200))
    assert sets.notes == ()


def test_default_split_is_megatrons(corpora):
    sets = build(data_path=(corpora["a"],), split=None)
    assert len(sets.train.document_index) == 194
    assert len(sets.valid["valid"].document_index) % 5 == 0
    assert set(sets.valid) == {"valid"}


def test_empty_splits_are_noted(tmp_path):
    """CASES 71: without validation or test documents there is a note and nothing to evaluate."""
    prefix = write_dataset(tmp_path / "set", constant_documents(1, 3))
    sets = build(data_path=(prefix,), split="100,0,0")
    assert len(sets.train) >= 100
    assert sets.valid == {}
    assert sets.test is None
    (note,) = sets.notes
    assert "the validation split has no documents (--split 100,0,0): nothing to evaluate there" in note


def test_a_set_too_small_for_its_test_split_is_noted(tmp_path):
    prefix = write_dataset(tmp_path / "set", constant_documents(1, 2))
    (note,) = build(data_path=(prefix,), split="80,10,10").notes
    assert "the test split has no documents (--split 80,10,10): nothing to evaluate there" in note


def test_an_evaluation_that_reads_its_data_again_and_again_is_noted(tmp_path):
    """A wrong zero in --eval-iters: 20 documents of 40 tokens in the split."""
    prefix = write_dataset(tmp_path / "set", constant_documents(1, 200))
    sets = build(SampleCounts(10, 100), data_path=(prefix,), split="90,10,0")
    assert sets.notes == ()
    (note,) = build(SampleCounts(10, 5000), data_path=(prefix,), split="90,10,0").notes
    assert note == (
        "--eval-iters asks for 80000 tokens of --data-path's validation split, which has 800: they are read "
        "100.0 times in each evaluation; lower it"
    )


def test_fingerprints_tell_other_documents(tmp_path, corpora):
    """The same of the same documents, wherever they lie and whatever is asked of them; a blend has one of each."""
    again = write_dataset(tmp_path / "again", constant_documents(1, 200))
    first = build(data_path=(corpora["a"],)).fingerprints
    assert first == build(SampleCounts(7), seed=2, data_path=(again,)).fingerprints
    assert len({*first, *build(data_path=(corpora["b"],)).fingerprints}) == 2
    assert build(data_path=("1", corpora["a"], "1", corpora["b"])).fingerprints[:1] == first


def test_nothing_asked_nothing_built(corpora):
    sets = build(SampleCounts(10), data_path=(corpora["a"],), split="100,0,0")
    assert (sets.valid, sets.test, sets.notes) == ({}, None, ())
    sets = build(SampleCounts(0, 5), data_path=(corpora["a"],), split="50,50,0")
    assert sets.train is None


def test_training_split_without_documents(tmp_path, corpora):
    with pytest.raises(ValueError, match=r"--data-path .*a: the training split has no documents \(--split 0,1,1\)"):
        build(data_path=(corpora["a"],), split="0,1,1")
    empty = write_dataset(tmp_path / "empty", [np.empty(0, int)] * 5)
    with pytest.raises(ValueError, match="--train-data-path .*empty: the training split has no documents"):
        build(train_data_path=(empty,))
    with pytest.raises(ValueError, match="--data-path .*empty: the training split has no documents"):
        build(data_path=("1", corpora["a"], "1", empty))


def test_blend_by_weight(corpora):
    """CASES 67, through files: shares follow weights; each data set gives only as many samples as it is asked for."""
    sets = build(SampleCounts(1000, 100), data_path=("0.2", corpora["a"], "0.8", corpora["b"]), split="90,10,0")
    assert len(sets.train) == 1000
    assert abs(share(sets.train, 1000, 2) - 0.8) <= 0.002
    assert abs(share(sets.valid["valid"], 100, 2) - 0.8) <= 0.02
    again = build(SampleCounts(1000, 100), data_path=("2", corpora["a"], "8", corpora["b"]), split="90,10,0")
    assert all((sets.train[i] == again.train[i]).all() for i in range(1000))


def test_blend_by_size(corpora):
    """Prefixes without weights are read in proportion to their tokens."""
    sets = build(SampleCounts(900), train_data_path=(corpora["a"], corpora["b"], corpora["c"]))
    assert abs(share(sets.train, 900, 1) - 0.5) <= 0.005


def test_blend_with_extreme_weights(corpora):
    """CASES 67: a set with weight 0 is noted and not read; one too light for any sample does no harm."""
    sets = build(data_path=("0", corpora["a"], "1", corpora["b"]), split="90,5,5")
    assert share(sets.train, 100, 2) == 1
    assert any("a has weight 0" in note for note in sets.notes)
    sets = build(data_path=("1e-6", corpora["a"], "1", corpora["b"]), split="90,5,5")
    assert share(sets.train, 100, 2) == 1
    assert [len(sets.train), len(sets.valid["valid"]), len(sets.test)] == [100, 20, 10]


def test_blend_part_without_validation_documents(tmp_path, corpora):
    """A small set has no validation documents: the others make up the validation blend, with a note."""
    small = write_dataset(tmp_path / "small", constant_documents(7, 1))
    sets = build(data_path=("1", small, "1", corpora["b"]), split="90,10,0")
    assert share(sets.train, 100, 7) == 0.5
    assert share(sets.valid["valid"], 20, 2) == 1
    assert any("small: the validation split has no documents" in note for note in sets.notes)


def test_one_epoch_of_a_blend(corpora):
    sets = build(
        SampleCounts(0, None), valid_data_path=("9", corpora["a"], "1", corpora["b"]), train_data_path=(corpora["c"],)
    )
    valid = sets.valid["valid"]
    assert len(valid) == (200 * 40 - 1) // 16 + (100 * 40 - 1) // 16
    assert valid[len(valid) - 1][0] == 2


def test_paths_per_split(corpora):
    sets = build(train_data_path=(corpora["a"],), valid_data_path=(corpora["b"],), test_data_path=(corpora["c"],))
    assert [share(s, 10, v) for s, v in ((sets.train, 1), (sets.valid["valid"], 2), (sets.test, 3))] == [1, 1, 1]
    sets = build(train_data_path=(corpora["a"],))
    assert sets.valid == {}
    assert sets.test is None


def test_several_validation_sets(corpora):
    flags = {
        "train_data_path": (corpora["a"],),
        "valid_data_path": (corpora["b"], corpora["c"]),
        "multiple_validation_sets": True,
    }
    sets = build(**flags, validation_set_names=("books", "code"))
    assert list(sets.valid) == ["books", "code"]
    assert share(sets.valid["books"], 20, 2) == share(sets.valid["code"], 20, 3) == 1
    assert list(build(**flags).valid) == ["0", "1"]
    for names in (("books",), ("books", "books")):
        with pytest.raises(ValueError, match="--validation-set-names books.*2 sets of --valid-data-path"):
            build(**flags, validation_set_names=names)
    with pytest.raises(ValueError, match="--multiple-validation-sets.*no weights"):
        build(**{**flags, "valid_data_path": ("1", corpora["b"], "2", corpora["c"])})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "--data-path: no data given"),
        ({"data_path": ("A",), "train_data_path": ("A",)}, "--data-path and --train-data-path exclude each other"),
        ({"data_path": ("A",), "mock_data": True}, "--mock-data and --data-path exclude each other"),
        ({"data_path": ("missing/prefix",)}, r"missing/prefix\.idx: no such file"),
        ({"data_path": ("A",), "seq_length": 10**6, "split": "1,1,1"}, None),
    ],
)
def test_flag_mistakes(corpora, flags, message):
    flags = {
        key: tuple(corpora["a"] if v == "A" else v for v in value) if isinstance(value, tuple) else value
        for key, value in flags.items()
    }
    if message is None:  # a few tokens, many epochs: legal
        assert len(build(SampleCounts(1), **flags).train) >= 1
        return
    with pytest.raises(ValueError, match=message) as error:
        build(**flags)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("bad", [257, 60000])
def test_ids_beyond_the_vocabulary(tmp_path, dtype, bad):
    """CASES 72: an error before training, the second time too (from the cache), and not for ids that are in."""
    documents = random_documents(np.random.default_rng(0), 50)
    prefix = write_dataset(tmp_path / "set", [*documents, np.array([1, bad, 2])], dtype)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"set\.bin: token id {bad} is outside the vocabulary of 257 ids"):
            build(data_path=(prefix,))
    extra = bad - 257 + 1
    assert build(data_path=(prefix,), extra_vocab_size=extra).train is not None
    with pytest.raises(ValueError, match="outside the vocabulary"):
        build(data_path=(prefix,), extra_vocab_size=extra - 1)
    write_dataset(tmp_path / "set", documents, dtype)  # mended
    assert build(data_path=(prefix,)).train is not None
    if dtype == np.int32:
        write_dataset(tmp_path / "set", [*documents, np.array([-1])], dtype)
        with pytest.raises(ValueError, match="token id -1 is outside"):
            build(data_path=(prefix,))


def test_dtype_that_cannot_exceed_the_vocabulary_is_not_read(tmp_path, monkeypatch):
    prefix = write_dataset(tmp_path / "set", random_documents(np.random.default_rng(0), 50))
    monkeypatch.setattr(IndexedDataset, "token_range", lambda *_: pytest.fail("the tokens were read"))
    tokenizer = SimpleNamespace(vocab_size=65536, eod=256)
    assert build(data_path=(prefix,), tokenizer=tokenizer).train is not None


def test_masks_need_an_eod(corpora):
    """CASES 73: at start, naming the flag."""
    tokenizer = SimpleNamespace(vocab_size=257, eod=None)
    with pytest.raises(ValueError, match="--reset-position-ids: the tokenizer has no end-of-document token"):
        build(data_path=(corpora["a"],), tokenizer=tokenizer, reset_position_ids=True)
    assert build(data_path=(corpora["a"],), tokenizer=tokenizer).train is not None


@pytest.mark.parametrize("vocab_size", [5, 1000, 70000])
def test_mock_data(vocab_size):
    """The same ids everywhere, inside the vocabulary, with documents that end, and each split its own."""
    flags = {"mock_data": True, "tokenizer_type": "NullTokenizer", "vocab_size": vocab_size, "seq_length": 64}
    one, two = build(**flags, reset_attention_mask=True), build(**flags)
    samples = [one.train[i] for i in range(100)]
    assert all((two.train[i] == samples[i]).all() for i in range(100))
    ids = np.concatenate(samples)
    assert ids.min() >= 0
    assert ids.max() <= vocab_size
    assert not all((one.valid["valid"][i] == samples[i]).all() for i in range(20))
    batch = next(build_loader(one.train, one.masks, seq_length=64, micro_batch_size=16))
    starts = batch.cu_seqlens[1:-1].long()
    inner = starts[starts % 64 != 0]
    assert (batch.tokens.view(-1)[inner - 1] == vocab_size).all()
    assert ((batch.labels - batch.tokens) == 1).float().mean() > 0.5  # there is something to learn


def test_counts_of_a_run():
    argv = [
        "--num-layers=1",
        "--hidden-size=64",
        "--num-attention-heads=1",
        "--max-position-embeddings=16",
        "--lr=1e-3",
        "--seq-length=16",
        "--micro-batch-size=2",
        "--global-batch-size=4",
        "--eval-iters=3",
        "--mock-data",
        "--tokenizer-type=NullTokenizer",
        "--vocab-size=100",
    ]
    assert sample_counts(parse_args([*argv, "--train-iters", "10"])) == SampleCounts(40, 12, 12)
    samples = sample_counts(parse_args([*argv, "--train-samples", "36"]))
    assert samples.train == 36


def test_padded_vocabulary():
    """CASES 72: never smaller than the ids in use."""
    assert padded_vocab_size(50257) == 50304
    assert padded_vocab_size(50257, 128, 2) == 50432
    assert padded_vocab_size(50257, 128, 4) == 50688
    assert padded_vocab_size(65536) == 65536
    assert padded_vocab_size(66000) == 66048
    assert padded_vocab_size(257, 1) == 257
    assert padded_vocab_size(257, 1, 1, extra_vocab_size=10) == 267
