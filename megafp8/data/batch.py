"""A micro-batch: tokens, labels, and what tells documents apart inside a sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch


@dataclass(frozen=True)
class MaskOptions:
    """How documents inside a sequence are told apart, with Megatron's flags.

    eod: end-of-document id, None when the tokenizer has none (then the flags must be off).
    reset_position_ids: positions start at 0 again after each eod.
    reset_attention_mask: tokens do not attend across documents; an eod belongs to the document it ends.
    eod_mask_loss: no loss where the input is an eod (its label is the first token of an unrelated document).
    """

    eod: int | None = None
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    eod_mask_loss: bool = False

    def __post_init__(self):
        on = [name for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss") if getattr(self, name)]
        if self.eod is None and on:
            flag = f"--{on[0].replace('_', '-')}"
            raise ValueError(
                f"{flag}: the tokenizer has no end-of-document token; use a tokenizer that has one, or drop the flag"
            )


@dataclass
class Batch:
    """One micro-batch of b sequences of s tokens.

    tokens int64 [b, s]; labels int64 [b, s], the next tokens; loss_mask float32 [b, s], 1 where a label counts;
    position_ids int64 [b, s]; cu_seqlens int32 [n + 1], borders of the n documents in the flattened b * s tokens
    (first 0, last b * s; every sequence starts one), or None without `--reset-attention-mask`.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    loss_mask: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor | None = None

    def _map(self, f) -> "Batch":
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return Batch(**{name: None if value is None else f(value) for name, value in values.items()})

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "Batch":
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        return self._map(torch.Tensor.pin_memory)


def make_batch(samples: Sequence[np.ndarray], seq_length: int, masks: MaskOptions) -> Batch:
    """Collate samples of up to seq_length + 1 ids; what is missing at their ends is filled up and bears no loss."""
    ids = np.zeros((len(samples), seq_length + 1), dtype=np.int64)
    loss_mask = np.zeros((len(samples), seq_length), dtype=np.float32)
    for row, sample in enumerate(samples):
        ids[row, : len(sample)] = sample
        loss_mask[row, : max(len(sample) - 1, 0)] = 1.0
    tokens, labels = ids[:, :-1].copy(), ids[:, 1:].copy()
    if masks.eod_mask_loss:
        loss_mask[tokens == masks.eod] = 0.0

    starts = np.zeros(tokens.shape, dtype=bool)  # the first token of each document
    starts[:, 0] = True
    if masks.eod is not None:
        starts[:, 1:] = tokens[:, :-1] == masks.eod
    position_ids = np.broadcast_to(np.arange(seq_length), tokens.shape)
    if masks.reset_position_ids:
        position_ids = position_ids - np.maximum.accumulate(np.where(starts, position_ids, 0), axis=1)
    cu_seqlens = None
    if masks.reset_attention_mask:
        cu_seqlens = torch.from_numpy(np.append(np.flatnonzero(starts), tokens.size).astype(np.int32))
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        torch.from_numpy(loss_mask),
        torch.from_numpy(np.array(position_ids, dtype=np.int64)),
        cu_seqlens,
    )
