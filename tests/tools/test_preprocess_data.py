"""tools/preprocess_data.py: what it writes, for any number of workers, and users' mistakes."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import preprocess_data
import pytest

from megafp8.data import IndexedDataset
from megafp8.data.arguments import run
from tests import forked
from tests.cases import quick
from tests.data.helpers import SHAKESPEARE
from tests.data.test_tokenizer import huggingface_directory, sentencepiece_model

ROOT = Path(__file__).parents[2]


def preprocess(tmp_path, *flags, output="out", workers=1):
    code = run(
        preprocess_data.main, [*map(str, flags), "--output-prefix", str(tmp_path / output), "--workers", str(workers)]
    )
    assert code == 0
    return IndexedDataset(tmp_path / f"{output}_text_document")


def write_jsonl(path, documents, **more):
    path.write_text("".join(json.dumps({"text": d, **more}) + "\n" for d in documents))
    return path


def random_texts(seed, number):
    rng = np.random.default_rng(seed)
    words = SHAKESPEARE.read_text()[:50_000].split(" ")
    return [" ".join(rng.choice(words, size=rng.integers(0, 60))) for _ in range(number)]


def test_bytes(tmp_path, capsys):
    """Documents as they are, one EOD each, empty ones (the first too) skipped and counted (CASES 73)."""
    texts = ["", "To be", "", "naïve", ""]
    dataset = preprocess(
        tmp_path,
        "--input",
        write_jsonl(tmp_path / "a.jsonl", texts),
        "--tokenizer-type",
        "ByteTokenizer",
        "--append-eod",
    )
    assert dataset.dtype == np.uint16
    assert [dataset.read(i).tolist() for i in range(dataset.num_documents)] == [
        [*b"To be", 256],
        [*"naïve".encode(), 256],
    ]
    assert "2 documents, 13 tokens (uint16), 3 empty ones skipped" in capsys.readouterr().out
    plain = preprocess(tmp_path, "--input", tmp_path / "a.jsonl", "--tokenizer-type", "ByteTokenizer")
    assert plain.read(0).tolist() == [*b"To be"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out_text_document.bin", "out_text_document.idx"]


@pytest.mark.parametrize("workers", quick([2, 5], {5}))
def test_workers_write_the_same_bytes(tmp_path, workers):
    path = write_jsonl(tmp_path / "a.jsonl", random_texts(0, 1200))
    flags = (
        "--input",
        path,
        "--tokenizer-type",
        "SentencePieceTokenizer",
        "--tokenizer-model",
        sentencepiece_model(tmp_path / "m"),
        "--append-eod",
    )
    preprocess(tmp_path, *flags, output="one")
    preprocess(tmp_path, *flags, output="many", workers=workers)
    for suffix in ("bin", "idx"):
        one, many = (tmp_path / f"{name}_text_document.{suffix}" for name in ("one", "many"))
        assert one.read_bytes() == many.read_bytes()


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("kind", ["sentencepiece", "huggingface"])
def test_special_tokens_once_a_document(tmp_path, kind, bos):
    """CASES 73: SentencePiece, and Hugging Face in the style of Llama 3 (whose post-processor adds BOS by itself):
    exactly one EOD a document, BOS only by flag, neither doubled by a text that spells it out."""
    if kind == "sentencepiece":
        model, eod, begin = sentencepiece_model(tmp_path / "m"), 2, 1
    else:
        model, eod, begin = huggingface_directory(tmp_path / "m"), 50258, 50257
    texts = ["plain", "<|begin_of_text|>spelt out<|end_of_text|>", "<s>as well</s>"]
    name = {"sentencepiece": "SentencePieceTokenizer", "huggingface": "HuggingFaceTokenizer"}[kind]
    dataset = preprocess(
        tmp_path,
        "--input",
        write_jsonl(tmp_path / "a.jsonl", texts),
        "--tokenizer-type",
        name,
        "--tokenizer-model",
        model,
        "--append-eod",
        *(["--prepend-bos"] if bos else []),
    )
    for i in range(3):
        ids = dataset.read(i).tolist()
        assert ids.count(eod) == 1
        assert ids[-1] == eod
        assert ids.count(begin) == bos
        assert (ids[0] == begin) == bos


def test_int32_when_the_vocabulary_needs_it(tmp_path):
    """CASES 72: the dtype follows from the whole vocabulary; ids beyond 65535 come back."""
    for size, dtype in ((65535, np.uint16), (65536, np.int32)):  # and one more id, the EOD
        path = write_jsonl(tmp_path / "a.jsonl", ["0 1", str(size - 1)])
        dataset = preprocess(
            tmp_path, "--input", path, "--tokenizer-type", "NullTokenizer", "--vocab-size", size, "--append-eod"
        )
        assert dataset.dtype == dtype
        assert [dataset.read(i).tolist() for i in range(2)] == [[0, 1, size], [size - 1, size]]


def test_several_keys(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ["body", "more"], title="t")
    preprocess(tmp_path, "--input", path, "--tokenizer-type", "ByteTokenizer", "--json-keys", "title", "text")
    assert IndexedDataset(tmp_path / "out_title_document").read(1).tolist() == [*b"t"]
    assert IndexedDataset(tmp_path / "out_text_document").read(1).tolist() == [*b"more"]


def test_shakespeare_by_speeches(tmp_path):
    """The example text: a speech a document, and nothing of the text is lost but the blank lines between them."""
    dataset = preprocess(
        tmp_path, "--input", SHAKESPEARE, "--split-text", "blank-lines", "--tokenizer-type", "ByteTokenizer"
    )
    assert dataset.num_documents == 7222
    speeches = [bytes(dataset.read(i).tolist()) for i in range(7222)]
    assert speeches == re.split(rb"\n\n+", SHAKESPEARE.read_bytes().strip())


def test_one_document_in_all_is_pointed_out(tmp_path, capsys):
    """A file with a document a line, read as one document, would train without any borders."""
    text = tmp_path / "a.txt"
    text.write_text("one\ntwo\n")
    bytes_of = ("--input", text, "--tokenizer-type", "ByteTokenizer")
    preprocess(tmp_path, *bytes_of)
    assert "--split-text lines or blank-lines" in capsys.readouterr().out
    preprocess(tmp_path, *bytes_of, "--split-text", "lines")
    assert "note:" not in capsys.readouterr().out


def test_same_as_megatrons_builder(tmp_path):
    """The files are what megatron-core's builder writes for the same ids."""
    megatron = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    texts = [t for t in random_texts(1, 300) if t]
    preprocess(
        tmp_path,
        "--input",
        write_jsonl(tmp_path / "a.jsonl", texts),
        "--tokenizer-type",
        "ByteTokenizer",
        "--append-eod",
        workers=2,
    )
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for text in texts:
        ids = [*text.encode(), 256]
        builder.add_document(ids, [len(ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"out_text_document.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ('{"text": "a"}\n{"text', [], "a.jsonl:2: not JSON"),
        ('{"text": ""}\n\n', [], "no document has any text under 'text' (2 are empty)"),
        ('{"text": "a"}\n', ["--json-keys", "body"], "a.jsonl:1: has no 'body'"),
        ('{"text": "a"}\n', ["--prepend-bos"], "--prepend-bos: this ByteTokenizer has no beginning-of-sequence"),
        ('{"text": "a"}\n', ["--tokenizer-type", "Llama2Tokenizer"], "--tokenizer-type Llama2Tokenizer: use Sentence"),
        ('{"text": "a"}\n', ["--tokenizer-type", "NullTokenizer", "--vocab-size", "9"], "NullTokenizer reads numbers"),
        ('{"text": "a"}\n', ["--input", "missing.jsonl"], "--input missing.jsonl: no such file"),
    ],
)
def test_mistakes(tmp_path, capsys, content, flags, message, workers):
    """One line, exit status 2, and no file left behind."""
    (tmp_path / "a.jsonl").write_text(content)
    code = run(
        preprocess_data.main,
        [
            "--input",
            str(tmp_path / "a.jsonl"),
            "--output-prefix",
            str(tmp_path / "out"),
            "--tokenizer-type",
            "ByteTokenizer",
            "--workers",
            str(workers),
            *flags,
        ],
    )
    error = capsys.readouterr().err
    assert code == 2
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_append_eod_without_an_eod(tmp_path, capsys):
    """CASES 73: at start, before any document is read."""
    model = sentencepiece_model(tmp_path / "m", eos=False)
    path = write_jsonl(tmp_path / "a.jsonl", ["a"])
    flags = [
        "--input",
        str(path),
        "--output-prefix",
        str(tmp_path / "out"),
        "--tokenizer-type",
        "SentencePieceTokenizer",
        "--tokenizer-model",
        model,
    ]
    assert run(preprocess_data.main, [*flags, "--append-eod"]) == 2
    assert "--append-eod: this SentencePieceTokenizer has no end-of-document token" in capsys.readouterr().err
    assert run(preprocess_data.main, flags) == 0


def test_command_line(tmp_path):
    """As people run it: exit status, one line, progress where there is no terminal."""
    path = write_jsonl(tmp_path / "a.jsonl", random_texts(2, 600))
    command = [
        str(ROOT / "tools" / "preprocess_data.py"),
        "--input",
        str(path),
        "--output-prefix",
        str(tmp_path / "out"),
        "--tokenizer-type",
        "ByteTokenizer",
        "--workers",
        "2",
    ]
    output = tmp_path / "output"
    assert forked.run([*command, "--log-interval", "200"], output) == 0, output.read_text()
    assert "Processed 600 documents" in output.read_text()
    assert forked.run([*command, "--json-keys", "x"], output) == 2
    assert output.read_text().count("\n") == 1


def test_progress_bar_on_a_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    preprocess(
        tmp_path,
        "--input",
        write_jsonl(tmp_path / "a.jsonl", random_texts(2, 600)),
        "--tokenizer-type",
        "ByteTokenizer",
    )
    error = capsys.readouterr().err
    assert "tokenizing: 100%" in error
    assert "documents=600" in error
    assert "Processed" not in error


@pytest.mark.parametrize("flags", [["--workers", "0"], ["--json-keys", "a", "a"], ["--input-format", "csv"]])
def test_bad_flags(flags):
    with pytest.raises(SystemExit) as leaving:
        preprocess_data.parse_args(["--input", "x", "--output-prefix", "y", "--tokenizer-type", "T", *flags])
    assert leaving.value.code == 2
