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


@pytest.mark.parametrize("content", [b"x", gzip.compress(b"some text" * 50)[:-12]], ids=["no gzip", "cut short"])
def test_damaged_gzip(tmp_path, capsys, content):
    (tmp_path / "text.txt.gz").write_bytes(content)
    argv = ["--input", str(tmp_path / "text.txt.gz"), "--output-prefix", str(tmp_path / "out")]
    assert run(preprocess_data.main, [*argv, "--tokenizer-type", "ByteTokenizer"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
