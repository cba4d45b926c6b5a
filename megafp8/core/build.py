"""BuildContext: what every module of the model is built with, so that none reads flags or asks a global."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from megafp8.config import Config
from megafp8.config.model import ModelConfig
from megafp8.config.parallel import ParallelConfig
from megafp8.config.train import TrainConfig
from megafp8.fp8 import Recipe
from megafp8.parallel import Axis, ParallelContext

OVERLAP_CHUNKS = 4
"""Pieces of a linear's work under `--tp-comm-overlap`."""


@dataclass(frozen=True)
class RecomputePlan:
    """What backward computes again.

    modules: parts of every layer ("core_attn", "layernorm", "mlp"); whole layers: `unit` layers at a time are
    recomputed together, of the first `layers` (None: of all).
    """

    modules: frozenset[str] = frozenset()
    unit: int = 0
    layers: int | None = None

    @staticmethod
    def of(train: TrainConfig) -> RecomputePlan:
        if train.recompute_granularity == "selective":
            return RecomputePlan(modules=frozenset(train.recompute_modules or ()))
        if train.recompute_granularity == "full":
            count = train.recompute_num_layers or 1
            if train.recompute_method == "block":
                return RecomputePlan(unit=1, layers=count)
            return RecomputePlan(unit=count)
        return RecomputePlan()


@dataclass(frozen=True)
class DispatchPlan:
    """How tokens travel to experts on other ranks.

    gathers: all to all ranks, else each to those of its experts. library: by DeepEP. fp8_tokens, fp8_gradients: what
    goes to the experts, forward and backward, is FP8 where they are. overlaps_shared: the shared experts run meanwhile.
    """

    gathers: bool = False
    library: bool = False
    fp8_tokens: bool = False
    fp8_gradients: bool = False
    overlaps_shared: bool = False

    @staticmethod
    def of(parallel: ParallelConfig) -> DispatchPlan:
        return DispatchPlan(
            gathers=parallel.moe_token_dispatcher_type == "allgather",
            library=parallel.moe_token_dispatcher_type == "flex",
            fp8_tokens=parallel.moe_fp8_dispatch,
            fp8_gradients=parallel.moe_fp8_combine_grad,
            overlaps_shared=parallel.moe_shared_expert_overlap,
        )


@dataclass(frozen=True)
class BuildContext:
    """model: the architecture; dtype: of parameters and compute, FP32 or BF16.

    recipe_of: global name of a linear -> its recipe, None for high precision (`fp8.policy` decides).
    comm_chunks: pieces into which tensor-parallel linears cut their work, to overlap it with communication.
    deterministic: only kernels with a deterministic backward.
    fp8_input_store: activations keep fc1's output in FP8; None: only those of experts in FP8.
    loss_chunks: parts of the tokens that LM head and loss take in turn.
    ring_attention: context-parallel ranks pass keys and values on, instead of gathering them.
    head_norms_decay: weight decay applies to query and key norms.
    sums_outputs: tensor-parallel linears add up what the ranks have of Y and dX; False leaves that to the caller.
    """

    model: ModelConfig
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")
    parallel: ParallelContext = field(default_factory=ParallelContext)
    recipe_of: Callable[[str], Recipe | None] = lambda name: None
    recompute: RecomputePlan = RecomputePlan()
    gemm_backend: str = "auto"
    comm_chunks: int = 1
    deterministic: bool = False
    loss_chunks: int = 1
    ring_attention: bool = False
    sums_outputs: bool = True
    dispatch: DispatchPlan = DispatchPlan()
    fp8_input_store: bool | None = None
    head_norms_decay: bool = False

    def stores_in_fp8(self, fc1: str, *, expert: bool) -> bool:
        """Whether the activation after the linear `fc1` (global name) keeps its input in FP8."""
        if self.fp8_input_store is None:
            return expert and self.recipe_of(fc1) is not None
        return self.fp8_input_store

    @property
    def tp(self) -> Axis:
        return self.parallel.tp

    @property
    def vocab_size(self) -> int:
        """Ids in use, the logical vocabulary."""
        return self.model.unpadded_vocab_size

    @property
    def sequence_parallel(self) -> bool:
        return self.parallel.sequence_parallel and self.tp.size > 1

    @property
    def whole_sequences(self) -> BuildContext:
        """The same for modules that see all tokens on every tensor-parallel rank, also under sequence parallelism."""
        return replace(self, parallel=replace(self.parallel, sequence_parallel=False), comm_chunks=1)

    @property
    def exchanges_tokens(self) -> bool:
        """Whether experts are spread otherwise than the dense layers, so that tokens go to their ranks."""
        return self.parallel.ep.size > 1 or self.parallel.etp.size != self.tp.size

    @property
    def experts(self) -> BuildContext:
        """The same for the experts: cut over their own ranks, each of which gives a part of the sum."""
        parallel = replace(self.parallel, tp=self.parallel.etp, sequence_parallel=False)
        return replace(self, parallel=parallel, comm_chunks=1, sums_outputs=False)

    def token_place(self, name: str) -> str:
        """Where random numbers for the hidden states of module `name` are drawn: ranks with other tokens, others."""
        name = f"{name}/cp{self.parallel.cp.rank}" if self.parallel.cp.size > 1 else name
        return f"{name}/tp{self.tp.rank}" if self.sequence_parallel else name

    def head_place(self, name: str) -> str:
        """The same for values by attention head: ranks hold other heads."""
        name = f"{name}/cp{self.parallel.cp.rank}" if self.parallel.cp.size > 1 else name
        return f"{name}/tp{self.tp.rank}" if self.tp.size > 1 else name

    @property
    def output_std(self) -> float:
        """Init of the layers that add to the residual stream, `std / sqrt(2 layers)` (GPT-2's, as in Megatron-LM)."""
        return self.model.init_method_std / (2 * self.model.num_layers) ** 0.5

    @staticmethod
    def of(
        config: Config, parallel: ParallelContext, device: torch.device, recipe_of: Callable[[str], Recipe | None]
    ) -> BuildContext:
        return BuildContext(
            model=config.model,
            dtype=torch.bfloat16 if config.train.bf16 else torch.float32,
            device=device,
            parallel=parallel,
            recipe_of=recipe_of,
            gemm_backend=config.fp8.fp8_gemm_backend,
            comm_chunks=OVERLAP_CHUNKS if config.parallel.tp_comm_overlap else 1,
            recompute=RecomputePlan.of(config.train),
            deterministic=config.train.deterministic_mode,
            loss_chunks=config.train.cross_entropy_chunks,
            dispatch=DispatchPlan.of(config.parallel),
            fp8_input_store=config.fp8.activation_func_fp8_input_store,
            head_norms_decay=config.optimizer.apply_wd_to_qk_layernorm,
            ring_attention=(config.parallel.cp_comm_type or ("all_gather",))[0] == "p2p",
        )
