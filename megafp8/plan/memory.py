"""Estimated memory of one rank, in bytes, from the configuration alone.

What stays through a step, n being the elements of the rank's parameters and e the bytes of the compute dtype (BF16 2,
FP32 4):

    weights           n e     laid out as the gradients
    main gradients    4 n     FP32, each parameter's place in the flat buffer rounded up to 64 elements, each bucket to
                              equal shards of such
    masters           4 n     FP32, laid out alike; 2 n with --store-param-remainders
    moments           8 n     two in FP32, laid out alike; in BF16 2 n each, in FP8 (1 + 5/64) n
    FP8 copies        a byte an element and the scales, rowwise and transposed, of each FP8 weight
    workspaces        cuBLAS's, of the thread that runs forward and of autograd's; the fused update's tables

With --use-distributed-optimizer masters and moments are divided by the ranks that hold the same parameter. With
--fp8-param-gather an FP8 weight is a byte an element and its scales (twice under 1D tiles, which differ by direction),
and of its copies only the transposed one is left.

Which parameters a rank holds is `rank_parameters`; what microbatches add until their backward, by module, is
`activations`, how many there are at once the schedule's (`in_flight`), and what comes and goes on top `transients`.
In a pipeline, messages: a stage's input on its way, and its output and a gradient that wait to be taken.

Left out: what isn't allocated through PyTorch (the CUDA context, kernels, NCCL's buffers), and fragmentation.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from megafp8.config import Config, DataConfig, TrainConfig
from megafp8.fp8 import gemm
from megafp8.fp8.feature_grid import FeatureGrid
from megafp8.fp8.formats import Scale
from megafp8.fp8.primary import orientations, scale_shape
from megafp8.optimizer.layout import ALIGNMENT, BufferLayout
from megafp8.parallel import Axis
from megafp8.plan.activations import Activation, LayerKinds, quantized_bytes, stage_phases
from megafp8.plan.in_flight import InFlight, in_flight
from megafp8.plan.rank_parameters import COLUMN, ROW, RankParameter, held_stages, rank_layouts, rank_parameters
from megafp8.plan.shapes import LayerShape
from megafp8.plan.sizes import Sizes

MIB, GIB = 1 << 20, 1 << 30

CUBLAS_WORKSPACE = 32 * MIB
"""PyTorch's workspace of cuBLAS and cuBLASLt, for a thread's handle and a stream, on Hopper and later."""
TABLE_BYTES, PROGRAM_ELEMENTS = 8, 16 * 64
"""The fused update has a table of two int32 for each program, of 16 chunks of 64 elements."""
NORM_BYTES = 8 / 64
"""Of an element: the gradient norm has an FP64 sum for every 64."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one rank, by owner. activations: held for backward by one microbatch, through all of the rank's stages.

    in_flight: held by `pairs` of microbatch and stage at the moment of the peak. extra: what comes and goes then.
    messages: hidden states on their way from and to other stages.
    """

    weights: int
    main_grads: int
    masters: int
    moments: int
    fp8_copies: int
    workspaces: int
    activations: tuple[Activation, ...]
    in_flight: int
    pairs: int
    extra: Activation
    messages: int = 0

    @property
    def static(self) -> int:
        """Bytes that stay through the whole step."""
        return self.weights + self.main_grads + self.masters + self.moments + self.fp8_copies + self.workspaces

    @property
    def held(self) -> int:
        """Bytes that one microbatch holds when its forward ends."""
        return sum(a.bytes for a in self.activations)

    @property
    def total(self) -> int:
        """The estimated peak."""
        return self.static + self.in_flight + self.messages + self.extra.bytes

    @property
    def owners(self) -> dict[str, int]:
        """What adds up to the peak, in words."""
        return {
            "weights": self.weights,
            "main gradients (fp32)": self.main_grads,
            "master weights": self.masters,
            "Adam moments": self.moments,
            "FP8 copies of weights": self.fp8_copies,
            "workspaces and tables": self.workspaces,
            "activations": self.in_flight,
            "messages between stages": self.messages,
            "temporaries": self.extra.bytes,
        }


@dataclass(frozen=True)
class Resident:
    """What of a rank's memory stays through a step, and elements: of its buffers, and of its shards of them."""

    weights: int
    main_grads: int
    masters: int
    moments: int
    fp8_copies: int
    tables: int
    elements: int
    shard: int


def plan_memory(config: Config, device: torch.device | str = "cpu", stage: int = 0) -> MemoryPlan:
    """Returns the memory of a rank of pipeline rank `stage` that trains the configuration on `device`.

    Of the stage's ranks it is the first; others have the same, but for the padding of an uneven cut.

    Args:
        config: resolved, with the vocabulary known (`with_vocab_size`).
        device: whose GEMMs decide on orientations; nothing is allocated there.
    """
    device = torch.device(device)
    held, phases = resident(config, device, stage), stage_phases(config, device, stage)
    peak = _or_update(config, held, in_flight(config, stage, phases))
    return MemoryPlan(
        weights=held.weights,
        main_grads=held.main_grads,
        masters=held.masters,
        moments=held.moments,
        fp8_copies=held.fp8_copies,
        workspaces=_workspaces(config) + held.tables,
        activations=tuple(a for chunk in phases for phase in chunk for a in phase.kept),
        in_flight=peak.held,
        pairs=peak.pairs,
        extra=peak.extra,
        messages=_messages(config) if peak.held else 0,
    )


