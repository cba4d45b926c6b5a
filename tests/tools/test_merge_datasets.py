"""tools/merge_datasets.py: documents of all parts in the order of their names, as Megatron's tool does."""

import merge_datasets
import numpy as np
import pytest

from megafp8.data import IndexedDataset
from megafp8.data.arguments import run
from tests.data.helpers import random_documents, write_dataset


@pytest.fixture
def parts(tmp_path):
    rng = np.random.default_rng(0)
    sizes = {"b": 20, "a": 7, "c.x": 1}
    documents = {name: random_documents(rng, number, min_length=0) for name, number in sizes.items()}
    for name, values in documents.items():
        write_dataset(tmp_path / "parts" / name, values)
    return documents


def merge(tmp_path, output):
    return run(merge_datasets.main, ["--input", str(tmp_path / "parts"), "--output-prefix", str(output)])


def test_merged(tmp_path, parts, capsys):
    assert merge(tmp_path, tmp_path / "all") == 0
    expected = parts["a"] + parts["b"] + parts["c.x"]
    dataset = IndexedDataset(tmp_path / "all")
    assert [dataset.read(i).tolist() for i in range(dataset.num_documents)] == [d.tolist() for d in expected]
    assert "28 documents" in capsys.readouterr().out
    # into the same directory, twice: the old result is not merged into the new
    for _ in range(2):
        assert merge(tmp_path, tmp_path / "parts" / "all") == 0
        assert (tmp_path / "parts" / "all.idx").read_bytes() == (tmp_path / "all.idx").read_bytes()


def test_same_bytes_as_megatron(tmp_path, parts):
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    assert merge(tmp_path, tmp_path / "ours") == 0
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for name in ("a", "b", "c.x"):
        builder.add_index(str(tmp_path / "parts" / name))
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()


def test_mistakes(tmp_path, parts, capsys):
    """One line, exit status 2, nothing written."""

    def expect(message):
        assert merge(tmp_path, tmp_path / "all") == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
        assert not list(tmp_path.glob("all*"))

    write_dataset(tmp_path / "parts" / "d", [np.array([70000])], np.int32)
    expect("d.bin: holds int32 ids, not uint16 as the others")
    (tmp_path / "parts" / "d.bin").unlink()
    expect("d.bin is missing; complete the pair or move it away")
    (tmp_path / "parts" / "d.idx").unlink()
    (tmp_path / "parts" / "b.bin").write_bytes(b"xx")
    expect("b.bin: 2 bytes, but")
    for path in (tmp_path / "parts").iterdir():
        path.unlink()
    expect("no .bin and .idx files in there")
    (tmp_path / "parts").rmdir()
    expect("no such directory")
