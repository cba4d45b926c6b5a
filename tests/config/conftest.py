"""A small valid command line that the tests vary."""

import shlex
from collections.abc import Callable

import pytest

from megafp8.config import Config, parse_args

BASE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --micro-batch-size 2 --seq-length 32 --lr 1e-3 "
    "--train-iters 5 --tokenizer-type ByteTokenizer --mock-data"
)
# The same as values.
SMALL = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "micro_batch_size": 2,
    "seq_length": 32,
    "lr": 1e-3,
    "train_iters": 5,
    "tokenizer_type": "ByteTokenizer",
    "mock_data": True,
}


@pytest.fixture
def parse() -> Callable[..., Config]:
    """parse(flags, without=[...]): the small command line, less some flags with their values, plus `flags`."""

    def run(flags: str = "", *, without: tuple[str, ...] = (), env: dict[str, str] | None = None, files: bool = False):
        argv = shlex.split(BASE)
        for flag in without:
            at = argv.index(flag)
            end = at + 1
            while end < len(argv) and not argv[end].startswith("--"):
                end += 1
            del argv[at:end]
        return parse_args([*argv, *shlex.split(flags)], env=env or {}, check_files=files)

    return run
