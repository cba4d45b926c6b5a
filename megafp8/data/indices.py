"""Which documents belong to a split, and the three indices that turn documents into training samples.

Sample k of a dataset is `seq_length + 1` tokens that start at token `k * seq_length` of the stream of all documents,
laid end to end in the order of the document index (the last token of a sample is the first of the next: it is only a
label there). These are the semantics of Megatron's `GPTDataset`, down to its random stream: the same documents, seed
and lengths give the same samples in the same order. Unlike there, every counter is int64.
"""

import re

import numpy as np

# Megatron's: the last epoch is shuffled apart from the others when less than this part of it is needed
_SEPARATE_FINAL_EPOCH_BELOW = 0.80
_DOCUMENTS_PER_CHUNK = 1 << 22


def parse_split(split: str) -> tuple[float, float, float]:
    """`--split` "969,30,1" -> fractions of the documents for training, validation and test, which sum to 1."""
    parts = [part for part in re.split(r"[,\s/]+", str(split).strip()) if part]
    try:
        weights = [float(part) for part in parts]
    except ValueError:
        weights = []
    if not 1 <= len(weights) <= 3 or not np.isfinite(weights).all() or min(weights) < 0 or sum(weights) <= 0:
        raise ValueError(f"--split {split!r}: give one to three weights for training, validation and test, as 969,30,1")
    weights += [0.0] * (3 - len(weights))
    return tuple(weight / sum(weights) for weight in weights)


def split_documents(num_documents: int, split: str) -> tuple[range, range, range]:
    """Disjoint, contiguous ranges of document ids for training, validation and test, which cover all documents.

    The borders are Megatron's (cumulated fractions, rounded). Where rounding leaves a split empty that was given a
    weight, it takes one document from another that keeps some: the training split is the last to be asked.
    """
    fractions = parse_split(split)
    borders = [0] + [int(round(x * num_documents)) for x in np.cumsum(fractions)]
    borders[-1] = num_documents
    sizes = np.diff(borders)
    for i, fraction in enumerate(fractions):
        donors = [j for j in (1, 2, 0) if sizes[j] > 1]
        if fraction > 0 and sizes[i] == 0 and donors:
            sizes[donors[0]] -= 1
            sizes[i] = 1
    borders = [0, *np.cumsum(sizes).tolist()]
    return tuple(range(start, stop) for start, stop in zip(borders, borders[1:], strict=False))


