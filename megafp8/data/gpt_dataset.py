"""Training samples of one data set: `seq_length + 1` token ids each, cut from its documents through three indices."""

import os
from typing import Protocol

import numpy as np

from megafp8.data.cache import cached_arrays
from megafp8.data.indices import build_indices


class Documents(Protocol):
    """What samples are cut from: an `IndexedDataset`, or made-up documents."""

    document_lengths: np.ndarray  # [D], tokens

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray: ...

    def fingerprint(self) -> str: ...  # of everything the indices depend on


class GPTDataset:
    """Samples of a range of documents.

    Args:
        documents: where token ids come from.
        selection: ids of the split's documents.
        num_samples: how many samples will be asked for; documents are repeated, in epochs, until they suffice. None:
            the samples of one epoch.
        seq_length: `--seq-length`; a sample has one more token, the label of its last.
        seed: order of documents and samples.
        shuffle: False keeps the file's order.
        drop_last: False keeps a last, shorter sample, so that one epoch covers every token.
        cache_dir: where built indices are kept, None for nowhere.
    Raises:
        ValueError when the documents hold no sample.
    """

    def __init__(
        self,
        documents: Documents,
        selection: range,
        *,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = True,
        cache_dir: str | os.PathLike | None = None,
    ):
        self.documents = documents
        options = {
            "num_samples": num_samples,
            "seq_length": seq_length,
            "seed": seed,
            "shuffle": shuffle,
            "drop_last": drop_last,
        }
        description = {
            "what": "gpt indices",
            "documents": documents.fingerprint(),
            "selection": [selection.start, selection.stop],
            **options,
        }
        arrays = cached_arrays(
            cache_dir, description, lambda: build_indices(documents.document_lengths, selection, **options)
        )
        self.document_index = arrays["document_index"]
        self.sample_index = arrays["sample_index"]
        self.shuffle_index = arrays["shuffle_index"]

    def __len__(self) -> int:
        return len(self.shuffle_index)

    def __getitem__(self, i: int) -> np.ndarray:
        """Token ids of sample i: int64 [seq_length + 1], or shorter for the last one of an undropped rest."""
        k = self.shuffle_index[i]
        first, offset = (int(x) for x in self.sample_index[k])
        last, end = (int(x) for x in self.sample_index[k + 1])
        read, document = self.documents.read, self.document_index
        if first == last:
            return read(int(document[first]), offset, end + 1 - offset).astype(np.int64)
        parts = [read(int(document[first]), offset)]
        parts += [read(int(d)) for d in document[first + 1 : last]]
        parts.append(read(int(document[last]), 0, end + 1))
        return np.concatenate(parts).astype(np.int64)
