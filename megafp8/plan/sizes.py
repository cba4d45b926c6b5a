"""What all formulas of activations need: a rank's share of a microbatch, and of each linear's features.

T tokens of a microbatch on this rank: its part of each sequence under context parallelism. Between the linears a rank
holds S of them, T / TP under sequence parallelism, else all T. Tensor parallelism cuts the output features of
column-parallel linears and the input features of row-parallel ones; experts are cut over ETP and dealt out over EP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megafp8.config import Config
from megafp8.config.model import ModelConfig
from megafp8.config.parallel import layout_sizes
from megafp8.plan.rank_parameters import COLUMN, ROW
from megafp8.plan.shapes import PartShape


@dataclass(frozen=True)
class Sizes:
    """tokens: T. element: bytes of the compute dtype. norm_input: bytes an element of what a norm keeps of its input:
    FP32 where its weight is stored minus one, unless it is an FP8 linear's producer. statistics: FP32 numbers a
    normalized row: 1 for RMSNorm, 2 for LayerNorm. ring: context-parallel ranks pass keys and values on.
    """

    model: ModelConfig
    tokens: int
    element: int
    norm_input: int
    statistics: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    sequence_parallel: bool = False
    ring: bool = False

    @staticmethod
    def of(config: Config) -> Sizes:
        element, axes = 2 if config.train.bf16 else 4, layout_sizes(config.parallel)
        return Sizes(
            model=config.model,
            tokens=config.train.micro_batch_size * config.data.seq_length // axes["cp"],
            element=element,
            norm_input=4 if config.model.apply_layernorm_1p else element,
            statistics=2 if config.model.normalization == "LayerNorm" else 1,
            **{name: axes[name] for name in ("tp", "cp", "ep", "etp")},
            sequence_parallel=config.parallel.sequence_parallel and axes["tp"] > 1,
            ring="p2p" in (config.parallel.cp_comm_type or ()),
        )

    @property
    def stream_tokens(self) -> int:
        """S: tokens of the residual stream."""
        return self.tokens // self.tp if self.sequence_parallel else self.tokens

    @property
    def stream(self) -> int:
        """Bytes of the residual stream."""
        return self.stream_tokens * self.model.hidden_size * self.element

    @property
    def exchanges(self) -> bool:
        """Whether tokens go to experts on other ranks."""
        return self.ep > 1 or self.etp != self.tp

    @property
    def routed_tokens(self) -> int:
        """Tokens that this rank sends to experts: its own, or where experts lie as the dense layers do, all of TP's."""
        return self.stream_tokens if self.exchanges else self.tokens

    @property
    def rows(self) -> int:
        """Rows of this rank's experts, when the load is even: each token's k choices, to every part of an expert."""
        return self.routed_tokens * self.model.moe_router_topk * (self.etp if self.exchanges else 1)

    def norm(self, rows: int, width: int, *, produces: bool = False) -> int:
        """Bytes that a norm keeps of an input of `rows` rows; produces: it is part of an FP8 linear."""
        return rows * (width * (self.element if produces else self.norm_input) + 4 * self.statistics)

    def local(self, shape: PartShape) -> PartShape:
        """This rank's part of a linear, or of a row of like ones."""
        expert, kind = "*" in shape.part, shape.part.rpartition(".")[2]
        ranks = self.etp if expert else self.tp
        return replace(
            shape,
            out_features=shape.out_features // (ranks if kind in COLUMN else 1),
            in_features=shape.in_features // (ranks if kind in ROW else 1),
            copies=shape.copies // (self.ep if expert else 1),
        )
