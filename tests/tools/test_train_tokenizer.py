"""tools/train_tokenizer.py: repeatable, lossless, and clear about what it can't do."""

import json

import pytest
import train_tokenizer

from megafp8.data.arguments import run
from megafp8.data.tokenizer import SentencePieceTokenizer
from tests.data.helpers import SHAKESPEARE


def train(tmp_path, *flags, output="tok"):
    code = run(train_tokenizer.main, [*map(str, flags), "--output-prefix", str(tmp_path / output)])
    assert code == 0
    return SentencePieceTokenizer(str(tmp_path / f"{output}.model"))


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_tokenizer_of_the_example_text(tmp_path, model_type):
    """Trained in seconds, the same bytes again, compresses, loses nothing, has BOS and EOD."""
    (tmp_path / "text.txt").write_text(SHAKESPEARE.read_text()[:200_000])
    flags = ("--input", tmp_path / "text.txt", "--vocab-size", 1000, "--model-type", model_type)
    tokenizer = train(tmp_path, *flags)
    train(tmp_path, *flags, output="other/again")
    for suffix in ("model", "vocab"):
        assert (tmp_path / f"tok.{suffix}").read_bytes() == (tmp_path / "other" / f"again.{suffix}").read_bytes()
    assert (tokenizer.vocab_size, tokenizer.bos, tokenizer.eod) == (1000, 1, 2)
    text = SHAKESPEARE.read_text()[300_000:320_000]
    assert len(tokenizer.encode(text)) < 0.55 * len(text)
    for sample in (text, "  two  blanks\n\n\ttab 2024 ", "東京 🙂 naïve\x00", ""):
        assert tokenizer.decode(tokenizer.encode(sample)) == sample
    assert len((tmp_path / "tok.vocab").read_text().splitlines()) == 1000


def test_json_lines_and_long_lines(tmp_path):
    """Every kind of input; a line longer than SentencePiece takes still counts."""
    text = SHAKESPEARE.read_text()[:60_000].replace("\n", " ")
    (tmp_path / "a.jsonl").write_text(json.dumps({"body": text}) + "\n" + json.dumps({"body": ""}) + "\n")
    tokenizer = train(tmp_path, "--input", tmp_path / "a.jsonl", "--json-keys", "body", "--vocab-size", 600)
    assert len(tokenizer.encode(text)) < 0.7 * len(text)


def test_sample_of_the_lines(tmp_path):
    flags = ("--input", SHAKESPEARE, "--vocab-size", 500, "--max-sentences", 2000)
    train(tmp_path, *flags)
    train(tmp_path, *flags, output="again")
    assert (tmp_path / "tok.model").read_bytes() == (tmp_path / "again.model").read_bytes()


@pytest.mark.parametrize(
    ("content", "flags", "message"),
    [
        ("To be or not to be\n", ["--vocab-size", "5000"], "--vocab-size 5000: the text has too few distinct pieces"),
        ("To be or not to be\n", ["--vocab-size", "5000", "--model-type", "unigram"], "--vocab-size 5000: "),
        (
            "".join(chr(0x4E00 + i) for i in range(500)),
            ["--vocab-size", "300", "--character-coverage", "1"],
            "--vocab-size 300: the text's characters alone need",
        ),
        ("\n \n", ["--vocab-size", "300"], "holds no text"),
        ("text", ["--vocab-size", "300", "--input", "missing.txt"], "--input missing.txt: no such file"),
    ],
)
def test_mistakes(tmp_path, capfd, content, flags, message):
    """One line and exit status 2; no file left behind."""
    (tmp_path / "a.txt").write_text(content)
    assert (
        run(train_tokenizer.main, ["--input", str(tmp_path / "a.txt"), "--output-prefix", str(tmp_path / "t"), *flags])
        == 2
    )
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert message in lines[0]
    assert [p.name for p in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("flags", [["--vocab-size", "100"], ["--vocab-size", "300", "--character-coverage", "0"], []])
def test_bad_flags(tmp_path, flags):
    with pytest.raises(SystemExit) as leaving:
        train_tokenizer.parse_args(["--input", "x", "--output-prefix", "y", *flags])
    assert leaving.value.code == 2
