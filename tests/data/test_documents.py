"""Raw documents from every kind of input, and what is wrong with them."""

import gzip
import json

import pytest

from megafp8.data.documents import find_sources, read_records, texts_of

DOCUMENTS = ["First.\nSecond line.", "", "Zoë 東京 🙂", "  indented\n\nwith a blank line  "]


def read(*inputs, keys=("text",), input_format="auto", **options):
    return [
        texts_of(record, keys)[keys[0]]
        for source in find_sources([str(i) for i in inputs], input_format)
        for record in read_records(source, keys, **options)
    ]


def jsonl(documents, key="text") -> str:
    return "".join(json.dumps({"id": 1, key: d}) + "\n" for d in documents)


def test_json_lines(tmp_path):
    (tmp_path / "a.jsonl").write_text(jsonl(DOCUMENTS))
    (tmp_path / "b.json").write_text(json.dumps({"text": "no newline at the end"}))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(jsonl(DOCUMENTS[::-1]).encode()))
    (tmp_path / "d.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "after a byte order mark"}\n\n{"text": null}\n')
    assert read(tmp_path / "a.jsonl") == DOCUMENTS
    everything = DOCUMENTS + ["no newline at the end"] + DOCUMENTS[::-1] + ["after a byte order mark", "", ""]
    assert read(*sorted(tmp_path.iterdir())) == everything
    assert read(tmp_path) == everything
    assert read(f"{tmp_path}/[ab].*") == DOCUMENTS + ["no newline at the end"]


def test_half_surrogates_become_replacement_characters(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a \\ud83d b \\ud83d\\ude42"}\n')
    assert read(tmp_path / "a.jsonl") == ["a \ufffd b 🙂"]


def test_plain_text(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffOne\ntwo\n\n \n\nThree\r\n\r\nFour\n".encode())
    assert read(path) == ["One\ntwo\n\n \n\nThree\r\n\r\nFour\n"]
    assert read(path, text_split="blank-lines") == ["One\ntwo", "Three", "Four"]
    assert read(path, text_split="lines") == ["One", "two", "", " ", "", "Three", "", "Four"]
    path.write_text("")
    assert read(path) == [""]
    assert read(path, text_split="blank-lines") == read(path, text_split="lines") == []
    path.write_text("text\n")
    path.rename(tmp_path / "book")
    assert read(tmp_path / "book", input_format="text") == ["text\n"]


def test_parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    documents = [*DOCUMENTS, None] * 600
    parquet.write_table(
        arrow.table({"id": range(len(documents)), "body": documents}), tmp_path / "a.parquet", row_group_size=700
    )
    assert read(tmp_path / "a.parquet", keys=("body",)) == [d or "" for d in documents]
    with pytest.raises(ValueError, match=r"a\.parquet: has no column 'text', only 'id', 'body'"):
        read(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_text("not parquet")
    with pytest.raises(ValueError, match=r"b\.parquet: not a parquet file"):
        read(tmp_path / "b.parquet")


def test_saved_datasets(tmp_path):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    rows = [d or "" for d in DOCUMENTS] * 50
    one = datasets.Dataset.from_dict({"text": rows, "id": list(range(len(rows)))})
    shuffled = one.shuffle(seed=3)
    one.save_to_disk(tmp_path / "one", num_shards=3)
    shuffled.save_to_disk(tmp_path / "shuffled")
    datasets.DatasetDict({"validation": shuffled, "train": one}).save_to_disk(tmp_path / "splits")
    assert read(tmp_path / "one") == rows
    assert read(tmp_path / "shuffled") == shuffled["text"][:] != rows
    assert read(tmp_path / "splits") == rows
    assert read(tmp_path / "splits", dataset_split="validation") == shuffled["text"][:]
    with pytest.raises(ValueError, match="--dataset-split test: .*splits has validation, train"):
        read(tmp_path / "splits", dataset_split="test")
    with pytest.raises(ValueError, match="has no column 'body', only 'text', 'id'"):
        read(tmp_path / "one", keys=("body",))
    next((tmp_path / "one").glob("*.arrow")).write_text("broken")
    with pytest.raises(ValueError, match=r"\.arrow: can't be read"):
        read(tmp_path / "one")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"a\.jsonl:2: not JSON"),
        ('{"body": "a"}', r"a\.jsonl:2: has no 'text', only 'body'; name the text's key with --json-keys"),
        ('{"text": 5}', r"a\.jsonl:2: 'text' is int, not text"),
        ('["a"]', r"a\.jsonl:2: a JSON object is expected, not list"),
        ("{}", r"a\.jsonl:2: has no 'text', only nothing"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text(jsonl(["fine"]) + line + "\n")
    with pytest.raises(ValueError, match=message) as error:
        read(tmp_path / "a.jsonl")
    assert "\n" not in str(error.value)


def test_bad_inputs_are_named(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    (tmp_path / "empty").mkdir()
    cases = [
        ((tmp_path / "missing.txt",), "missing.txt: no such file"),
        ((tmp_path / "*.csv",), "no such file"),
        ((tmp_path / "a.bin",), "unknown suffix; say what it is with --input-format"),
        ((tmp_path / "empty",), "no .jsonl, .json, .txt or .parquet files"),
        ((tmp_path / "latin.txt",), r"latin\.txt:1: not UTF-8"),
        ((tmp_path / "latin.jsonl",), r"latin\.jsonl:1: not JSON"),
    ]
    for inputs, message in cases:
        with pytest.raises(ValueError, match=message):
            read(*inputs)
