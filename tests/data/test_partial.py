"""Preprocessing that is interrupted: the same command goes on and writes the same bytes, from any moment and input."""

import gzip
import io
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import preprocess_data
import pytest

from megafp8.data import partial
from megafp8.data.arguments import run
from megafp8.data.documents import Corpus, Cursor, find_sources
from megafp8.data.duplicates import DUPLICATE, EMPTY, UNIQUE, hash_texts, mark_duplicates
from megafp8.data.preprocess import EncodeOptions, preprocess
from megafp8.data.tokenizer import ByteTokenizer

SYSTEM_CALLS = ("fsync", "replace", "truncate", "unlink")


@pytest.fixture(autouse=True)
def commit_often(monkeypatch):
    """Every chunk of 4 documents is committed."""
    monkeypatch.setattr(partial, "SECONDS_BETWEEN_COMMITS", 0.0)
    monkeypatch.setattr(partial, "_MOST_OF_THE_TIME", 1e9)
    monkeypatch.setattr("megafp8.data.preprocess._CHUNK_RECORDS", 4)


def texts(number: int) -> list[str]:
    """Every third one repeats an earlier one, every seventh is empty."""
    return ["" if i % 7 == 0 else f"text {i // 2 if i % 3 == 0 else i} ü" for i in range(number)]


def write_jsonl(path: Path, documents: list[str]) -> Path:
    content = "".join(json.dumps({"text": text, "title": text[:5]}) + "\n" for text in documents).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def flags(source: Path, output: Path, *extra: str) -> list[str]:
    common = ["--tokenizer-type", "ByteTokenizer", "--append-eod", "--workers", "1"]
    return ["--input", str(source), "--output-prefix", str(output), *common, *extra]


def written(output: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(output.parent.glob(f"{output.name}_*_document.*"))]


