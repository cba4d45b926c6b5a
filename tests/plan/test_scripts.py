"""Flag lists of public scripts through `--dry-run`."""

import pytest

from megafp8.config import parse_args
from megafp8.plan.summary import dry_run
from tests.config.scripts import SCRIPTS, mended

V3_LAYER = (  # DeepSeek-V3's attention and norms, and its experts with router
    7168 * (1536 + 512 + 64) + 1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * 7168 + 1536 + 512 + 2 * 7168,
    257 * 3 * 7168 * 2048 + 256 * 7168,
)
# vocabulary; parameters, counted by hand: V h + S h + per layer + final norm (+ V h); linears in FP8 and in all
MODELS = {
    "llama3_8b_fp8": (
        128256,
        2 * 128256 * 4096 + 32 * (4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336 + 4 * 4096) + 8192,
        (4 * 32, 4 * 32 + 1),
    ),
    "gpt3_175b": (50257, 50257 * 12288 + 2048 * 12288 + 96 * (12 * 12288**2 + 13 * 12288) + 2 * 12288, (0, 4 * 96 + 1)),
    "mixtral_8x7b": (32000, 46_702_792_704, (0, 32 * (2 + 8 * 2) + 1)),
    "qwen3_30b_a3b": (151936, 30_532_122_624, (48 * (2 + 128 * 2), 48 * (2 + 128 * 2) + 1)),
    "deepseek_v3": (
        129280,
        2 * 129280 * 7168 + 61 * V3_LAYER[0] + 3 * 3 * 7168 * 18432 + 58 * V3_LAYER[1] + 7168  # the model: 671 billion
        + sum(V3_LAYER) + 2 * 7168 * 7168 + 3 * 7168,  # and its prediction of the token after the next
        (62 * 5 + 3 * 2 + 59 * 257 * 2, 62 * 5 + 3 * 2 + 59 * 257 * 2 + 2),
    ),
}  # fmt: skip

FILES = ("--tokenizer-type", "--tokenizer-model", "--data-path", "--vocab-file", "--merge-file", "--vocab-size")
FILES += ("--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--pipeline-model-parallel-layout")
FILES += ("--expert-model-parallel-size", "--expert-tensor-parallel-size")


@pytest.mark.parametrize("name", SCRIPTS)
def test_whole_lists_dry_run(name):
    """With what is still missing left out, and numbers in place of the tokenizer's files."""
    vocabulary, count, (fp8, linears) = MODELS[name]
    words = mended(name).split()
    for flag in FILES:
        if flag in words:
            del words[words.index(flag) : words.index(flag) + 2]
    argv = [w for w in words if w != "--mock-data"]
    argv += ["--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocabulary - 1), "--dry-run"]
    config = parse_args(argv, env={}, check_files=False)
    text = dry_run(config)
    assert f"{count:,}  ({count / 1e9:.3f} billion)" in text
    assert f"{fp8} of {linears} linears run in FP8" in text
    assert len(text.splitlines()) < 400, "like experts share a line"
    for note in config.notes:
        assert note in text
