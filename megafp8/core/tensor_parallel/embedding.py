"""Vocabulary-parallel word embedding, and the table look-up under it, whose gradient is summed in FP32.

Autograd's own gradient of an embedding would be a BF16 tensor; here it is added in FP32 straight into the
parameter's `main_grad`, in a fixed order (no floating-point atomics), as a linear's wgrad is.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.tensor_parallel.mappings import sum_over
from megafp8.core.tensor_parallel.specs import vocab_weight
from megafp8.params import attach_spec
from megafp8.step import StepContext


def _add_rows(table: Tensor, ids: Tensor, rows: Tensor) -> None:
    """`table[ids[i]] += rows[i]`, duplicates added in the order of i.

    CUDA's `index_add_` uses atomics and its `index_put_` sorts; on the CPU it is the other way round.
    """
    if table.is_cuda:
        table.index_put_((ids,), rows, accumulate=True)
    else:
        table.index_add_(0, ids, rows)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight: Tensor, ids: Tensor, step: StepContext | None) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.step = weight, step
        return weight[ids]

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        weight, sink = ctx.weight, ctx.step.grads if ctx.step else None
        if sink is not None:
            _add_rows(sink.buffer(weight), ids, grad_output.float())
            sink.ready(weight)
            return None, None, None
        total = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        _add_rows(total, ids, grad_output.float())
        return total.to(weight.dtype), None, None


def lookup(weight: Tensor, ids: Tensor, step: StepContext | None) -> Tensor:
    """Rows `ids` [T] of `weight` [rows, h] as [T, h]; the gradient goes to `step.grads` if set, else to `.grad`."""
    return _Lookup.apply(weight, ids, step)


class VocabParallelEmbedding(nn.Module):
    """Word embedding, cut along the padded vocabulary: each rank looks up its own ids, and the parts are summed.

    Padding rows start at zero, are never looked up, and have a gradient of exactly zero.
    """

    def __init__(self, name: str, build: BuildContext) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = build.tp, build.sequence_parallel
        spec = vocab_weight(f"{name}.weight", build)
        self.weight = attach_spec(
            nn.Parameter(torch.empty(spec.local_shape, dtype=build.dtype, device=build.device)), spec
        )

    def forward(self, tokens: Tensor, step: StepContext | None) -> Tensor:
        """tokens: int64 [T], ids below the logical vocabulary.

        Returns [T, h]; under sequence parallelism this rank's tokens, [T / tp, h].
        """
        if self.tp.size == 1:
            return lookup(self.weight, tokens, step)
        rows = self.weight.shape[0]
        local = tokens - self.tp.rank * rows
        here = (local >= 0) & (local < rows)
        # Foreign ids add zeros to some row in backward: to many different ones, as equal ids are added in turn.
        x = lookup(self.weight, torch.where(here, local, tokens % rows), step)
        return sum_over(x.masked_fill(~here[:, None], 0.0), self.tp, scatter=self.sequence_parallel)
