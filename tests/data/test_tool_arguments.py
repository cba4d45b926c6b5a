"""Tools: a file that can't be read or written is one line and exit status 2."""

import gzip

import preprocess_data
import pytest

from megafp8.data.arguments import run


@pytest.mark.parametrize("output", ["file/out", "x" * 300])
def test_output_that_cant_be_written(tmp_path, capsys, output):
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / "file").write_text("")
    argv = ["--input", str(tmp_path / "text.txt"), "--output-prefix", str(tmp_path / output)]
    assert run(preprocess_data.main, [*argv, "--tokenizer-type", "ByteTokenizer"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert str(tmp_path) in error
    assert "Traceback" not in error


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_a_directory_where_the_output_goes_is_told_before_the_work(tmp_path, capsys, suffix, monkeypatch):
    monkeypatch.setattr(preprocess_data, "build_tokenizer", lambda args: pytest.fail("it has begun"))
    (tmp_path / "text.txt").write_text("some text")
    (tmp_path / f"out_text_document.{suffix}").mkdir()
    argv = ["--input", str(tmp_path / "text.txt"), "--output-prefix", str(tmp_path / "out")]
    assert run(preprocess_data.main, [*argv, "--tokenizer-type", "ByteTokenizer"]) == 2
    assert f"out_text_document.{suffix} is a directory; remove it" in capsys.readouterr().err
    assert not (tmp_path / "out.partial").exists()


def test_flags_that_the_tokenizer_does_not_read_are_told(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some text")
    argv = ["--input", str(tmp_path / "text.txt"), "--output-prefix", str(tmp_path / "out"), "--workers", "1"]
    argv += ["--tokenizer-type", "ByteTokenizer"]
    assert run(preprocess_data.main, argv) == 0
    assert "no effect" not in capsys.readouterr().err
    more = ["--tokenizer-model", "tok.model", "--vocab-file", "v.json", "--tiktoken-num-special-tokens", "5"]
    assert run(preprocess_data.main, [*argv, *more]) == 0
    err = capsys.readouterr().err
    assert "note: --tokenizer-model: no effect (this --tokenizer-type reads no model)" in err
    assert "note: --vocab-file: no effect" in err
    assert "note: --tiktoken-num-special-tokens: no effect" in err


@pytest.mark.parametrize("content", [b"x", gzip.compress(b"some text" * 50)[:-12]], ids=["no gzip", "cut short"])
def test_damaged_gzip(tmp_path, capsys, content):
    (tmp_path / "text.txt.gz").write_bytes(content)
    argv = ["--input", str(tmp_path / "text.txt.gz"), "--output-prefix", str(tmp_path / "out")]
    assert run(preprocess_data.main, [*argv, "--tokenizer-type", "ByteTokenizer"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
