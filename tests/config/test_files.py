"""Files that flags name: looked for before anything is built."""

import pytest

from megafp8.config import parse_args


def data_prefix(directory, name="corpus"):
    for suffix in (".bin", ".idx"):
        (directory / (name + suffix)).touch()
    return str(directory / name)


def test_files_that_exist_pass(parse, tmp_path):
    prefix = data_prefix(tmp_path, "a corpus")
    config = parse(f"--data-path 0.5 '{prefix}' 0.5 '{prefix}'", without=("--mock-data",), files=True)
    assert config.data.split == "969,30,1"


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_missing_data_file(parse, tmp_path, suffix):
    prefix = data_prefix(tmp_path)
    (tmp_path / f"corpus{suffix}").unlink()
    with pytest.raises(ValueError, match=f"--data-path {prefix}: {prefix}{suffix} is missing; build it"):
        parse(f"--data-path {prefix}", without=("--mock-data",), files=True)
    with pytest.raises(ValueError, match=f"--train-data-path {prefix}: "):
        parse(f"--train-data-path {prefix}", without=("--mock-data",), files=True)


def test_data_path_is_a_directory(parse, tmp_path):
    with pytest.raises(ValueError, match=f"--data-path {tmp_path}: a directory; give the prefix of token files"):
        parse(f"--data-path {tmp_path}", without=("--mock-data",), files=True)
    prefixes = [data_prefix(tmp_path, name) for name in "abcd"]
    with pytest.raises(ValueError, match=f"a directory; there is {' and '.join(prefixes[:3])}$"):
        parse(f"--data-path {tmp_path}", without=("--mock-data",), files=True)


def test_data_path_with_suffix(parse, tmp_path):
    prefix = data_prefix(tmp_path)
    with pytest.raises(ValueError, match="give the prefix without .bin"):
        parse(f"--data-path {prefix}.bin", without=("--mock-data",), files=True)


def test_missing_tokenizer_file(parse, tmp_path):
    with pytest.raises(ValueError, match="--tokenizer-model .*: no such file"):
        parse(f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {tmp_path}/no.model", files=True)
    (tmp_path / "vocab.json").touch()
    files = f"--vocab-file {tmp_path}/vocab.json --merge-file {tmp_path}/merges.txt"
    with pytest.raises(ValueError, match="--merge-file .*: no such file"):
        parse(f"--tokenizer-type GPT2BPETokenizer {files}", files=True)


def test_finetune_needs_the_checkpoint(parse, tmp_path):
    with pytest.raises(ValueError, match="--load .*: no such directory"):
        parse(f"--finetune --load {tmp_path}/no", files=True)
    parse(f"--load {tmp_path}/no", files=True)  # a first start: nothing to resume yet
    parse(f"--finetune --load {tmp_path}", files=True)


def test_parse_args_checks_files_by_default(tmp_path):
    argv = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 --seq-length 32 --lr 1e-3 "
    argv += f"--train-iters 5 --tokenizer-type ByteTokenizer --data-path {tmp_path}/none"
    with pytest.raises(ValueError, match="is missing"):
        parse_args(argv.split(), env={})
