"""Data sets, sequences and the tokenizer."""

from dataclasses import dataclass

from megafp8.config.flags import flag

TOKENIZERS = (
    "ByteTokenizer",
    "SentencePieceTokenizer",
    "HuggingFaceTokenizer",
    "GPT2BPETokenizer",
    "TikTokenizer",
    "NullTokenizer",
)


@dataclass(frozen=True)
class DataConfig:
    """Data and tokenizer."""

    data_path: tuple[str, ...] | None = flag(
        None,
        "Prefix of a .bin/.idx pair, several prefixes, or a blend 'weight prefix weight prefix ...'; shared out by "
        "--split.",
        nargs="*",
        metavar="PREFIX",
    )
    train_data_path: tuple[str, ...] | None = flag(
        None, "Training data, like --data-path but not split.", nargs="*", metavar="PREFIX"
    )
    valid_data_path: tuple[str, ...] | None = flag(
        None, "Validation data, like --data-path but not split.", nargs="*", metavar="PREFIX"
    )
    test_data_path: tuple[str, ...] | None = flag(
        None, "Test data, like --data-path but not split.", nargs="*", metavar="PREFIX"
    )
    split: str | None = flag(
        None,
        "Proportions of training, validation and test documents of --data-path, e.g. 90,5,5.",
        shown_default="969,30,1",
    )
    multiple_validation_sets: bool = flag(False, "Evaluate each set of --valid-data-path on its own.")
    validation_set_names: tuple[str, ...] | None = flag(
        None, "Names of those sets in the logs.", nargs="+", metavar="NAME", shown_default="their numbers"
    )
    data_cache_path: str | None = flag(
        None, "Directory for the sample indices.", metavar="DIR", shown_default="beside the data"
    )
    mock_data: bool = flag(False, "Train on generated tokens instead of files.")
    seq_length: int | None = flag(None, "Tokens of one sample. Required.")
    num_workers: int = flag(2, "Processes a rank that load data.")
    dataloader_type: str | None = flag(
        None, "Order of samples: single is one pass over the shuffled samples.", metavar="{single}",
        shown_default="single",
    )  # fmt: skip
    reset_position_ids: bool = flag(False, "Count positions from 0 after each end-of-document token.")
    reset_attention_mask: bool = flag(False, "Keep documents that share a sample from attending to each other.")
    eod_mask_loss: bool = flag(False, "Leave end-of-document tokens out of the loss.")
    tokenizer_type: str | None = flag(
        None,
        "Tokenizer: " + ", ".join(TOKENIZERS) + ".",
        metavar="NAME",
        shown_default="GPT2BPETokenizer",
    )
    tokenizer_model: str | None = flag(
        None, "SentencePiece model, tiktoken file, or Hugging Face directory.", metavar="PATH"
    )
    vocab_file: str | None = flag(None, "GPT2BPETokenizer's vocabulary (JSON).", metavar="FILE")
    merge_file: str | None = flag(None, "GPT2BPETokenizer's merges.", metavar="FILE")
    vocab_size: int | None = flag(
        None, "Vocabulary before padding, in tokens; NullTokenizer needs it.", shown_default="the tokenizer's"
    )
    extra_vocab_size: int = flag(0, "Unused tokens added to the tokenizer's vocabulary before padding.")
    tiktoken_pattern: str | None = flag(None, "TikTokenizer's splitting pattern.", choices=("v1", "v2"))
    tiktoken_num_special_tokens: int = flag(1000, "TikTokenizer's number of special tokens, which come first.")
    tiktoken_special_tokens: tuple[str, ...] | None = flag(
        None, "TikTokenizer's named special tokens.", nargs="+", metavar="TOKEN",
        shown_default="<unk> <s> </s> <mask> <pad> <cls> <sep>",
    )  # fmt: skip
