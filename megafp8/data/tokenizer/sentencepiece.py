"""SentencePiece models (`.model` files)."""

from collections.abc import Sequence

from megafp8.data.tokenizer.base import Tokenizer, below, make_fingerprint, piece_lengths, require_file

# pieces that end documents in models which declare no EOS
_EOD_PIECES = ("<EOD>", "<|endoftext|>", "<|end_of_text|>", "</s>", "<eod>", "<eos>")


class SentencePieceTokenizer(Tokenizer):
    """`--tokenizer-model FILE`. The end of a document is the model's EOS, or a piece named like one."""

    name = "SentencePieceTokenizer"

    def __init__(self, model: str | None):
        import sentencepiece

        path = require_file("--tokenizer-model", model, "a SentencePiece .model file")
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"--tokenizer-model {model}: not a SentencePiece model ({reason})") from None
        self.vocab_size = self._processor.vocab_size()
        self.bos = _id_or_none(self._processor.bos_id())
        self.eod = _id_or_none(self._processor.eos_id())
        if self.eod is None:
            self.eod = self._find_piece(_EOD_PIECES)
        self.fingerprint = make_fingerprint(self.name, path)

    def _find_piece(self, candidates: Sequence[str]) -> int | None:
        processor = self._processor
        known = [processor.piece_to_id(piece) for piece in candidates]
        known = [i for i, piece in zip(known, candidates, strict=True) if processor.id_to_piece(i) == piece]
        return known[0] if known else None

    def encode(self, text: str) -> list[int]:
        return self._processor.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._processor.decode([i for i in below(ids, self.vocab_size) if i != self.eod])

    def byte_lengths(self) -> tuple[list[int], list[int]]:
        processor, ids = self._processor, range(self.vocab_size)
        pieces = [processor.id_to_piece(i) for i in ids]
        special = [processor.is_control(i) or processor.is_unknown(i) or i == self.eod for i in ids]
        return piece_lengths(pieces, special, processor.encode("a", out_type=str)[0].startswith("\u2581"))


def _id_or_none(i: int) -> int | None:
    return i if i >= 0 else None