def resident(config: Config, device: torch.device, stage: int) -> Resident:
    """What stays; stages of the same layers and ends have the same, and so have all microbatches."""
    kinds = LayerKinds(config, device)
    moe, size = config.model.moe_layers, config.parallel.pipeline_model_parallel_size

    def content(rank: int) -> tuple:
        held = held_stages(config, rank)
        layers = tuple(kinds(LayerShape(f"layers.{n}", moe[n])) for chunk in held for n in chunk.layers)
        return tuple((chunk.embedding, chunk.loss, len(chunk.layers)) for chunk in held), layers

    own = content(stage)
    first = next(rank for rank in range(size) if rank == stage or content(rank) == own)
    train = TrainConfig(bf16=config.train.bf16)
    return _resident(dataclasses.replace(config, train=train, data=DataConfig(), notes=(), given={}), device, first)


@lru_cache(maxsize=1 << 12)
def _resident(config: Config, device: torch.device, stage: int) -> Resident:
    layouts, parameters = rank_layouts(config, stage), rank_parameters(config, stage)
    held = [(layout.numel // layout.shards, layout.precision) for layout in layouts]
    primary = {p.name: p for p in parameters if config.fp8.fp8_param_gather and p.recipe is not None}
    elements = sum(layout.numel for layout in layouts)
    return Resident(
        weights=sum(_weights(layout, primary) for layout in layouts),
        main_grads=4 * elements,
        masters=int(sum(n * precision.master_bytes for n, precision in held)),
        moments=int(sum(n * precision.moment_bytes for n, precision in held)),
        fp8_copies=sum(copies_bytes(config, p, device) for p in parameters if p.recipe is not None),
        tables=sum(_tables(layout, primary) for layout in layouts),
        elements=elements,
        shard=sum(n for n, _ in held),
    )


def plan_stages(config: Config, device: torch.device | str = "cpu") -> list[MemoryPlan]:
    """Returns the memory of a rank of every pipeline rank, in order."""
    return [plan_memory(config, device, stage) for stage in range(config.parallel.pipeline_model_parallel_size)]


def _or_update(config: Config, held: Resident, peak: InFlight) -> InFlight:
    """The peak of forward and backward, or where it is larger that of the reduction or of the update after them."""
    sent, p = 0, config.parallel
    if p.grad_reduce_in_bf16 and p.data_parallel_size * p.context_parallel_size > 1:
        sent = 2 * held.elements + 2 * held.shard
    later = max(
        Activation("reduction", "gradients in BF16", sent),
        Activation("update", "gradient norm", int(held.shard * NORM_BYTES)),
        key=lambda a: a.bytes,
    )
    if later.bytes <= peak.held + peak.extra.bytes:
        return peak
    return InFlight(0, 0, later, peak.microbatches)


def _workspaces(config: Config) -> int:
    """Of the thread that runs forward and of autograd's, each with a handle of its own; the CPU has none."""
    return 0 if config.train.device == "cpu" else 2 * CUBLAS_WORKSPACE


def _messages(config: Config) -> int:
    """The next action's input on its way, and an output and a gradient that wait to be taken."""
    return 3 * Sizes.of(config).stream if config.parallel.pipeline_model_parallel_size > 1 else 0


def _tables(layout: BufferLayout, primary: dict[str, RankParameter]) -> int:
    """Of the fused update. FP8 primary weights have a program for a tile, which is larger."""
    if any(slot.name in primary for slot in layout.slots):
        return 0
    return TABLE_BYTES * math.ceil(layout.numel / layout.shards / PROGRAM_ELEMENTS)


def _weights(layout: BufferLayout, primary: dict[str, RankParameter]) -> int:
    """Bytes of a buffer of weights; of FP8 primary ones in each orientation stored, with their scales."""
    held = [primary[slot.name] for slot in layout.slots if slot.name in primary]
    if not held:
        return layout.numel * layout.dtype.itemsize
    quantizer = held[0].recipe.quantizer("weight")
    found = orientations(quantizer)
    shapes = (scale_shape(quantizer, p.shape, orientation) for p in held for orientation in found)
    scales = sum(math.ceil(math.prod(shape) / ALIGNMENT) * ALIGNMENT for shape in shapes)
    return len(found) * layout.numel + scales * (1 if quantizer.spec.scale is Scale.E8M0 else 4)


def copies_bytes(config: Config, p: RankParameter, device: torch.device) -> int:
    """Bytes of the FP8 copies of a weight that forward and backward keep until the next update."""
    free = {"rowwise"} if config.fp8.fp8_param_gather else set()  # the stored bytes themselves
    wanted = set(gemm.needs(p.recipe, "weight", device).values()) - free
    return sum(quantized_bytes(p.recipe, "weight", _padded(config, p), orientation) for orientation in wanted)


def cuts_primary_tiles(config: Config) -> bool:
    """Whether tensor parallelism cuts FP8 weights through their tiles, so that they can't be primary weights."""
    stages = range(config.parallel.pipeline_model_parallel_size)
    held = (p for stage in stages for p in rank_parameters(config, stage) if p.recipe is not None)
    return config.parallel.tensor_model_parallel_size > 1 and any(_padded(config, p) != p.shape for p in held)


def _padded(config: Config, p: RankParameter) -> tuple[int, int]:
    """The shape of a weight's FP8 copies: padded to whole tiles where tensor parallelism cuts through them."""
    block, kind = p.recipe.quantizer("weight").spec.tile.block, p.name.split(".")[-2]
    ranks = config.parallel.expert_tensor_parallel_size if p.expert else config.parallel.tensor_model_parallel_size
    if not block or ranks in (None, 1) or kind not in COLUMN + ROW:
        return p.shape
    dim, parts = (0, 2 if kind == "fc1" and config.model.swiglu else 1) if kind in COLUMN else (1, 1)
    grid = FeatureGrid(parts, p.shape[dim] * ranks // parts, Axis(ranks), block)
    if grid.aligned:
        return p.shape
    return (grid.width, p.shape[1]) if dim == 0 else (p.shape[0], grid.width)