def start(argv: list[str], prepare=lambda: None) -> int:
    """The tool in a process of its own, forked: its id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    prepare()
    os._exit(run(preprocess_data.main, argv))


def die_at_call(number: int) -> None:
    """The process is gone just before its system call of that number."""
    counter = itertools.count(1)

    def counted(real):
        def call(*args, **options):
            if next(counter) == number:
                os._exit(9)
            return real(*args, **options)

        return call

    for name in SYSTEM_CALLS:
        setattr(os, name, counted(getattr(os, name)))


def test_killed_at_any_moment(tmp_path):
    """Before each call that makes a state last or visible; then the same command writes what it would have written, and
    nothing else is left. A pair that stood there before is replaced as a whole."""
    source, extra = write_jsonl(tmp_path / "a.jsonl", texts(12)), ("--json-keys", "title", "text", "--drop-duplicates")
    assert run(preprocess_data.main, flags(source, tmp_path / "one" / "o", *extra)) == 0
    output = tmp_path / "two" / "o"
    codes = []
    while not codes or codes[-1] == 9:
        pid = start(flags(source, output, *extra), prepare=lambda: die_at_call(len(codes) + 1))
        codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        for index in output.parent.glob("*.idx"):
            assert index.with_suffix(".bin").exists()
        assert run(preprocess_data.main, flags(source, output, *extra)) == 0
        assert written(output) == written(tmp_path / "one" / "o")
        assert not Path(f"{output}.partial").exists()
    assert codes[-1] == 0
    assert len(codes) > 25


def test_killed_by_signal_with_workers(tmp_path, capsys):
    """SIGKILL: its workers leave, nobody else may write meanwhile, and the next run goes on and says so."""
    source, output = write_jsonl(tmp_path / "a.jsonl", texts(400)), tmp_path / "o"
    progress = tmp_path / "o.partial" / "progress.json"

    def slow() -> None:
        encode = ByteTokenizer.encode_batch
        ByteTokenizer.encode_batch = lambda *args: time.sleep(0.02) or encode(*args)

    pid = start(flags(source, output, "--workers", "2"), prepare=slow)
    while not progress.exists() or json.loads(progress.read_text())["records"] < 20:
        time.sleep(0.005)
    workers = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert run(preprocess_data.main, flags(source, output)) == 2
    assert "another process is writing this output" in capsys.readouterr().err
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len(workers) == 2
    deadline = time.monotonic() + 20
    while any(alive(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert run(preprocess_data.main, flags(source, output)) == 0
    assert "documents of an interrupted run" in capsys.readouterr().err
    assert run(preprocess_data.main, flags(source, tmp_path / "one")) == 0
    assert written(output) == written(tmp_path / "one")


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def interrupted(corpus: Corpus, output: Path, after: int, error=KeyboardInterrupt) -> list[str]:
    """Runs until `after` documents are written; what it said."""
    said: list[str] = []

    def report(documents: int, cursor: Cursor) -> None:
        if documents >= after:
            raise error

    with pytest.raises(error):
        preprocess(corpus, ByteTokenizer, EncodeOptions(), str(output), report=report, say=said.append)
    return said


@pytest.mark.parametrize("kind", ["jsonl", "gz", "lines", "blank-lines", "parquet", "dataset"])
def test_every_input_goes_on(tmp_path, kind):
    """Two sources, interrupted in the first, then in the second."""
    documents = [text or "none" for text in texts(40)]
    sources, split = [], "file"
    for number, part in enumerate((documents[:20], documents[20:])):
        path = tmp_path / f"{number}.jsonl"
        if kind in ("jsonl", "gz"):
            path = write_jsonl(tmp_path / (f"{number}.jsonl.gz" if kind == "gz" else f"{number}.jsonl"), part)
        elif kind in ("lines", "blank-lines"):
            path, split = tmp_path / f"{number}.txt", kind
            path.write_text(("\n" if kind == "lines" else "\n\n \n").join(part))
        else:
            pyarrow = pytest.importorskip("pyarrow")
            parquet = pytest.importorskip("pyarrow.parquet")
            table = pyarrow.table({"text": part})
            path = tmp_path / f"{number}.{kind}"
            if kind == "parquet":
                parquet.write_table(table, path, row_group_size=7)
            else:
                path.mkdir()
                for half in (0, 1):
                    with pyarrow.ipc.new_stream(path / f"{half}.arrow", table.schema) as writer:
                        writer.write_table(table.slice(10 * half, 10), max_chunksize=3)
                entries = [{"filename": f"{half}.arrow"} for half in (0, 1)]
                (path / "state.json").write_text(json.dumps({"_data_files": entries}))
        sources.append(str(path))
    corpus = Corpus(tuple(find_sources(sources)), text_split=split)
    places = []
    preprocess(
        corpus,
        ByteTokenizer,
        EncodeOptions(),
        str(tmp_path / "one"),
        report=lambda n, cursor: places.append((n, cursor)),
    )
    assert [n for n, _ in places] == list(range(0, 41, 4))
    bars = preprocess_data.Progress(corpus, 0)
    done = [bars.done(cursor) for _, cursor in places]
    assert done == sorted(done)
    assert sum(corpus.sizes()) - 16 <= done[-1] <= sum(corpus.sizes())  # an Arrow file ends in a mark of 8 bytes
    assert interrupted(corpus, tmp_path / "two", 12)[-1].startswith("12 documents are kept in ")
    assert interrupted(corpus, tmp_path / "two", 32)[0].startswith("going on after 12 documents")
    outcome = preprocess(corpus, ByteTokenizer, EncodeOptions(), str(tmp_path / "two"))
    assert written(tmp_path / "two") == written(tmp_path / "one")
    assert outcome.duplicates == len(documents) - len(set(documents))


def test_nothing_is_kept_of_what_was_not_begun(tmp_path):
    corpus = Corpus(tuple(find_sources([str(write_jsonl(tmp_path / "a.jsonl", texts(40)))])))
    assert interrupted(corpus, tmp_path / "o", 0) == []
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_the_files_of_others_are_left_alone(tmp_path, capsys):
    source, notes = write_jsonl(tmp_path / "a.jsonl", texts(4)), tmp_path / "o.partial" / "notes.txt"
    notes.parent.mkdir()
    notes.write_text("mine")
    for more in ([], ["--restart"]):
        assert run(preprocess_data.main, [*flags(source, tmp_path / "o"), *more]) == 2
        assert "holds notes.txt; move that" in capsys.readouterr().err
    assert [path.name for path in notes.parent.iterdir()] == ["notes.txt"]


def test_a_full_disk_leaves_what_was_committed(tmp_path, monkeypatch):
    """What is in buffers can't be written when files are closed either: it is said what is kept, and that goes on."""
    corpus = Corpus(tuple(find_sources([str(write_jsonl(tmp_path / "a.jsonl", texts(40)))])))
    add = partial.Partial.add

    def add_until_full(state, *chunk):
        if state.records == 12:
            state._files["0.bin"] = open("/dev/full", "ab")  # noqa: SIM115 - the state closes it
        add(state, *chunk)

    said: list[str] = []
    monkeypatch.setattr(partial.Partial, "add", add_until_full)
    with pytest.raises(OSError, match="No space left"):
        preprocess(corpus, ByteTokenizer, EncodeOptions(), str(tmp_path / "o"), say=said.append)
    assert said[-1].startswith("12 documents are kept in ")
    monkeypatch.setattr(partial.Partial, "add", add)
    preprocess(corpus, ByteTokenizer, EncodeOptions(), str(tmp_path / "o"))
    preprocess(corpus, ByteTokenizer, EncodeOptions(), str(tmp_path / "one"))
    assert written(tmp_path / "o") == written(tmp_path / "one")


