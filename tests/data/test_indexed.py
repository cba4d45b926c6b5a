"""Indexed data sets: Megatron's bytes, round trips, damaged files."""

import pickle
from array import array

import numpy as np
import pytest

from megafp8.data.indexed import IndexedDataset, IndexedDatasetBuilder, token_dtype
from tests.data.helpers import random_documents, write_dataset

DTYPES = [np.uint8, np.int16, np.uint16, np.int32, np.int64]


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(tmp_path, rng, dtype):
    """Every id of every document comes back, empty documents in any place included (CASES 73)."""
    documents = random_documents(rng, 200, vocab=np.iinfo(dtype).max, eod=None, min_length=0)
    documents[0] = documents[-1] = np.empty(0, np.int64)
    dataset = IndexedDataset(write_dataset(tmp_path / "set", documents, dtype))
    assert dataset.dtype == dtype
    assert len(dataset) == dataset.num_documents == 200
    assert dataset.num_tokens == sum(map(len, documents))
    for i, expected in enumerate(documents):
        np.testing.assert_array_equal(dataset[i], expected)
        np.testing.assert_array_equal(dataset.read(i), expected)
        start = int(rng.integers(0, len(expected) + 1))
        stop = int(rng.integers(start, len(expected) + 1))
        np.testing.assert_array_equal(dataset.read(i, start, stop - start), expected[start:stop])
    everything = np.concatenate(documents)
    assert dataset.token_range(chunk=100) == (everything.min(), everything.max())


def test_no_documents_and_no_tokens(tmp_path):
    assert IndexedDataset(write_dataset(tmp_path / "none", [])).num_documents == 0
    empty = IndexedDataset(write_dataset(tmp_path / "empty", [np.empty(0, int)] * 3))
    assert (empty.num_documents, empty.num_tokens, len(empty.read(1))) == (3, 0, 0)
    assert empty.token_range() == (0, -1)


def test_views_are_read_only_and_survive_pickling(tmp_path, rng):
    documents = random_documents(rng, 5)
    dataset = pickle.loads(pickle.dumps(IndexedDataset(write_dataset(tmp_path / "set", documents))))
    np.testing.assert_array_equal(dataset.read(3), documents[3])
    with pytest.raises(ValueError, match="read-only"):
        dataset.read(3)[0] = 1


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(257, np.uint16), (65536, np.uint16), (65537, np.int32), (66000, np.int32)]
)
def test_dtype_holds_the_whole_vocabulary(tmp_path, vocab_size, dtype):
    """CASES 72: the dtype follows from all ids, added ones too, so the last id round-trips."""
    assert token_dtype(vocab_size) == dtype
    prefix = write_dataset(tmp_path / "set", [np.array([0, vocab_size - 1])], token_dtype(vocab_size))
    assert IndexedDataset(prefix).read(0).tolist() == [0, vocab_size - 1]


def test_ids_never_wrap(tmp_path):
    """CASES 72: an id that doesn't fit is an error, not another id; and nothing is left behind."""
    for bad in ([65536], [-1]):
        with pytest.raises(ValueError, match="don't fit uint16"), IndexedDatasetBuilder(tmp_path / "s", np.uint16) as b:
            b.add_document(np.array(bad))
    assert list(tmp_path.iterdir()) == []


def test_failed_build_keeps_the_old_files(tmp_path, rng):
    documents = random_documents(rng, 10)
    prefix = write_dataset(tmp_path / "set", documents)
    with pytest.raises(ValueError, match="don't fit"), IndexedDatasetBuilder(prefix, np.uint16) as builder:
        builder.add_documents(np.array([1, 2, 1 << 20]), [3])
    np.testing.assert_array_equal(IndexedDataset(prefix).read(9), documents[9])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["set.bin", "set.idx"]


def test_bytes_of_the_format(tmp_path):
    """The two files of three documents, field by field."""
    write_dataset(tmp_path / "set", [np.array([1, 2]), np.array([], int), np.array([513])])
    assert (tmp_path / "set.bin").read_bytes() == b"\1\0\2\0\1\2"
    assert (tmp_path / "set.idx").read_bytes() == b"".join(
        [
            b"MMIDIDX\0\0",
            (1).to_bytes(8, "little"),
            b"\x08",
            (3).to_bytes(8, "little"),
            (4).to_bytes(8, "little"),
            np.array([2, 0, 1], "<i4").tobytes(),
            np.array([0, 4, 4], "<i8").tobytes(),
            np.array([0, 1, 2, 3], "<i8").tobytes(),
        ]
    )


