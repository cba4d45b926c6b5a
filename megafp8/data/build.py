"""From flags to data sets: opens files, checks them, splits, blends."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megafp8.config.publish import writable_directory
from megafp8.data.batch import MaskOptions
from megafp8.data.blend import BlendedDataset, BlendSpec, blend_order, parse_blend
from megafp8.data.cache import cached_arrays
from megafp8.data.gpt_dataset import Documents, GPTDataset
from megafp8.data.indexed import IndexedDataset
from megafp8.data.indices import parse_split, split_documents
from megafp8.data.mock import MockDocuments
from megafp8.data.vocabulary import check_token_ids

logger = logging.getLogger(__name__)
DEFAULT_SPLIT = "969,30,1"  # Megatron's
_SPLIT_NAMES = ("training", "validation", "test")


@dataclass(frozen=True)
class SampleCounts:
    """Samples that the run will ask of each split: 0 builds nothing, None builds one epoch."""

    train: int | None
    valid: int | None = 0
    test: int | None = 0


@dataclass(frozen=True)
class Datasets:
    """Data sets of a run. Each has a length and gives token ids int64 [seq_length + 1] by sample number.

    `valid` is empty and `test` None when there is nothing to evaluate; `notes` says why, for the log (unless `--split`
    gives the test split nothing).
    """

    train: GPTDataset | BlendedDataset | None
    valid: Mapping[str, GPTDataset | BlendedDataset]
    test: GPTDataset | BlendedDataset | None
    masks: MaskOptions
    notes: tuple[str, ...] = ()

    @property
    def fingerprints(self) -> list[str]:
        """Of the training documents: runs that differ here have not read the same."""
        parts = getattr(self.train, "datasets", [self.train])
        return [part.documents.fingerprint() for part in parts if part is not None]


@dataclass
class _Builder:
    data: object  # config.data
    vocab_size: int
    seed: int
    shuffle_eval: bool
    drop_last_eval: bool
    mock: MockDocuments | None = None
    notes: list[str] = field(default_factory=list)
    opened: dict[str, IndexedDataset] = field(default_factory=dict)

    def open(self, prefix: str) -> Documents:
        if self.mock is not None:
            return self.mock
        if prefix not in self.opened:
            dataset = IndexedDataset(prefix)
            check_token_ids(dataset, self.vocab_size, self.cache_dir(prefix))
            self.opened[prefix] = dataset
        return self.opened[prefix]

    def cache_dir(self, prefix: str) -> Path | None:
        """`--data-cache-path`, or `cache/` beside the data; None (build in memory) when that can't be written."""
        if self.data.data_cache_path:
            if not writable_directory(self.data.data_cache_path):
                raise ValueError(f"--data-cache-path {self.data.data_cache_path}: can't write there; give another")
            return Path(self.data.data_cache_path)
        if self.mock is not None:
            return None
        beside = Path(os.path.abspath(prefix)).parent / "cache"
        if writable_directory(beside):
            return beside
        logger.warning("%s: can't write there; indices are built in memory (give --data-cache-path)", beside)
        return None

    def build(
        self, spec: BlendSpec, split: int, split_string: str | None, num_samples: int | None
    ) -> GPTDataset | BlendedDataset | None:
        """One split (0 training, 1 validation, 2 test) of a blend; None when it has no documents.

        split_string: `--split`, or None when the files are for this split alone.
        """
        parts, parts_tokens = [], []  # of the former: prefix, documents, selection, weight
        weights = spec.weights or [None] * len(spec.prefixes)
        for prefix, weight in zip(spec.prefixes, weights, strict=True):
            documents = self.open(prefix)
            whole = range(len(documents.document_lengths))
            selection = whole if split_string is None else split_documents(len(whole), split_string)[split]
            tokens = int(documents.document_lengths[selection.start : selection.stop].sum(dtype=np.int64))
            if weight == 0:
                self.notes.append(f"{spec.flag}: {prefix} has weight 0 and gives no {_SPLIT_NAMES[split]} samples")
            elif tokens == 0:
                self._no_documents(spec, prefix, split, split_string)
            else:
                parts.append((prefix, documents, selection, tokens if weight is None else weight))
                parts_tokens.append(tokens)
        if not parts:
            return None
        if split and num_samples and self.mock is None:
            self._note_repeats(spec, split, sum(parts_tokens), num_samples)
        return self._blend(spec, split, parts, num_samples)

    def _note_repeats(self, spec: BlendSpec, split: int, tokens: int, num_samples: int) -> None:
        """Says that an evaluation reads its data ten times and more: the loss is no surer for it, and takes longer."""
        asked = num_samples * self.data.seq_length
        if asked >= 10 * tokens:
            self.notes.append(
                f"--eval-iters asks for {asked} tokens of {spec.flag}'s {_SPLIT_NAMES[split]} split, which has "
                f"{tokens}: they are read {asked / tokens:.1f} times in each evaluation; lower it"
            )

    def _no_documents(self, spec: BlendSpec, prefix: str, split: int, split_string: str | None) -> None:
        of_split = "" if split_string is None else f" (--split {split_string})"
        message = f"{spec.flag} {prefix}: the {_SPLIT_NAMES[split]} split has no documents{of_split}"
        if split == 0:
            raise ValueError(f"{message}; give it a larger part, or data with more documents")
        if split == 2 and split_string is not None and parse_split(split_string)[2] == 0:
            return  # most runs evaluate at the end what they evaluated before: `--split 90,10,0` says enough
        self.notes.append(f"{message}: nothing to evaluate there")

    def _blend(self, spec: BlendSpec, split: int, parts: list, num_samples: int | None) -> GPTDataset | BlendedDataset:
        if len(parts) == 1:
            return self._dataset(spec, split, parts[0], num_samples)
        if num_samples is None:  # one epoch: all of each
            datasets = [self._dataset(spec, split, part, None) for part in parts]
            counts = [len(dataset) for dataset in datasets]
            index = np.concatenate([np.arange(n) for n in counts])
            return BlendedDataset(datasets, np.repeat(np.arange(len(counts)), counts), index)
        weights = [float(weight) for *_, weight in parts]

        def order() -> dict[str, np.ndarray]:
            return dict(zip(("data_set", "index"), blend_order(weights, num_samples), strict=True))

        arrays = cached_arrays(
            self.cache_dir(parts[0][0]), {"what": "blend", "weights": weights, "num_samples": num_samples}, order
        )
        counts = np.bincount(arrays["data_set"], minlength=len(parts)).tolist()
        datasets = [self._dataset(spec, split, part, n) if n else None for part, n in zip(parts, counts, strict=True)]
        return BlendedDataset(datasets, arrays["data_set"], arrays["index"])

    def _dataset(self, spec: BlendSpec, split: int, part: tuple, num_samples: int | None) -> GPTDataset:
        prefix, documents, selection, _ = part
        training = split == 0
        try:
            return GPTDataset(
                documents,
                selection,
                num_samples=num_samples,
                seq_length=self.data.seq_length,
                seed=self.seed,
                shuffle=training or self.shuffle_eval,
                drop_last=training or self.drop_last_eval,
                cache_dir=self.cache_dir(prefix),
            )
        except (MemoryError, OverflowError):
            raise ValueError(
                f"{spec.flag} {prefix}: an index of {num_samples} {_SPLIT_NAMES[split]} samples does not "
                "fit in memory; lower --train-iters, --train-samples or --eval-iters"
            ) from None
        except ValueError as error:
            raise ValueError(f"{spec.flag} {prefix}: the {_SPLIT_NAMES[split]} split can't be used: {error}") from None


