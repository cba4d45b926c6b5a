"""Tokenizers without files: bytes, and numbers."""

from collections.abc import Sequence

from megafp8.data.tokenizer.base import Tokenizer, below, make_fingerprint


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes: ids 0..255, and 256 ends a document."""

    name = "ByteTokenizer"
    vocab_size = 257
    eod = 256

    def __init__(self):
        self.fingerprint = make_fingerprint(self.name)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="surrogatepass"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(below(ids, 256)).decode("utf-8", errors="replace")

    def byte_lengths(self) -> tuple[list[int], list[int]]:
        lengths = [1] * 256 + [0]
        return lengths, lengths


class NullTokenizer(Tokenizer):
    """Numbers, separated by blanks, stand for themselves; `--vocab-size` of them, and one more id ends a document."""

    name = "NullTokenizer"

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size
        self.fingerprint = make_fingerprint(self.name, vocab_size)

    def encode(self, text: str) -> list[int]:
        try:
            ids = [int(word) for word in text.split()]
        except ValueError:
            raise ValueError(
                f"NullTokenizer reads numbers only, not {text[:40]!r}; give another --tokenizer-type"
            ) from None
        if ids and not 0 <= min(ids) <= max(ids) < self.eod:
            raise ValueError(f"NullTokenizer: {min(ids)} .. {max(ids)} is outside --vocab-size {self.eod}")
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in below(ids, self.eod))
