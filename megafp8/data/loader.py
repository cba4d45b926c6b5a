"""Which samples make up each micro-batch, and the loader that reads them ahead.

Everything follows from the number of samples consumed so far: a run that resumes gives that number and continues with
the very next sample. Nothing here draws from the global random generators.
"""

import signal
from collections.abc import Iterator

import numpy as np
import torch

from megafp8.data.batch import Batch, MaskOptions, make_batch

_NO_SAMPLE = -1  # fills up an incomplete last micro-batch; bears no loss


def sample_order(num_samples: int, consumed_samples: int, dataloader_type: str, seed: int) -> Iterator[np.ndarray]:
    """Sample numbers in the order of training, in blocks, from `consumed_samples` on.

    "single": 0, 1, 2, ... once (the data set's own shuffle index has shuffled them). "cyclic": for ever, each pass in
    a new order that depends on the seed and the number of the pass.
    """
    block = 1 << 16
    if dataloader_type == "single":
        for start in range(consumed_samples, num_samples, block):
            yield np.arange(start, min(start + block, num_samples), dtype=np.int64)
        return
    assert dataloader_type == "cyclic", dataloader_type
    epoch, skip = divmod(consumed_samples, num_samples)
    while True:
        yield np.random.default_rng([seed, epoch]).permutation(num_samples)[skip:]
        epoch, skip = epoch + 1, 0


def micro_batch_indices(num_samples: int, *, consumed_samples: int, micro_batch_size: int, dp_rank: int, dp_size: int,
                        dataloader_type: str = "single", seed: int = 0, drop_last: bool = True) -> Iterator[list[int]]:
    """Sample numbers of each of this rank's micro-batches.

    Every `micro_batch_size * dp_size` samples in training order are dealt to the ranks in turn, as in Megatron. So a
    global batch holds the same samples whatever the micro-batch size and the number of ranks.
    """
    chunk = micro_batch_size * dp_size
    mine = slice(dp_rank * micro_batch_size, (dp_rank + 1) * micro_batch_size)
    rest = np.empty(0, dtype=np.int64)
    for block in sample_order(num_samples, consumed_samples, dataloader_type, seed):
        rest = np.concatenate([rest, block])
        whole = len(rest) // chunk * chunk
        for samples in rest[:whole].reshape(-1, chunk):
            yield samples[mine].tolist()
        rest = rest[whole:]
    if len(rest) and not drop_last:
        yield np.pad(rest, (0, chunk - len(rest)), constant_values=_NO_SAMPLE)[mine].tolist()


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
    # SIGTERM and SIGINT often reach the whole process group: the trainer needs its workers until it has saved. They
    # leave when the trainer stops asking for batches, or dies.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def build_loader(dataset, masks: MaskOptions, *, seq_length: int, micro_batch_size: int, consumed_samples: int = 0,
                 dp_rank: int = 0, dp_size: int = 1, num_workers: int = 0, dataloader_type: str = "single",
                 seed: int = 0, drop_last: bool = True, pin_memory: bool = False) -> Iterator[Batch]:
    """This rank's micro-batches, in training order.

    Args:
        dataset: one of `Datasets`: has a length, and gives token ids [seq_length + 1] by number.
        masks: `Datasets.masks`.
        consumed_samples: samples of this data set that all ranks together have used so far.
        num_workers: processes that read ahead; the batches are the same for any number.
        dataloader_type: "single" (ends with the data set) or "cyclic" (goes round for ever, reshuffled each pass).
        seed: only for "cyclic".
        drop_last: False also gives the last, incomplete micro-batch, filled up with rows that bear no loss: every
            rank gets equally many.
        pin_memory: batches in page-locked memory, for asynchronous copies to a GPU.
    Raises:
        ValueError when no whole micro-batch is left after `consumed_samples`.
    """
    if dataloader_type not in ("single", "cyclic"):
        raise ValueError(f"--dataloader-type {dataloader_type}: choose single or cyclic")
    left = len(dataset) - consumed_samples
    if dataloader_type == "single" and left < (micro_batch_size * dp_size if drop_last else 1):
        raise ValueError(f"no data left: {consumed_samples} of {len(dataset)} samples are consumed, and a step of "
                         f"--micro-batch-size {micro_batch_size} on {dp_size} data-parallel ranks needs "
                         f"{micro_batch_size * dp_size} more")
    sampler = _BatchSampler(len(dataset), {
        "consumed_samples": consumed_samples, "micro_batch_size": micro_batch_size, "dp_rank": dp_rank,
        "dp_size": dp_size, "dataloader_type": dataloader_type, "seed": seed, "drop_last": drop_last})
    loader = torch.utils.data.DataLoader(
        _Samples(dataset), batch_sampler=sampler, collate_fn=_Collate(seq_length, masks), num_workers=num_workers,
        worker_init_fn=_start_worker, pin_memory=pin_memory,
        multiprocessing_context="fork" if num_workers else None,
        generator=torch.Generator().manual_seed(seed))  # its own: the loader would draw a seed from the global one
    return iter(loader)
