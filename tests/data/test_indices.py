"""Splits and the document, sample and shuffle indices: against brute force, Megatron, and very large counts."""

from types import SimpleNamespace

import numpy as np
import pytest

from megafp8.data import indices
from megafp8.data.gpt_dataset import GPTDataset
from megafp8.data.indexed import IndexedDataset
from megafp8.data.indices import build_indices, build_sample_index, count_epochs, locate, split_documents
from tests.data.helpers import random_documents, write_dataset


def dataset_of(tmp_path, documents):
    return IndexedDataset(write_dataset(tmp_path / "set", documents))


# --- splits


@pytest.mark.parametrize("split", ["90,8,2", "100,0,0", "969, 30, 1", "1/1/1", "0,0,1", "0.5,0.5", "98 1 1", "7"])
@pytest.mark.parametrize("number", [0, 1, 2, 3, 10, 99, 1000, 12345])
def test_splits_are_disjoint_and_complete(split, number):
    """CASES 71: no document is in two splits; each that was asked for has one, as far as there are enough."""
    parts = split_documents(number, split)
    assert [i for part in parts for i in part] == list(range(number))
    asked = [f > 0 for f in indices.parse_split(split)]
    assert [bool(part) for part, wanted in zip(parts, asked, strict=True) if not wanted] == [False] * asked.count(False)
    if number >= sum(asked):
        assert all(part for part, wanted in zip(parts, asked, strict=True) if wanted)


def test_three_documents():
    """CASES 71: with three documents, 90,8,2 gives one to each split."""
    assert split_documents(3, "90,8,2") == (range(1), range(1, 2), range(2, 3))
    assert split_documents(3, "100,0,0") == (range(3), range(3, 3), range(3, 3))
    assert split_documents(200, "969,30,1") == (range(194), range(194, 199), range(199, 200))  # training keeps its 194
    assert split_documents(1, "90,8,2") == (range(1), range(1, 1), range(1, 1))


def test_split_borders_are_megatrons():
    config = pytest.importorskip(
        "megatron.core.datasets.blended_megatron_dataset_config", reason="megatron-core is not installed"
    )
    for split in ("969,30,1", "90,8,2", "99,1,0", "1,1,1"):
        matrix = config.convert_split_vector_to_split_matrix(config.parse_and_normalize_split(split))
        for number in (1000, 4321, 99999):
            theirs = [range(int(round(b[0] * number)), int(round(b[1] * number))) for b in matrix if b]
            assert [part for part in split_documents(number, split) if part] == theirs


@pytest.mark.parametrize("split", ["", "a,b", "1,2,3,4", "0,0,0", "-1,2", "nan,1", "inf"])
def test_bad_splits_are_refused(split):
    with pytest.raises(ValueError, match="--split .*969,30,1"):
        split_documents(10, split)


# --- samples


def brute_force_stream(dataset, built):
    return np.concatenate([dataset.read(int(d)) for d in built["document_index"]])


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_samples_are_consecutive_pieces_of_the_stream(tmp_path, seed, shuffle, monkeypatch):
    """Whatever lengths, epochs and chunks: sample k is tokens k * seq_length .. (k + 1) * seq_length of the stream."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(indices, "_DOCUMENTS_PER_CHUNK", int(rng.integers(1, 40)))
    dataset = dataset_of(tmp_path, random_documents(rng, int(rng.integers(1, 60)), min_length=0) + [np.arange(9)])
    documents = range(int(rng.integers(0, 5)) if dataset.num_documents > 10 else 0, dataset.num_documents)
    seq_length = int(rng.integers(1, 40))
    for num_samples in (1, 7, int(rng.integers(1, 300))):
        gpt = GPTDataset(dataset, documents, num_samples=num_samples, seq_length=seq_length, seed=seed, shuffle=shuffle)
        built = build_indices(dataset.document_lengths, documents, num_samples, seq_length, seed, shuffle)
        assert {array.dtype for array in built.values()} == {np.dtype(np.int64)}
        stream = brute_force_stream(dataset, built)
        per_epoch = dataset.document_lengths[documents.start :].sum()
        assert len(stream) % per_epoch == 0
        assert len(gpt) >= num_samples
        assert len(gpt) == (len(stream) - 1) // seq_length
        assert sorted(built["shuffle_index"]) == list(range(len(gpt)))
        for i in range(len(gpt)):
            k = built["shuffle_index"][i]
            np.testing.assert_array_equal(gpt[i], stream[k * seq_length : (k + 1) * seq_length + 1])


@pytest.mark.parametrize("seed", range(4))
def test_whole_pass_covers_every_token(tmp_path, seed):
    """shuffle=False, drop_last=False: the file's tokens in order, each a label once, but the first."""
    rng = np.random.default_rng(seed)
    documents = random_documents(rng, 20, min_length=0) + [np.arange(3)]
    dataset = dataset_of(tmp_path, documents)
    gpt = GPTDataset(dataset, range(21), num_samples=None, seq_length=16, seed=0, shuffle=False, drop_last=False)
    labels = np.concatenate([gpt[i][1:] for i in range(len(gpt))])
    np.testing.assert_array_equal(labels, np.concatenate(documents)[1:])


