"""What data-parallel ranks share of the optimizer, and how they exchange it, as the flags say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megafp8.config import Config
from megafp8.optimizer.buffers import Reduction
from megafp8.optimizer.layout import BUCKET_ELEMENTS, BufferLayout, Entry, plan_layouts
from megafp8.parallel import ParallelContext


@dataclass(frozen=True)
class Sharding:
    """What data-parallel ranks share, and how they exchange it.

    distributed: each holds a shard of masters and moments. overlap_reduce: gradients are reduced during backward.
    reduce_in_bf16: they travel rounded to BF16. bucket_elements: see `plan_layouts`, where something overlaps.
    overlap_gather: weights are to be gathered during the next forward, see `Optimizer.wait_before_use`.
    fp8_primary: trained weights of FP8 linears are held in FP8 only; frozen ones, without a master, stay as they are.
    """

    distributed: bool = False
    overlap_reduce: bool = False
    overlap_gather: bool = False
    reduce_in_bf16: bool = False
    fp8_primary: bool = False
    bucket_elements: int = BUCKET_ELEMENTS

    @staticmethod
    def of(config: Config) -> Sharding:
        return Sharding(
            distributed=config.optimizer.use_distributed_optimizer,
            overlap_reduce=config.parallel.overlap_grad_reduce,
            overlap_gather=config.parallel.overlap_param_gather,
            reduce_in_bf16=config.parallel.grad_reduce_in_bf16,
            fp8_primary=config.fp8.fp8_param_gather,
        )

    def plan(self, entries: Iterable[Entry], parallel: ParallelContext) -> tuple[BufferLayout, ...]:
        return plan_layouts(
            entries,
            shards=parallel.dp_cp.size if self.distributed else 1,
            expert_shards=parallel.edp.size if self.distributed else 1,
            bucket_elements=self.bucket_elements if self.overlap_reduce or self.overlap_gather else None,
        )

    def reduction(self, parallel: ParallelContext) -> Reduction:
        return Reduction(parallel.dp_cp, parallel.edp, self.overlap_reduce, self.reduce_in_bf16)


REPLICATED = Sharding()
"""Every rank holds everything."""