def test_other_inputs_and_flags_are_noticed(tmp_path, capsys):
    """One line that names the change, exit code 2, and the state stays; --restart begins anew."""
    source, output = write_jsonl(tmp_path / "a.jsonl", texts(40)), tmp_path / "o"
    other = write_jsonl(tmp_path / "b.jsonl", texts(9))
    corpus = Corpus(tuple(find_sources([str(source)])))
    interrupted(corpus, output, 12, error=OSError)
    plain = [flag for flag in flags(source, output) if flag != "--append-eod"]
    wrong = {
        "--append-eod was off and is on now": flags(source, output),
        f"--input {other} is new, and 1 more": [*plain[:1], str(other), *plain[2:]],
        "the tokenizer is another one": [*plain, "--tokenizer-type", "NullTokenizer", "--vocab-size", "9"],
    }
    os.utime(source, ns=(1, 1))
    wrong[f"--input {source} has changed since"] = plain
    for words, argv in wrong.items():
        assert run(preprocess_data.main, argv) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1
        assert "--restart" in error
    progress = tmp_path / "o.partial" / "progress.json"
    assert json.loads(progress.read_text())["records"] == 12
    state = json.loads(progress.read_text())
    for damaged in ("{", "[]", json.dumps(state | {"records": -1}), json.dumps(state | {"job": None})):
        progress.write_text(damaged)
        assert run(preprocess_data.main, plain) == 2
        assert "damaged; --restart" in capsys.readouterr().err
    assert run(preprocess_data.main, [*plain, "--restart"]) == 0
    assert not progress.parent.exists()


def test_pipe(tmp_path, capsys):
    """Its length is unknown, and that is said; nothing is kept of it."""
    os.mkfifo(tmp_path / "p")
    pid = os.fork()
    if not pid:
        write_jsonl(tmp_path / "p", texts(40))
        os._exit(0)
    extra = ("--input-format", "jsonl", "--log-interval", "20")
    assert run(preprocess_data.main, flags(tmp_path / "p", tmp_path / "o", *extra)) == 0
    os.waitpid(pid, 0)
    error = capsys.readouterr().err
    assert "is a pipe: how much is left is unknown" in error
    assert "Processed 20 documents (" in error
    assert "how many are left in a pipe is unknown" in error
    assert not (tmp_path / "o.partial").exists()


def test_time_left_counts_what_this_run_did(monkeypatch, tmp_path, capsys):
    """10 of 110 bytes done by the run before, 50 more in 5 seconds: the other 50 take 5."""
    (tmp_path / "a.jsonl").write_bytes(b" " * 110)
    corpus, clock = Corpus(tuple(find_sources([str(tmp_path / "a.jsonl")]))), iter((100.0, 105.0))
    monkeypatch.setattr(preprocess_data.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    progress = preprocess_data.Progress(corpus, 1)
    progress(1, Cursor(read=10))
    progress(6, Cursor(read=60))
    assert sys.stderr.getvalue() == ("Processed 6 documents (1 docs/s, 0.00 MB/s): 54.5% of 0.0 MB, 0:00:05 left.\n")


def test_damaged_gzip_is_one_line(tmp_path, capsys):
    path = write_jsonl(tmp_path / "a.jsonl.gz", texts(400))
    whole = path.read_bytes()
    for content in (whole[:-20], whole[:60] + b"\0" * 40 + whole[100:], b"no gzip"):
        path.write_bytes(content)
        assert run(preprocess_data.main, flags(path, tmp_path / "o")) == 2
        assert "a.jsonl.gz: damaged or cut short" in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl.gz"]


def test_duplicates_in_any_number_of_passes():
    rng = np.random.default_rng(0)
    hashes = rng.integers(0, 2**64, 300, np.uint64)[rng.integers(0, 300, 2000)]
    hashes[5:9] = 2**64 - 1
    marks = np.where(rng.random(2000) < 0.1, EMPTY, UNIQUE).astype(np.uint8)
    expected, seen = marks.copy(), set()
    for i, value in enumerate(hashes.tolist()):
        if marks[i] == UNIQUE:
            expected[i] = DUPLICATE if value in seen else UNIQUE
            seen.add(value)
    for bound, block in ((10**6, 10**6), (100, 64), (7, 1999), (1, 500)):
        found = marks.copy()
        assert mark_duplicates(hashes, found, hashes_a_pass=bound, block=block) == (expected == DUPLICATE).sum()
        assert (found == expected).all()
    assert hash_texts(["ab", "c"]) != hash_texts(["a", "bc"])
    assert mark_duplicates(hashes[:0], marks[:0]) == 0


def test_dropping(tmp_path, capsys):
    """The first of each stays, in order; keys stay side by side."""
    documents = ["a", "b", "a", "", "c", "b", "a"]
    source = write_jsonl(tmp_path / "a.jsonl", documents)
    assert run(preprocess_data.main, flags(source, tmp_path / "o")) == 0
    report = capsys.readouterr().out
    assert "duplicates: 3 of 7 documents repeat an earlier one exactly (6 tokens); kept; --drop-duplicates" in report
    assert run(preprocess_data.main, flags(source, tmp_path / "d", "--drop-duplicates")) == 0
    assert "3 documents, 6 tokens (uint16), 1 empty ones skipped" in capsys.readouterr().out
    tokens = np.fromfile(tmp_path / "d_text_document.bin", np.uint16)
    assert tokens.tolist() == [97, 256, 98, 256, 99, 256]
