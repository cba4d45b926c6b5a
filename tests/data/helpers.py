"""Small data sets for tests, and flags as `config.data` carries them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megafp8.config.data import DataConfig
from megafp8.data import IndexedDatasetBuilder

ASSETS = Path(__file__).parent / "assets"
SHAKESPEARE = Path(__file__).parents[2] / "examples" / "data" / "tinyshakespeare.txt"


def random_documents(
    rng: np.random.Generator,
    number: int,
    max_length: int = 50,
    vocab: int = 256,
    eod: int | None = 256,
    min_length: int = 1,
) -> list[np.ndarray]:
    """Documents of min_length..max_length random ids below `vocab`, each ended by `eod`."""
    lengths = rng.integers(min_length, max_length, size=number, endpoint=True)
    documents = [rng.integers(0, vocab, size=n) for n in lengths]
    return documents if eod is None else [np.append(d[:-1], eod) if len(d) else d for d in documents]


def write_dataset(prefix: Path, documents: Sequence[np.ndarray], dtype=np.uint16) -> str:
    with IndexedDatasetBuilder(prefix, dtype) as builder:
        for document in documents:
            builder.add_document(document)
    return str(prefix)


def data_flags(**values) -> DataConfig:
    """`config.data` with ByteTokenizer and sequences of 16 unless said otherwise."""
    return DataConfig(**{"tokenizer_type": "ByteTokenizer", "seq_length": 16, **values})