@pytest.mark.parametrize("num_samples", [10, 100, 345, 700, None])
@pytest.mark.parametrize("seq_length", [7, 64])
def test_same_samples_as_megatron(tmp_path, num_samples, seq_length):
    """Same documents, seed and lengths: megatron-core's GPTDataset gives the same samples in the same order, over one
    and several epochs, with the last one apart and not."""
    theirs = pytest.importorskip("megatron.core.datasets.gpt_dataset", reason="megatron-core is not installed")
    pytest.importorskip("megatron.core.datasets.helpers_cpp", reason="megatron-core's C++ helpers are not built")
    from megatron.core.datasets.indexed_dataset import IndexedDataset as TheirIndexedDataset
    from megatron.core.datasets.utils import Split

    prefix = write_dataset(tmp_path / "set", random_documents(np.random.default_rng(3), 150, min_length=0))
    tokenizer = SimpleNamespace(vocab_size=257, eod=256, pad=-1, unique_identifiers={})
    config = theirs.GPTDatasetConfig(
        random_seed=1234,
        sequence_length=seq_length,
        blend=([prefix], None),
        split="969,30,1",
        path_to_cache=str(tmp_path / "cache"),
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    megatron = theirs.GPTDataset(
        TheirIndexedDataset(prefix), prefix, np.arange(5, 140, dtype=np.int32), num_samples, Split.train, config
    )
    ours = GPTDataset(IndexedDataset(prefix), range(5, 140), num_samples=num_samples, seq_length=seq_length, seed=1234)
    assert len(ours) == len(megatron)
    for i in range(len(ours)):
        np.testing.assert_array_equal(ours[i][:-1], megatron[i]["tokens"])
        np.testing.assert_array_equal(ours[i][1:], megatron[i]["labels"])


def test_longer_runs_start_with_the_same_samples(tmp_path):
    """Within one epoch the order doesn't depend on how many samples are asked for, only on the seed."""
    dataset = dataset_of(tmp_path, random_documents(np.random.default_rng(0), 200))
    short, long, other = (
        GPTDataset(dataset, range(200), num_samples=n, seq_length=16, seed=seed)
        for n, seed in ((20, 5), (200, 5), (20, 6))
    )
    assert all((short[i] == long[i]).all() for i in range(20))
    assert any((short[i] != other[i]).any() for i in range(20))


def test_too_few_tokens(tmp_path):
    dataset = dataset_of(tmp_path, [np.arange(5), np.empty(0, int)])
    with pytest.raises(ValueError, match="5 tokens, too few for one sample of --seq-length 16"):
        GPTDataset(dataset, range(2), num_samples=None, seq_length=16, seed=0)
    with pytest.raises(ValueError, match="all of its 1 documents are empty"):
        GPTDataset(dataset, range(1, 2), num_samples=4, seq_length=16, seed=0)
    # repeated often enough, few tokens make samples too
    assert len(GPTDataset(dataset, range(2), num_samples=4, seq_length=16, seed=0)) >= 4


# --- large counts (CASES 68)


def test_three_billion_tokens():
    """CASES 68: 3e9 tokens in 1e6 documents: offsets pass 2^31 without a wrap, and rows stay in order."""
    lengths = np.full(1_000_000, 3000, dtype=np.int32)
    seq_length = 4096
    total = 3_000_000_000
    samples = (total - 1) // seq_length
    index = np.arange(len(lengths), dtype=np.int64)
    rows = build_sample_index(lengths, index, seq_length, samples, total)
    assert rows.dtype == np.int64
    positions = rows[:, 0] * 3000 + rows[:, 1]
    np.testing.assert_array_equal(positions, np.arange(samples + 1, dtype=np.int64) * seq_length)
    assert positions[-1] > 2**31
    assert ((rows[:, 1] >= 0) & (rows[:, 1] < 3000)).all()


def test_document_longer_than_int32():
    """CASES 68: a token offset of 2.2e9 inside a document."""
    lengths = np.array([10, 2_300_000_000, 10], dtype=np.int64)
    rows = locate(np.array([5, 2_200_000_000, 2_300_000_009, 2_300_000_010]), lengths)
    assert rows.tolist() == [[0, 5], [1, 2_199_999_990], [1, 2_299_999_999], [2, 0]]


def test_more_document_visits_than_int32():
    """CASES 68: epochs * documents > 2^31. The piece of the sample index behind visit 2^31 is built alone."""
    before = 2**31 + 123
    rows = locate(np.arange(0, 400, 40), np.full(50, 8, dtype=np.int32), first_document=before)
    assert rows.dtype == np.int64
    np.testing.assert_array_equal(rows[:, 0], before + np.arange(0, 400, 40) // 8)
    assert (np.diff(rows[:, 0]) > 0).all()
    assert count_epochs(3_000_000_000, 10**12, 4096) == -(-(10**12 * 4096 + 1) // 3_000_000_000)


def test_limited_output_stops_early():
    """CASES 68: only the documents that the wanted rows need are walked."""
    lengths = np.broadcast_to(np.int32(1000), (2**40,))  # a terabyte's worth of lengths, none of it stored
    index = np.broadcast_to(np.int64(7), (2**33,))
    rows = build_sample_index(lengths, index, seq_length=512, num_samples=1000, num_tokens=1000 * 2**33)
    np.testing.assert_array_equal(rows[:, 0] * 1000 + rows[:, 1], np.arange(1001) * 512)
