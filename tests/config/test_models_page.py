"""docs/models.md and docs/moe.md: every flag they name exists, and DeepSeek-V3's are a valid configuration."""

import re
from pathlib import Path

import pytest

from megafp8.config import compat, parse_args

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "models.md").read_text()
EXPERTS = re.findall(r"--(?:moe|num-experts|expert|context)[a-z0-9-]*", (DOCS / "moe.md").read_text())
REST = (
    "--micro-batch-size 1 --seq-length 4096 --lr 1e-4 --train-iters 5 --tokenizer-type NullTokenizer --mock-data "
    "--vocab-size 129279"
)


@pytest.mark.parametrize("flag", sorted(set(re.findall(r"--[a-z][a-z0-9-]+", PAGE)) - {"--dry-run"} | set(EXPERTS)))
def test_flags_are_supported(flag):
    assert compat.verdict(flag) == "supported"


def test_deepseek_v3():
    block = PAGE.split("```bash\n")[1].split("```")[0]
    config = parse_args(f"{block} {REST}".split(), env={}, check_files=False)
    assert sum(config.model.moe_layers) == 58
    assert config.notes == ()
