"""Checks of data sets and tokenizer."""

from megafp8.config.config import Config, flag_of
from megafp8.config.data import TOKENIZERS
from megafp8.config.validate.limits import number, plain

OTHER_TOKENIZERS = {
    "GPTSentencePieceTokenizer": "use SentencePieceTokenizer",
    "Llama2Tokenizer": "use SentencePieceTokenizer",
    "Llama3Tokenizer": "use HuggingFaceTokenizer or TikTokenizer",
}
TOKENIZER_NEEDS = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "HuggingFaceTokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
    "NullTokenizer": ("vocab_size",),
}


def sources(c: Config) -> str | None:
    d = c.data
    per_split = [n for n in ("train_data_path", "valid_data_path", "test_data_path") if c.value(n)]
    if d.mock_data and (d.data_path or per_split):
        name = "data_path" if d.data_path else per_split[0]
        return f"{flag_of(name)} {c.value(name)[0]} contradicts --mock-data; leave one out"
    if d.data_path and per_split:
        return f"{flag_of(per_split[0])} contradicts --data-path {d.data_path[0]}; give one or the other"
    if c.is_given("split") and per_split:
        return f"--split {d.split} shares out --data-path, not {flag_of(per_split[0])}; leave it out"
    if not (d.mock_data or d.data_path or d.train_data_path):
        return "--data-path is required (or --train-data-path, or --mock-data)"
    return None


def blends(c: Config) -> str | None:
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        items = c.value(name) or ()
        weights = [number(item) for item in items[::2]]
        if len(items) < 2 or all(w is None for w in weights):
            continue  # prefixes without weights
        if len(items) % 2 or None in weights:
            return f"{flag_of(name)} {' '.join(items)}: give 'weight prefix' pairs, or prefixes only"
        if min(weights) < 0 or sum(weights) == 0:
            return f"{flag_of(name)} {' '.join(items)}: weights must be 0 or more, and one above 0"
    return None


def split(c: Config) -> str | None:
    if c.data.split is None or c.data.mock_data:
        return None
    parts = [number(part) for part in c.data.split.replace("/", ",").split(",")]
    if not 1 <= len(parts) <= 3 or any(p is None or p < 0 for p in parts):
        return f"--split {c.data.split}: give up to three proportions, e.g. 969,30,1"
    if parts[0] == 0 and not c.train.skip_train:
        return f"--split {c.data.split} leaves nothing to train on; make the first number more than 0"
    return None


def validation_sets(c: Config) -> str | None:
    d = c.data
    if d.multiple_validation_sets and not d.valid_data_path:
        return "--multiple-validation-sets needs --valid-data-path; add it"
    if d.multiple_validation_sets and any(number(item) is not None for item in d.valid_data_path):
        return f"--multiple-validation-sets takes no weights in --valid-data-path {' '.join(d.valid_data_path)}"
    if d.validation_set_names and not d.multiple_validation_sets:
        return f"--validation-set-names {plain(d.validation_set_names)} needs --multiple-validation-sets; add it"
    if d.validation_set_names and len(d.validation_set_names) != len(d.valid_data_path):
        return (
            f"--validation-set-names gives {len(d.validation_set_names)} names for {len(d.valid_data_path)} sets of "
            "--valid-data-path; give as many"
        )
    return None


def dataloader(c: Config) -> str | None:
    if c.data.dataloader_type != "single":
        return f"--dataloader-type {c.data.dataloader_type}: only single is here (several epochs included); use it"
    return None


def tokenizer(c: Config) -> str | None:
    kind = c.data.tokenizer_type
    if kind not in TOKENIZERS:
        mend = OTHER_TOKENIZERS.get(kind, f"use one of {', '.join(TOKENIZERS)}")
        return f"--tokenizer-type {kind} is not here; {mend}"
    for name in TOKENIZER_NEEDS.get(kind, ()):
        if c.value(name) is None:
            default = "" if c.is_given("tokenizer_type") else ", the default; or give another --tokenizer-type"
            return f"{flag_of(name)} is required by --tokenizer-type {kind}{default}"
    return None
