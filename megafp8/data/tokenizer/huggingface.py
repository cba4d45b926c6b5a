"""Tokenizers of the `tokenizers` library: a model's `tokenizer.json`, and GPT-2's `vocab.json` with `merges.txt`."""

import json
from collections.abc import Sequence
from pathlib import Path

from megafp8.data.tokenizer.base import Tokenizer, below, make_fingerprint, piece_lengths, require_file

# end-of-document tokens by name, for a bare tokenizer.json that doesn't come with a tokenizer_config.json
_EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<｜end▁of▁sentence｜>", "<eos>")
_BOS_TOKENS = ("<|begin_of_text|>", "<s>", "<｜begin▁of▁sentence｜>", "<bos>")


class HuggingFaceTokenizer(Tokenizer):
    """`--tokenizer-model DIRECTORY` with a tokenizer.json (and tokenizer_config.json), that file itself, or the name
    of a model on the Hugging Face hub (`ORG/MODEL`), fetched through its cache."""

    name = "HuggingFaceTokenizer"

    def __init__(self, model: str | None):
        from tokenizers import Tokenizer as Backend

        path, config_path = _find_files(model)
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            mend = "; a SentencePiece model is for --tokenizer-type SentencePieceTokenizer" * (path.suffix == ".model")
            raise ValueError(f"--tokenizer-model {model}: {path.name} can't be read ({error}){mend}") from None
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = True  # "<|endoftext|>" spelt out in a document doesn't end it
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        config = json.loads(config_path.read_text()) if config_path else {}
        self.eod = _special(config, "eos_token", _EOD_TOKENS, vocabulary, model)
        self.bos = _special(config, "bos_token", _BOS_TOKENS, vocabulary, model)
        self.fingerprint = make_fingerprint(self.name, path, self.eod, self.bos)

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode(below(ids, self.vocab_size), skip_special_tokens=True)

    def byte_lengths(self) -> tuple[list[int], list[int]] | None:
        return _byte_lengths(self._backend, self.vocab_size)


def _byte_lengths(backend, size: int) -> tuple[list[int], list[int]] | None:
    """Of byte-level vocabularies, whose characters are a byte each, and of SentencePiece's pieces."""
    added = backend.get_added_tokens_decoder()
    pieces = [backend.id_to_token(i) or "" for i in range(size)]
    decoder = json.loads(backend.to_str())["decoder"] or {}
    kinds = {decoder.get("type"), *(part["type"] for part in decoder.get("decoders", ()))}
    adds_space = backend.encode("a", add_special_tokens=False).tokens[:1] not in (["a"], [])
    if "ByteLevel" in kinds:
        lengths = [len(piece) if i not in added else 0 for i, piece in enumerate(pieces)]
        for i, token in added.items():
            lengths[i] = 0 if token.special else len(token.content.encode())
        return lengths, [n - (adds_space and p.startswith("\u0120")) for n, p in zip(lengths, pieces, strict=True)]
    if "Metaspace" in kinds or "ByteFallback" in kinds:
        hidden = [i in added and added[i].special for i in range(size)]
        return piece_lengths(pieces, hidden, adds_space)
    return None


def _find_files(model: str | None) -> tuple[Path, Path | None]:
    """tokenizer.json, and tokenizer_config.json or None."""
    what = "a directory with tokenizer.json, that file, or a model's name on the Hugging Face hub"
    if model and not Path(model).exists() and model.count("/") == 1 and not model.startswith((".", "/", "~")):
        return _fetch_from_hub(model)
    path = require_file("--tokenizer-model", model, what, or_directory=True)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        mend = (
            "use --tokenizer-type SentencePieceTokenizer with its tokenizer.model"
            if (path / "tokenizer.model").exists()
            else f"it names {what}"
        )
        raise ValueError(f"--tokenizer-model {model}: has no tokenizer.json; {mend}")
    config = file.with_name("tokenizer_config.json")
    return file, config if config.is_file() else None


def _fetch_from_hub(model: str) -> tuple[Path, Path | None]:
    try:
        from huggingface_hub import hf_hub_download

        return tuple(Path(hf_hub_download(model, file)) for file in ("tokenizer.json", "tokenizer_config.json"))
    except Exception as error:  # no network, no such model, no permission: many classes, one mend
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"--tokenizer-model {model}: no such path, and the Hugging Face hub gave no tokenizer.json "
            f"({type(error).__name__}: {reason}); download it and give the directory"
        ) from None


def _special(config: dict, key: str, candidates: Sequence[str], vocabulary: dict[str, int], model: str) -> int | None:
    """Id of a special token: what the configuration says, or the first candidate when there is no configuration."""
    if config:
        token = config.get(key)
        token = token["content"] if isinstance(token, dict) else token
        if token is not None and token not in vocabulary:
            raise ValueError(f"--tokenizer-model {model}: its {key} {token!r} is not in its vocabulary")
        return None if token is None else vocabulary[token]
    return next((vocabulary[token] for token in candidates if token in vocabulary), None)


class GPT2BPETokenizer(Tokenizer):
    """GPT-2's byte-level BPE: `--vocab-file vocab.json --merge-file merges.txt`; `<|endoftext|>` ends a document."""

    name = "GPT2BPETokenizer"

    def __init__(self, vocab_file: str | None, merge_file: str | None):
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers

        vocab_path = require_file("--vocab-file", vocab_file, "GPT-2's vocab.json")
        merge_path = require_file("--merge-file", merge_file, "GPT-2's merges.txt")
        try:
            model = models.BPE.from_file(str(vocab_path), str(merge_path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"--vocab-file {vocab_file}, --merge-file {merge_file}: can't be read ({error})") from None
        self._backend = Backend(model)
        self._backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self._backend.decoder = decoders.ByteLevel()
        vocabulary = self._backend.get_vocab()
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod = vocabulary.get("<|endoftext|>")
        self.fingerprint = make_fingerprint(self.name, vocab_path, merge_path)

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [e.ids for e in self._backend.encode_batch_fast(list(texts))]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([i for i in below(ids, self.vocab_size) if i != self.eod])

    def byte_lengths(self) -> tuple[list[int], list[int]] | None:
        lengths, _ = _byte_lengths(self._backend, self.vocab_size)
        lengths = [0 if i == self.eod else n for i, n in enumerate(lengths)]
        return lengths, lengths
