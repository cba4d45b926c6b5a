"""TikToken vocabularies in Megatron's JSON form."""

import base64
import json
from collections.abc import Sequence
from pathlib import Path

from megafp8.data.tokenizer.base import Tokenizer, below, make_fingerprint, require_file

# the two `--tiktoken-pattern`s, as in Megatron-LM
PATTERNS = {
    "v1": r"[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
    "v2": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<mask>", "<pad>", "<cls>", "<sep>")
NUM_SPECIAL_TOKENS = 1000
DEFAULT_VOCAB_SIZE = 1 << 17


class TikTokenizer(Tokenizer):
    """`--tokenizer-model FILE.json`, a list of {"rank", "token_bytes" (base64), "token_str"}.

    Ids 0..num_special_tokens-1 are special (`special_tokens`, by default Megatron's, then fillers), the list's
    tokens follow, cut to `vocab_size` ids in all (default: 131072, or what the list holds if that is less). `</s>`
    ends a document.
    """

    name = "TikTokenizer"

    def __init__(
        self,
        model: str | None,
        pattern: str | None = None,
        vocab_size: int | None = None,
        num_special_tokens: int = NUM_SPECIAL_TOKENS,
        special_tokens: Sequence[str] | None = None,
    ):
        import tiktoken

        pattern = pattern or "v2"
        if pattern not in PATTERNS:
            raise ValueError(f"--tiktoken-pattern {pattern}: choose v1 or v2")
        specials = _special_tokens(special_tokens or SPECIAL_TOKENS, num_special_tokens)
        path = require_file("--tokenizer-model", model, "a JSON vocabulary")
        tokens = _read_vocabulary(path)
        available = num_special_tokens + len(tokens)
        self.vocab_size = min(available, DEFAULT_VOCAB_SIZE) if vocab_size is None else vocab_size
        if not num_special_tokens + 256 <= self.vocab_size <= available:
            raise ValueError(
                f"--vocab-size {vocab_size}: {path} serves {num_special_tokens + 256} to {available} ids, "
                f"{num_special_tokens} special ones included"
            )
        tokens = tokens[: self.vocab_size - num_special_tokens]
        ranks = {token: i + num_special_tokens for i, token in enumerate(tokens)}
        self._encoding = tiktoken.Encoding(
            path.stem, pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=specials
        )
        self._num_special = num_special_tokens
        self.bos, self.eod = specials["<s>"], specials["</s>"]
        self.fingerprint = make_fingerprint(self.name, path, pattern, self.vocab_size, sorted(specials.items()))

    def encode(self, text: str) -> list[int]:
        return self._encoding.encode_ordinary(text)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return self._encoding.decode([i for i in below(ids, self.vocab_size) if i >= self._num_special])

    def byte_lengths(self) -> tuple[list[int], list[int]]:
        text = range(self._num_special, self.vocab_size)
        lengths = [0] * self._num_special + [len(self._encoding.decode_single_token_bytes(i)) for i in text]
        return lengths, lengths


def _special_tokens(named: Sequence[str], number: int) -> dict[str, int]:
    """Special token -> id: the named ones, then fillers."""
    missing = [token for token in SPECIAL_TOKENS if token not in named]
    if missing or len(set(named)) != len(named):
        fault = f"{missing[0]} is missing" if missing else "one stands twice"
        raise ValueError(
            f"--tiktoken-special-tokens {' '.join(named)}: {fault}; give {' '.join(SPECIAL_TOKENS)} and "
            "your own, each once"
        )
    if len(named) > number:
        raise ValueError(
            f"--tiktoken-num-special-tokens {number}: there are {len(named)} named ones; give at least that many"
        )
    return {token: i for i, token in enumerate([*named, *(f"<SPECIAL_{i}>" for i in range(len(named), number))])}


def _read_vocabulary(path: Path) -> list[bytes]:
    """Tokens by rank; the first 256 are the bytes."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        tokens = [base64.b64decode(entry["token_bytes"]) for entry in entries]
        ranks = [entry["rank"] for entry in entries]
    except (UnicodeDecodeError, ValueError, KeyError, TypeError):
        raise ValueError(
            f"--tokenizer-model {path}: not a JSON list of {{rank, token_bytes, token_str}}; other "
            "tiktoken vocabularies are read through their tokenizer.json (--tokenizer-type "
            "HuggingFaceTokenizer)"
        ) from None
    counted = ranks == list(range(len(tokens))) and len(set(tokens)) == len(tokens)
    if not counted or tokens[:256] != [bytes([i]) for i in range(256)]:
        raise ValueError(
            f"--tokenizer-model {path}: ranks must count from 0, tokens be distinct, and the first 256 be the bytes"
        )
    return tokens