def sample_counts(config) -> SampleCounts:
    """Samples that a run of `config` asks of each split: all of training, and one evaluation's, which reads the same
    samples every time."""
    train, batch = config.train, config.train.global_batch_size
    evaluation = train.eval_iters * batch
    return SampleCounts(train.train_samples or train.train_iters * batch, evaluation, evaluation)


def build_datasets(
    data, tokenizer, counts: SampleCounts, *, seed: int, shuffle_eval: bool = True, drop_last_eval: bool = True
) -> Datasets:
    """Open, check, split and blend the data that the flags name.

    Args:
        data: `config.data`: data_path, train_data_path, valid_data_path, test_data_path, split, data_cache_path,
            seq_length, mock_data, extra_vocab_size, reset_position_ids, reset_attention_mask, eod_mask_loss,
            multiple_validation_sets, validation_set_names.
        tokenizer: for its `eod` and `vocab_size`.
        counts: samples needed of each split.
        seed: `--seed`.
        shuffle_eval, drop_last_eval: False, False gives validation and test sets in the file's order, down to the
            last token.
    Raises:
        ValueError, in one line, for everything that is wrong with flags or files.
    """
    masks = MaskOptions(tokenizer.eod, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)
    vocab_size = tokenizer.vocab_size + (data.extra_vocab_size or 0)
    builder = _Builder(data, vocab_size, seed, shuffle_eval, drop_last_eval)
    train, valid, test, split = _blend_specs(data)
    if data.mock_data:
        builder.mock = MockDocuments(tokenizer.vocab_size, tokenizer.eod)

    built_train = builder.build(train, 0, split, counts.train) if train and counts.train != 0 else None
    built_valid = {}
    if counts.valid != 0:
        built = {name: builder.build(spec, 1, split, counts.valid) for name, spec in valid.items()}
        built_valid = {name: dataset for name, dataset in built.items() if dataset is not None}
    built_test = builder.build(test, 2, split, counts.test) if test and counts.test != 0 else None
    return Datasets(built_train, built_valid, built_test, masks, tuple(dict.fromkeys(builder.notes)))


