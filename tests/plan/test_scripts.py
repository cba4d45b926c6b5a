"""Flag lists of public scripts through `--dry-run`."""

import pytest

from megafp8.config import parse_args
from megafp8.plan.summary import dry_run
from tests.config.scripts import SCRIPTS, mended

# vocabulary, and the dense model's parameters, counted by hand: V h + S h + per layer + final norm (+ V h)
DENSE = {
    "llama3_8b_fp8": (
        128256,
        2 * 128256 * 4096 + 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 4 * 4096) + 8192,
    ),
    "gpt3_175b": (50257, 50257 * 12288 + 2048 * 12288 + 96 * (12 * 12288**2 + 13 * 12288) + 2 * 12288),
    "mixtral_8x7b": (32000, 2 * 32000 * 4096 + 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 2 * 4096) + 4096),
    "qwen3_30b_a3b": (
        151936,
        2 * 151936 * 2048 + 48 * (2048 * 5120 + 4096 * 2048 + 3 * 2048 * 6144 + 2 * 2048 + 2 * 128) + 2048,
    ),
    "deepseek_v3": (
        129280,
        2 * 129280 * 7168 + 61 * (7168 * 3 * 16384 + 16384 * 7168 + 3 * 7168 * 18432 + 2 * 7168 + 2 * 128) + 7168,
    ),
}

FILES = ("--tokenizer-type", "--tokenizer-model", "--data-path", "--vocab-file", "--merge-file", "--vocab-size")


@pytest.mark.parametrize("name", SCRIPTS)
def test_whole_lists_dry_run(name):
    """With what is still missing left out, and numbers in place of the tokenizer's files."""
    vocabulary, count = DENSE[name]
    words = mended(name).split()
    for flag in (
        "--tokenizer-type",
        "--tokenizer-model",
        "--data-path",
        "--vocab-file",
        "--merge-file",
        "--vocab-size",
    ):
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    argv = [w for w in words if w != "--mock-data"]
    argv += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocabulary - 1), "--dry-run"]
    config = parse_args(argv, env={}, check_files=False)
    text = dry_run(config)
    assert f"{count:,}  ({count / 1e9:.3f} billion)" in text
    fp8 = 4 * config.model.num_layers if config.fp8.enabled else 0
    assert f"{fp8} of {4 * config.model.num_layers + 1} linears run in FP8" in text
    for note in config.notes:
        assert note in text