def test_sequences_are_joined_to_documents(tmp_path, rng):
    sequences = random_documents(rng, 7)
    with IndexedDatasetBuilder(tmp_path / "set", np.uint16) as builder:
        for sequence in sequences:
            builder.add_document(sequence)
        builder._document_indices = array("q", [0, 3, 3, 7])  # what a tool that splits into sentences would write
    dataset = IndexedDataset(tmp_path / "set")
    assert len(dataset) == 7
    documents = [np.concatenate(sequences[:3]), np.empty(0), np.concatenate(sequences[3:])]
    assert dataset.document_lengths.tolist() == [len(d) for d in documents]
    for i, document in enumerate(documents):
        np.testing.assert_array_equal(dataset.read(i), document)
    np.testing.assert_array_equal(dataset.read(2, 5, 3), documents[2][5:8])


def test_megatrons_documents_of_several_sequences(tmp_path, rng):
    """A document that was written as several sequences (sentences) is read as one."""
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    torch = pytest.importorskip("torch")
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.int32)
    expected = []
    for _ in range(20):
        sentences = random_documents(rng, int(rng.integers(0, 5)), eod=None)
        for sentence in sentences:
            builder.add_item(torch.from_numpy(sentence))
        builder.end_document()
        expected.append(np.concatenate([np.empty(0, int), *sentences]))
    builder.finalize(str(tmp_path / "m.idx"))
    dataset = IndexedDataset(tmp_path / "m")
    assert dataset.num_documents == 20
    assert dataset.document_lengths.tolist() == [len(d) for d in expected]
    for i, document in enumerate(expected):
        np.testing.assert_array_equal(dataset.read(i), document)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
def test_same_bytes_as_megatron(tmp_path, rng, dtype):
    """megatron-core writes the same files and reads ours."""
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    documents = random_documents(rng, 100, min_length=0)
    prefix = write_dataset(tmp_path / "ours", documents, dtype)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=dtype)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()
    theirs = megatron.IndexedDataset(prefix)
    ours = IndexedDataset(tmp_path / "theirs")
    for i, document in enumerate(documents):
        np.testing.assert_array_equal(theirs[i], document)
        np.testing.assert_array_equal(ours[i], document)


def test_multimodal_index_is_read(tmp_path, rng):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    documents = random_documents(rng, 10)
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "m.bin"), dtype=np.int32, multimodal=True)
    for document in documents:
        builder.add_document(document, [len(document)], [0])
    builder.finalize(str(tmp_path / "m.idx"))
    np.testing.assert_array_equal(IndexedDataset(tmp_path / "m").read(7), documents[7])


def _damage(path, change):
    content = bytearray(path.read_bytes())
    path.write_bytes(change(content))


def _poke(offset, value):
    def change(content):
        content[offset] = value
        return content

    return change


@pytest.mark.parametrize(
    ("suffix", "change", "message"),
    [
        ("idx", lambda c: c[:20], r"set\.idx: truncated"),
        ("idx", lambda c: b"", r"set\.idx: truncated"),
        ("idx", lambda c: c[:-8], r"set\.idx: .*truncated or damaged"),
        ("idx", lambda c: c[: len(c) // 2], r"set\.idx: .*truncated or damaged"),
        ("idx", _poke(0, 0), r"set\.idx: not an indexed dataset"),
        ("idx", _poke(9, 2), r"set\.idx: not an indexed dataset"),
        ("idx", _poke(17, 99), r"set\.idx: unknown dtype code 99"),
        ("idx", _poke(17, 7), r"set\.idx: holds float32 values, not token ids"),
        ("idx", _poke(18, 1), r"set\.idx: .*truncated or damaged"),
        ("idx", _poke(34 + 12 * 30 + 8, 200), r"set\.idx: damaged, its document indices"),
        ("idx", _poke(34 + 4 * 30 + 8, 255), r"set\.idx: damaged, its sequence pointers"),
        ("bin", lambda c: c[:-2], r"set\.bin: .*truncated"),
        ("bin", lambda c: b"", r"set\.bin: .*truncated"),
        ("bin", lambda c: c + b"xx", r"set\.bin: .*another index"),
    ],
)
def test_damaged_files_are_named(tmp_path, rng, suffix, change, message):
    """A missing, truncated or inconsistent file gives one line that names it."""
    prefix = write_dataset(tmp_path / "set", random_documents(rng, 30))
    _damage(tmp_path / f"set.{suffix}", change)
    with pytest.raises(ValueError, match=message) as error:
        IndexedDataset(prefix)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_missing_files_are_named(tmp_path, rng, suffix):
    prefix = write_dataset(tmp_path / "set", random_documents(rng, 3))
    (tmp_path / f"set.{suffix}").unlink()
    with pytest.raises(ValueError, match=rf"set\.{suffix}: no such file"):
        IndexedDataset(prefix)
    with pytest.raises(ValueError, match="give the prefix without its suffix"):
        IndexedDataset(prefix + ".bin")


def test_fingerprint_follows_lengths_not_place(tmp_path, rng):
    documents = random_documents(rng, 30)
    one, same = (IndexedDataset(write_dataset(tmp_path / name, documents)) for name in "ab")
    other = IndexedDataset(write_dataset(tmp_path / "c", documents[:-1]))
    assert one.fingerprint() == same.fingerprint() != other.fingerprint()
