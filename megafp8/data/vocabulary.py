"""The check that a corpus fits a vocabulary."""

import os

import numpy as np

from megafp8.data.cache import cached_arrays
from megafp8.data.indexed import IndexedDataset, token_path


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
