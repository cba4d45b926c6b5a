"""Which samples make up each micro-batch, and the loader that reads them ahead.

Everything follows from the number of samples consumed so far: a run that resumes gives that number and continues with
the very next sample. Nothing here draws from the global random generators.
"""

import atexit
import functools
import signal
import weakref
from collections.abc import Iterator

import numpy as np
import torch

from megafp8.data.batch import Batch, MaskOptions, make_batch

_NO_SAMPLE = -1  # fills up an incomplete last micro-batch; bears no loss


def micro_batch_indices(
    num_samples: int,
    *,
    consumed_samples: int,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    drop_last: bool = True,
) -> Iterator[list[int]]:
    """Sample numbers of each of this rank's micro-batches.

    Samples are taken in order (the data set's shuffle index has shuffled them), and every `micro_batch_size * dp_size`
    of them are dealt to the ranks in turn, as in Megatron. So a global batch holds the same samples whatever the
    micro-batch size and the number of ranks.
    """
    mine = range(dp_rank * micro_batch_size, (dp_rank + 1) * micro_batch_size)
    chunk = micro_batch_size * dp_size
    end = num_samples if drop_last else num_samples + chunk - 1
    for start in range(consumed_samples, end - chunk + 1, chunk):
        yield [start + i if start + i < num_samples else _NO_SAMPLE for i in mine]


class _BatchSampler:
    """Iterable of lists of sample numbers, as `torch.utils.data.DataLoader` wants it."""

    def __init__(self, num_samples: int, options: dict):
        self.num_samples, self.options = num_samples, options

    def __iter__(self):
        return micro_batch_indices(self.num_samples, **self.options)


class _Samples(torch.utils.data.Dataset):
    """A data set where the number _NO_SAMPLE gives an empty sample."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, i: int) -> np.ndarray:
        return np.empty(0, dtype=np.int64) if i == _NO_SAMPLE else self.dataset[i]


class _Collate:
    def __init__(self, seq_length: int, masks: MaskOptions):
        self.seq_length, self.masks = seq_length, masks

    def __call__(self, samples: list[np.ndarray]) -> Batch:
        return make_batch(samples, self.seq_length, self.masks)


def _start_worker(worker: int) -> None:
    # Signals to stop often reach the whole process group: the trainer needs its workers until it has saved. They leave
    # when the loader is closed, or the trainer dies.
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class Loader:
    """Iterator of this rank's micro-batches. `close()` ends its worker processes; so do its last reference and the end
    of the program."""

    def __init__(self, loader: torch.utils.data.DataLoader):
        self._iterator = iter(loader)
        # multiprocessing ends what is left of its children by SIGTERM, in vain with ours, and would wait for ever:
        # they must be told to leave before. Exit handlers run last in, first out; this one comes after its own.
        leave = functools.partial(_dismiss_workers, self._iterator)
        atexit.register(leave)
        self.close = weakref.finalize(self, _dismiss_now, leave)

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)


def _dismiss_workers(iterator) -> None:
    if iterator._num_workers:
        iterator._shutdown_workers()


def _dismiss_now(leave) -> None:
    atexit.unregister(leave)
    leave()


def build_loader(
    dataset,
    masks: MaskOptions,
    *,
    seq_length: int,
    micro_batch_size: int,
    consumed_samples: int = 0,
    dp_rank: int = 0,
    dp_size: int = 1,
    num_workers: int = 0,
    drop_last: bool = True,
    pin_memory: bool = False,
) -> Loader:
    """This rank's micro-batches, in training order, as an iterator of `Batch`.

    Args:
        dataset: one of `Datasets`: has a length, and gives token ids [seq_length + 1] by number.
        masks: `Datasets.masks`.
        consumed_samples: samples of this data set that all ranks together have used so far.
        num_workers: processes that read ahead; the batches are the same for any number.
        drop_last: False also gives the last, incomplete micro-batch, filled up with rows that bear no loss: every
            rank gets equally many.
        pin_memory: batches in page-locked memory, for asynchronous copies to a GPU.
    Raises:
        ValueError when the data set is smaller than one micro-batch of all ranks, or than what was consumed of it.
    """
    chunk = micro_batch_size * dp_size
    if len(dataset) < (chunk if drop_last else 1):
        raise ValueError(
            f"the data has {len(dataset)} samples, fewer than --micro-batch-size {micro_batch_size} on "
            f"{dp_size} data-parallel ranks needs; give more data, or smaller batches"
        )
    if consumed_samples > len(dataset):
        raise ValueError(
            f"{consumed_samples} samples were consumed but the data has {len(dataset)}; resume with the "
            "data, --seq-length and --train-iters the run had, or more"
        )
    sampler = _BatchSampler(
        len(dataset),
        {
            "consumed_samples": consumed_samples,
            "micro_batch_size": micro_batch_size,
            "dp_rank": dp_rank,
            "dp_size": dp_size,
            "drop_last": drop_last,
        },
    )
    loader = torch.utils.data.DataLoader(
        _Samples(dataset),
        batch_sampler=sampler,
        collate_fn=_Collate(seq_length, masks),
        num_workers=num_workers,
        worker_init_fn=_start_worker,
        pin_memory=pin_memory,
        multiprocessing_context="fork" if num_workers else None,
        generator=torch.Generator(),
    )  # its own: the loader would draw a seed from the global one
    return Loader(loader)
