"""What every tokenizer offers, and how files become a fingerprint."""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path


class Tokenizer(ABC):
    """Text <-> token ids.

    name: the `--tokenizer-type`.
    vocab_size: ids lie in [0, vocab_size), added and special tokens included.
    eod: id that ends a document, None when the vocabulary has none (`require_eod` turns that into an error).
    bos: id that may begin a document, None when there is none. `encode` itself adds neither.
    fingerprint: hash of everything that decides which ids a text gets, wherever the files lie.
    """

    name: str
    vocab_size: int
    eod: int | None
    bos: int | None = None
    fingerprint: str

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Ids of a text, without BOS or EOD. Special tokens that are spelt out in the text are plain text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens and ids that only pad the vocabulary give no text."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def byte_lengths(self) -> tuple[list[int], list[int]] | None:
        """UTF-8 bytes of text that each id stands for, inside a document and at its beginning; None when that isn't
        known. Ids that are no text have 0."""
        return None

    def require_eod(self, flag: str) -> int:
        """The end-of-document id. ValueError, naming the flag that needs it, when there is none."""
        if self.eod is None:
            raise ValueError(
                f"{flag}: this {self.name} has no end-of-document token; use a tokenizer that has one "
                "(tools/train_tokenizer.py trains such), or drop the flag"
            )
        return self.eod

    def require_bos(self, flag: str) -> int:
        if self.bos is None:
            raise ValueError(f"{flag}: this {self.name} has no beginning-of-sequence token; drop the flag")
        return self.bos


def make_fingerprint(*parts: object) -> str:
    """Hash of values; a Path stands for the contents of its file."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else repr(part).encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:32]


def require_file(flag: str, value: str | None, what: str, *, or_directory: bool = False) -> Path:
    """The path a flag names. ValueError when the flag or the file is missing, or a directory where none will do."""
    if not value:
        raise ValueError(f"{flag}: not given; it names {what}")
    path = Path(value)
    if not path.exists():
        raise ValueError(f"{flag} {value}: no such file; it names {what}")
    if path.is_dir() and not or_directory:
        raise ValueError(f"{flag} {value}: a directory; it names {what}")
    return path


def piece_lengths(pieces: Sequence[str], special: Sequence[bool], adds_space: bool) -> tuple[list[int], list[int]]:
    """`Tokenizer.byte_lengths` of SentencePiece's pieces: U+2581 is a space, <0xNN> a byte, and where the tokenizer
    begins a text with a space of its own, that is no text."""
    sizes, at_start = [], []
    for piece, hidden in zip(pieces, special, strict=True):
        size = 1 if re.fullmatch("<0x[0-9A-F]{2}>", piece) else len(piece.replace("\u2581", " ").encode())
        sizes.append(0 if hidden else size)
        at_start.append(sizes[-1] - (adds_space and not hidden and piece.startswith("\u2581")))
    return sizes, at_start


def below(ids: Iterable[int], limit: int) -> list[int]:
    return [int(i) for i in ids if 0 <= i < limit]
