"""A trained model's loss on data sets, on one process or on many.

Ranks share out the microbatches that one process would run, unchanged, and losses are summed in FP64: the result does
not depend on the number of data-parallel ranks.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from megafp8.config import Config
from megafp8.config.parallel import layout_sizes
from megafp8.config.validate import check
from megafp8.data import Batch, MaskOptions, build_loader
from megafp8.training.inference import TrainedModel
from megafp8.training.step import evaluation_totals

_KEPT = ("moe_", "distributed_")  # parallel fields that a run's evaluation shares with its training


def arrange(config: Config, sizes: Mapping[str, int], micro_batch_size: int, env=os.environ) -> Config:
    """A run's configuration in the layout of an evaluation.

    sizes: e.g. tensor_model_parallel_size; what is missing is 1, whatever the run had. Data parallelism takes the rest
    of WORLD_SIZE.
    Raises ValueError when they don't fit the model or the processes.
    """
    world = int(env.get("WORLD_SIZE", "1"))
    tensor, context = sizes.get("tensor_model_parallel_size", 1), sizes.get("context_parallel_size", 1)
    sequence = tensor > 1 and config.data.seq_length % (tensor * context) == 0
    kept = {
        field.name: getattr(config.parallel, field.name)
        for field in dataclasses.fields(config.parallel)
        if field.name.startswith(_KEPT)
    }
    defaults = {"expert_tensor_parallel_size": tensor, "sequence_parallel": sequence, "world_size": world}
    parallel = type(config.parallel)(**kept, **(defaults | dict(sizes)))
    data = layout_sizes(parallel)["dp"]
    config = dataclasses.replace(config, parallel=dataclasses.replace(parallel, data_parallel_size=data))
    batches = {"micro_batch_size": micro_batch_size, "global_batch_size": micro_batch_size * data}
    batches |= {"rampup_batch_size": None, "step_batch_size_schedule": None, "batch_size_steps": ()}
    config = config.replace(**batches)
    if world > 1:
        check(config)
    return config


def evaluate_set(
    trained: TrainedModel,
    dataset: Sequence,
    masks: MaskOptions,
    *,
    micro_batch_size: int,
    max_samples: int | None = None,
    advance: Callable[[int], object] = lambda samples: None,
) -> dict[str, float]:
    """Loss on a data set, in its order; every rank of the layout calls it and gets the same.

    advance: told how many samples are done since the last call, on all ranks together.
    Returns: `loss`, the mean over `tokens` predicted tokens, in nats; `perplexity`; `unigram_entropy` of those tokens,
    the loss of a model that knows their frequencies and nothing else; and where the tokenizer knows them, `bytes` of
    text that those tokens stand for, and `bits_per_byte`.
    """
    parallel = trained.parallel
    ranks, count = parallel.dp.size, min(len(dataset), max_samples or len(dataset))
    loader = build_loader(
        dataset,
        masks,
        seq_length=trained.config.data.seq_length,
        micro_batch_size=micro_batch_size,
        dp_rank=parallel.dp.rank,
        dp_size=ranks,
        drop_last=False,
    )
    counts = _Counts(trained, count)
    batches = counts.of(loader, micro_batch_size)
    totals = torch.zeros(2, dtype=torch.float64, device=trained.device)
    left = math.ceil(count / (micro_batch_size * ranks))  # microbatches of a rank; the same number on each
    done = 0
    while left:
        block = min(left, 4 * parallel.pp.size if parallel.pp.size > 1 else 1)
        totals += evaluation_totals(
            trained.model,
            batches,
            count=block,
            scaling=trained.scaling,
            device=trained.device,
            parallel=parallel,
            plan=trained.pipeline,
        )
        left -= block
        step = min(block * micro_batch_size * ranks, count - done)
        done += step
        advance(step)
    loss, valid = totals.tolist()
    if not valid:
        raise ValueError("no token to predict: the data set holds less than two tokens, or its masks hide them all")
    return _numbers(loss / valid, counts.summed(), trained)


class _Counts:
    """How often each token is predicted, and how often as the first of a document; of this rank's samples."""

    def __init__(self, trained: TrainedModel, count: int):
        size = trained.config.model.unpadded_vocab_size
        self._parallel, self._device, self._count = trained.parallel, trained.device, count
        borders = (trained.tokenizer.eod, trained.tokenizer.bos)
        self._borders = torch.tensor([token for token in borders if token is not None], dtype=torch.int64)
        self._found = torch.zeros(2, size, dtype=torch.float64)

    def of(self, loader: Iterator[Batch], micro_batch_size: int) -> Iterator[Batch]:
        """The loader's microbatches, counted; samples beyond the last one that is asked for bear no loss."""
        dp = self._parallel.dp
        for number, batch in enumerate(loader):
            first = (number * dp.size + dp.rank) * micro_batch_size
            batch.loss_mask[max(self._count - first, 0) :] = 0
            predicted = batch.loss_mask > 0
            self._found[0] += self._histogram(batch.labels[predicted])
            opens = predicted & torch.isin(batch.tokens, self._borders)
            self._found[1] += self._histogram(batch.labels[opens])
            yield batch

    def _histogram(self, ids: Tensor) -> Tensor:
        return torch.bincount(ids, minlength=self._found.shape[1])

    def summed(self) -> Tensor:
        """Over the data-parallel ranks; the others of a model saw the same batches. [2, vocabulary]"""
        return self._parallel.dp.sum_(self._found.to(self._device)).cpu()


def _numbers(loss: float, counts: Tensor, trained: TrainedModel) -> dict[str, float]:
    frequencies, opening = counts
    share = frequencies[frequencies > 0] / frequencies.sum()
    result = {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "tokens": int(frequencies.sum()),
        "unigram_entropy": float(-(share * share.log()).sum()),
    }
    lengths = trained.tokenizer.byte_lengths()
    if lengths is None:
        return result
    table = torch.zeros(2, len(frequencies), dtype=torch.float64)
    for row, values in enumerate(lengths):  # a vocabulary may have more rows than the tokenizer has tokens
        table[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
    # Tokens that open a document are shorter where the tokenizer puts a space of its own before it.
    size = int((frequencies * table[0]).sum() - (opening * (table[0] - table[1])).sum())
    if size:
        result |= {"bytes": size, "bits_per_byte": loss * result["tokens"] / math.log(2) / size}
    return result
