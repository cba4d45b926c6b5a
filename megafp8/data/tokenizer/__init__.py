"""Tokenizers: `build_tokenizer(config.data)` gives the one that `--tokenizer-type` names.

Each has `encode(text) -> list[int]`, `decode(ids) -> str`, `vocab_size`, `eod`, `bos`, `name` and `fingerprint` (see
`base.Tokenizer`). Checkpoints store the fingerprint, so that a run can't go on with another tokenizer unnoticed.
"""

from megafp8.config.data import TOKENIZERS as TOKENIZER_TYPES
from megafp8.data.tokenizer.base import Tokenizer
from megafp8.data.tokenizer.huggingface import GPT2BPETokenizer, HuggingFaceTokenizer
from megafp8.data.tokenizer.plain import ByteTokenizer, NullTokenizer
from megafp8.data.tokenizer.sentencepiece import SentencePieceTokenizer
from megafp8.data.tokenizer.tiktoken import TikTokenizer

__all__ = [
    "TOKENIZER_TYPES",
    "ByteTokenizer",
    "GPT2BPETokenizer",
    "HuggingFaceTokenizer",
    "NullTokenizer",
    "SentencePieceTokenizer",
    "TikTokenizer",
    "Tokenizer",
    "build_tokenizer",
]


_OTHERS = {  # Megatron's other names -> the mend
    "Llama2Tokenizer": "use SentencePieceTokenizer with the same --tokenizer-model",
    "GPTSentencePieceTokenizer": "use SentencePieceTokenizer with the same --tokenizer-model",
    "Llama3Tokenizer": "use HuggingFaceTokenizer with the directory of its tokenizer.json as --tokenizer-model",
    "MistralTokenizer": "use SentencePieceTokenizer, or HuggingFaceTokenizer with its tokenizer.json",
    "ByteLevelTokenizer": "use ByteTokenizer",
    "BertWordPieceLowerCase": "BERT is not trained here; use GPT2BPETokenizer or HuggingFaceTokenizer",
    "BertWordPieceCase": "BERT is not trained here; use GPT2BPETokenizer or HuggingFaceTokenizer",
    "MultimodalTokenizer": "images are not trained on here; use HuggingFaceTokenizer for text",
    "NullMultimodalTokenizer": "images are not trained on here; use NullTokenizer",
    "SFTTokenizer": "fine-tuning on conversations is not done here; use HuggingFaceTokenizer for pretraining",
}


def build_tokenizer(data) -> Tokenizer:
    """The tokenizer that flags name.

    Args:
        data: `config.data`, or anything with tokenizer_type, tokenizer_model, vocab_file, merge_file, vocab_size,
            tiktoken_pattern, tiktoken_num_special_tokens, tiktoken_special_tokens.
    Raises:
        ValueError, in one line, for an unknown type or a file that is missing or of another kind.
    """
    kind = data.tokenizer_type
    if kind == "ByteTokenizer":
        return ByteTokenizer()
    if kind == "SentencePieceTokenizer":
        return SentencePieceTokenizer(data.tokenizer_model)
    if kind == "HuggingFaceTokenizer":
        return HuggingFaceTokenizer(data.tokenizer_model)
    if kind == "GPT2BPETokenizer":
        return GPT2BPETokenizer(data.vocab_file, data.merge_file)
    if kind == "TikTokenizer":
        return TikTokenizer(
            data.tokenizer_model,
            data.tiktoken_pattern,
            data.vocab_size,
            data.tiktoken_num_special_tokens,
            data.tiktoken_special_tokens,
        )
    if kind == "NullTokenizer":
        if not data.vocab_size or data.vocab_size < 1:
            raise ValueError(f"--vocab-size {data.vocab_size}: NullTokenizer needs it, 1 or more")
        return NullTokenizer(data.vocab_size)
    mend = _OTHERS.get(kind, f"choose one of {', '.join(TOKENIZER_TYPES)}")
    raise ValueError(f"--tokenizer-type {kind}: {mend}" if kind else f"--tokenizer-type: not given; {mend}")
