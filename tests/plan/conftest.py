"""Configurations of small models of every kind."""

from collections.abc import Callable

import pytest

from megafp8.config import Config, build_config, with_vocab_size
from tests.plan.variants import VARIANTS


@pytest.fixture
def make() -> Callable[..., Config]:
    """make(variant, world_size=1, **values): a small model of that kind whose vocabulary of 257 tokens is known."""

    def run(variant: str = "gpt2", world_size: int = 1, **values) -> Config:
        small = {
            "num_layers": 3,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "seq_length": 32,
            "micro_batch_size": 2,
            "lr": 1e-3,
            "train_iters": 5,
            "tokenizer_type": "ByteTokenizer",
            "mock_data": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        }
        env = {"WORLD_SIZE": str(world_size)}
        return with_vocab_size(build_config(env=env, **small | VARIANTS[variant] | values), 257)

    return run
