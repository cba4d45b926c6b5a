"""Made-up documents for `--mock-data`: no files, the same on every machine, and easy enough for a loss to fall."""

import numpy as np

_SEED = 1234
_NUM_DOCUMENTS = 20_000
_MAX_LENGTH = 2048


class MockDocuments:
    """Documents that count upwards from a random id (modulo the vocabulary) and end with the end-of-document id.

    Args:
        vocab_size: ids are below it.
        eod: end-of-document id, or None to end without one.
    """

    def __init__(self, vocab_size: int, eod: int | None):
        rng = np.random.default_rng(_SEED)
        self.vocab_size, self.eod = vocab_size, eod
        self.document_lengths = rng.integers(2, _MAX_LENGTH, size=_NUM_DOCUMENTS, endpoint=True)
        self._starts = rng.integers(0, vocab_size, size=_NUM_DOCUMENTS)

    @property
    def num_documents(self) -> int:
        return len(self.document_lengths)

    @property
    def num_tokens(self) -> int:
        return int(self.document_lengths.sum())

    def read(self, document: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Token ids int64 of a document from `offset` on, to its end or `length` ids."""
        size = int(self.document_lengths[document])
        ids = (self._starts[document] + np.arange(size)) % self.vocab_size
        if self.eod is not None:
            ids[ids == self.eod] = (self.eod + 1) % self.vocab_size  # only the end is the end
            ids[-1] = self.eod
        return ids[offset:] if length is None else ids[offset : offset + length]

    def fingerprint(self) -> str:
        return "mock"  # its lengths are constants of this file
