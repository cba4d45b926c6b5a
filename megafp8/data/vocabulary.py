"""Sizes of vocabularies, and the check that a corpus fits one."""

import os

import numpy as np

from megafp8.data.cache import cached_arrays
from megafp8.data.indexed import IndexedDataset, token_path


def padded_vocab_size(
    vocab_size: int,
    make_vocab_size_divisible_by: int = 128,
    tensor_model_parallel_size: int = 1,
    extra_vocab_size: int = 0,
) -> int:
    """Rows of the embedding: ids in use (plus `--extra-vocab-size`), rounded up to a multiple of the product of
    `--make-vocab-size-divisible-by` and the tensor-parallel size, as Megatron does."""
    multiple = make_vocab_size_divisible_by * tensor_model_parallel_size
    return -(-(vocab_size + extra_vocab_size) // multiple) * multiple


def check_token_ids(dataset: IndexedDataset, vocab_size: int, cache_dir: str | os.PathLike | None = None) -> None:
    """ValueError when a data set holds an id that the vocabulary doesn't.

    Reads the whole `.bin` file once (unless its dtype already settles it) and remembers the result in `cache_dir`
    until the file changes.
    """
    if dataset.dtype.kind == "u" and np.iinfo(dataset.dtype).max < vocab_size:
        return
    found = cached_arrays(
        cache_dir,
        {"what": "range of token ids", "file": dataset.identity()},
        lambda: {"range": np.array(dataset.token_range(), dtype=np.int64)},
    )["range"]
    low, high = (int(x) for x in found)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"{token_path(dataset.prefix)}: token id {low if low < 0 else high} is outside the vocabulary "
            f"of {vocab_size} ids; train with the tokenizer that the data was preprocessed with "
            "(--tokenizer-type, --tokenizer-model, --vocab-size)"
        )
