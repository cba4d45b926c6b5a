"""Data: Megatron's indexed data sets, tokenizers, and what turns them into micro-batches.

For the training loop:

    tokenizer = build_tokenizer(config.data)
    datasets = build_datasets(config.data, tokenizer, sample_counts(config), seed=config.train.seed)
    for note in datasets.notes: ...                     # an empty split, say: for the log
    batches = build_loader(datasets.train, datasets.masks, seq_length=config.data.seq_length,
                           micro_batch_size=..., consumed_samples=..., dp_rank=..., dp_size=...,
                           num_workers=config.data.num_workers)
    for batch in batches: ...                           # a Batch: one micro-batch of this data-parallel rank

A step takes as many micro-batches from `batches` as it accumulates. `datasets.valid` maps the names of validation
sets to data sets ("valid" without `--multiple-validation-sets`); it is empty, and `datasets.test` None, when there is
nothing to evaluate. An evaluation makes its own loader from `consumed_samples=0`, so that each reads the same samples,
and ends its worker processes with `close()`.

Every process builds everything by itself, no process group needed: indices come from a cache on disk that is safe to
share. The rows of the embedding follow from `config.with_vocab_size`.

Every mistake in flags or files raises ValueError with one line that says how to mend it.
"""

import importlib

# Imported when asked for: tools that read and write token files need no torch, and start at once.
_MODULES = {
    **dict.fromkeys(("Batch", "MaskOptions", "make_batch"), "batch"),
    **dict.fromkeys(("Datasets", "SampleCounts", "build_datasets", "sample_counts"), "build"),
    **dict.fromkeys(("IndexedDataset", "IndexedDatasetBuilder"), "indexed"),
    "build_loader": "loader",
    **dict.fromkeys(("TOKENIZER_TYPES", "Tokenizer", "build_tokenizer"), "tokenizer"),
}

__all__ = [
    "TOKENIZER_TYPES",
    "Batch",
    "Datasets",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "MaskOptions",
    "SampleCounts",
    "Tokenizer",
    "build_datasets",
    "build_loader",
    "build_tokenizer",
    "make_batch",
    "sample_counts",
]


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