def count_epochs(tokens_per_epoch: int, num_samples: int | None, seq_length: int) -> int:
    """Passes over the documents needed for `num_samples` samples of seq_length + 1 tokens; None: one pass."""
    if num_samples is None:
        return 1
    return max(1, -(-(num_samples * seq_length + 1) // tokens_per_epoch))


def build_document_index(documents: range, num_epochs: int, rng: np.random.RandomState, separate_final_epoch: bool):
    """Order in which documents are read. Returns int64 [num_epochs * len(documents)], shuffled over all epochs, or
    over all but the last and over the last."""
    if separate_final_epoch and num_epochs > 1:
        first = build_document_index(documents, num_epochs - 1, rng, False)
        return np.concatenate([first, build_document_index(documents, 1, rng, False)])
    index = np.tile(np.arange(documents.start, documents.stop, dtype=np.int64), num_epochs)
    rng.shuffle(index)
    return index


def locate(positions: np.ndarray, lengths: np.ndarray, first_document: int = 0) -> np.ndarray:
    """Which document holds each token of a stream.

    Args:
        positions: int64 [n], token positions, counted from the start of the first document given.
        lengths: [d], sizes in tokens of consecutive documents (zero is allowed).
        first_document: number of documents before the first one given.
    Returns:
        int64 [n, 2]: place of the document in the document index, and the token's offset in it.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    documents = np.searchsorted(ends, positions, side="right")
    offsets = positions - (ends[documents] - lengths[documents])
    return np.stack([documents + first_document, offsets], axis=1)


def build_sample_index(
    document_lengths: np.ndarray, document_index: np.ndarray, seq_length: int, num_samples: int, num_tokens: int
) -> np.ndarray:
    """Borders of samples: row k says where sample k starts, row k + 1 where its last token (a label only) lies.

    Args:
        document_lengths: [D], sizes in tokens of all documents of the file.
        document_index: int64 [E], document ids in reading order.
        seq_length: tokens per sample, without the label of the last.
        num_samples: rows to build; the walk stops once they are found.
        num_tokens: tokens of all of the document index; borders beyond the last token are moved onto it, so that a
            last sample may be shorter than the others.
    Returns:
        int64 [num_samples + 1, 2]: place in the document index, offset in that document.
    """
    rows = np.empty((num_samples + 1, 2), dtype=np.int64)
    found, tokens_before = 0, 0
    for start in range(0, len(document_index), _DOCUMENTS_PER_CHUNK):
        lengths = document_lengths[document_index[start : start + _DOCUMENTS_PER_CHUNK]]
        tokens = int(lengths.sum(dtype=np.int64))
        stop = min(num_samples, (tokens_before + tokens - 1) // seq_length) + 1
        borders = np.arange(found, stop, dtype=np.int64) * seq_length - tokens_before
        rows[found:stop] = locate(borders, lengths, start)
        found = max(found, stop)
        tokens_before += tokens
        if found == num_samples and tokens_before == num_tokens:
            rows[found] = locate(np.array([tokens - 1]), lengths, start)[0]
            found += 1
        if found > num_samples:
            break
    assert found == num_samples + 1, (found, num_samples)
    return rows


def build_shuffle_index(num_first: int, num_samples: int, rng: np.random.RandomState) -> np.ndarray:
    """Order in which samples are handed out. Returns int64 [num_samples]: samples below `num_first` shuffled among
    themselves, then the rest (the final epoch's) shuffled among themselves."""
    parts = [np.arange(0, num_first, dtype=np.int64), np.arange(num_first, num_samples, dtype=np.int64)]
    for part in parts:
        if len(part):
            rng.shuffle(part)
    return np.concatenate(parts)


def build_indices(
    document_lengths: np.ndarray,
    documents: range,
    num_samples: int | None,
    seq_length: int,
    seed: int,
    shuffle: bool = True,
    drop_last: bool = True,
) -> dict[str, np.ndarray]:
    """All three indices of one dataset's split.

    Args:
        document_lengths: [D], sizes in tokens of all documents of the file.
        documents: the split's documents.
        num_samples: samples wanted (as many epochs as they need), or None for one epoch.
        shuffle: False keeps documents and samples in the file's order.
        drop_last: False keeps a last sample that is shorter than the others.
    Returns:
        `document_index` int64 [E], `sample_index` int64 [n + 1, 2], `shuffle_index` int64 [n]; n >= num_samples.
    Raises:
        ValueError when the documents are too short for a single sample.
    """
    per_epoch = int(document_lengths[documents.start : documents.stop].sum(dtype=np.int64))
    if per_epoch == 0:
        raise ValueError(f"all of its {len(documents)} documents are empty")
    epochs = count_epochs(per_epoch, num_samples, seq_length)
    total = (epochs * per_epoch - 1) // seq_length if drop_last else -(-(epochs * per_epoch - 1) // seq_length)
    if total < 1:
        raise ValueError(
            f"its {len(documents)} documents hold {per_epoch} tokens, too few for one sample of "
            f"--seq-length {seq_length}"
        )
    first_epochs = ((epochs - 1) * per_epoch - 1) // seq_length
    separate = epochs > 1 and num_samples - first_epochs < int(
        _SEPARATE_FINAL_EPOCH_BELOW * ((per_epoch - 1) // seq_length)
    )
    rng = np.random.RandomState(seed % 2**32)
    if shuffle:
        document_index = build_document_index(documents, epochs, rng, separate)
    else:
        document_index = np.tile(np.arange(documents.start, documents.stop, dtype=np.int64), epochs)
    sample_index = build_sample_index(document_lengths, document_index, seq_length, total, epochs * per_epoch)
    if shuffle:
        shuffle_index = build_shuffle_index(first_epochs if separate else total, total, rng)
    else:
        shuffle_index = np.arange(total, dtype=np.int64)
    return {"document_index": document_index, "sample_index": sample_index, "shuffle_index": shuffle_index}