def _blend_specs(data) -> tuple[BlendSpec | None, dict[str, BlendSpec], BlendSpec | None, str | None]:
    """Blends of training, validation (by name) and test, and the `--split` that applies to them (None: none)."""
    own = {
        "--train-data-path": data.train_data_path,
        "--valid-data-path": data.valid_data_path,
        "--test-data-path": data.test_data_path,
    }
    given = [flag for flag, value in own.items() if value]
    if data.data_path and given:
        raise ValueError(
            f"--data-path and {given[0]} exclude each other; give --data-path with --split, or one path a split"
        )
    if data.mock_data:
        if data.data_path or given:
            flag = "--data-path" if data.data_path else given[0]
            raise ValueError(f"--mock-data and {flag} exclude each other; drop one of them")
        spec = BlendSpec("--mock-data", ("mock",))
        return spec, {"valid": spec}, spec, data.split or DEFAULT_SPLIT
    if data.data_path:
        spec = parse_blend("--data-path", data.data_path)
        return spec, {"valid": spec}, spec, data.split or DEFAULT_SPLIT
    if not given:
        raise ValueError("--data-path: no data given; give --data-path PREFIX, or --train-data-path, or --mock-data")
    train = parse_blend("--train-data-path", data.train_data_path) if data.train_data_path else None
    valid = _validation_specs(data) if data.valid_data_path else {}
    test = parse_blend("--test-data-path", data.test_data_path) if data.test_data_path else None
    return train, valid, test, None


def _validation_specs(data) -> dict[str, BlendSpec]:
    """One blend called "valid", or with `--multiple-validation-sets` each prefix by itself, under its name in
    `--validation-set-names` or its number."""
    spec = parse_blend("--valid-data-path", data.valid_data_path)
    if not data.multiple_validation_sets:
        return {"valid": spec}
    if spec.weights is not None:
        raise ValueError(
            "--multiple-validation-sets: sets evaluated apart have no weights; give --valid-data-path prefixes only"
        )
    names = data.validation_set_names or tuple(str(i) for i in range(len(spec.prefixes)))
    if len(names) != len(spec.prefixes) or len(set(names)) != len(names):
        raise ValueError(
            f"--validation-set-names {' '.join(names)}: give each of the {len(spec.prefixes)} sets of "
            "--valid-data-path a name of its own"
        )
    return {name: BlendSpec(spec.flag, (prefix,)) for name, prefix in zip(names, spec.prefixes, strict=True)}
