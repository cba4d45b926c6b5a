"""The experts of a layer: MLPs, one after the other, each with its own rows, linears and tiles.

A token's weight multiplies its row between the activation and fc2: the same as weighing the expert's output, as fc2
has no bias, and then no output needs to be kept for the weight's gradient.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.tensor_parallel.specs import replicated
from megafp8.core.transformer.mlp import MLP
from megafp8.fp8 import Linear
from megafp8.fp8.grouped_rows import RowSpec
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.params import Init
from megafp8.step import StepContext


@dataclass(frozen=True)
class ExpertRows:
    """What the experts of a rank work on: x [R, hidden], rows by expert; weights: FP32 [R]; counts: int64 [E], rows of
    each. Rows past the last expert's are nobody's."""

    x: Tensor | QuantizedTensor
    weights: Tensor
    counts: Tensor


class Experts(nn.ModuleList):
    """This rank's experts. name: global name, e.g. "layers.3.mlp.experts"; an expert's number is global.

    Under tensor parallelism of experts each gives a part of its output, which whoever sums a token's adds up.
    """

    def __init__(self, name: str, build: BuildContext, *, recomputed: bool = False) -> None:
        model, first, last = build.model, *build.parallel.ep.split(build.model.num_experts)
        super().__init__(
            MLP(f"{name}.{e}", build.experts, ffn=model.moe_ffn_hidden_size, expert=True, recomputed=recomputed)
            for e in range(first, last)
        )

    @property
    def row_spec(self) -> RowSpec:
        """How their input is wanted."""
        return RowSpec()

    def forward(self, rows: ExpertRows, step: StepContext) -> Tensor:
        """Returns [R, hidden].

        An expert without rows runs too: its weights' gradients are zero, and they become ready like all others.
        """
        counts = rows.counts.tolist()
        rest = rows.x.shape[0] - sum(counts)
        *inputs, nobodys = rows.x.split([*counts, rest])
        *weights, _ = rows.weights.split([*counts, rest])
        outputs = [expert(own, step, part) for expert, own, part in zip(self, inputs, weights, strict=True)]
        return torch.cat(outputs + [torch.zeros_like(nobodys)] * (rest > 0))


class SharedExperts(MLP):
    """The experts that see every token: one MLP, with `--moe-shared-expert-gate` times sigmoid(x g)."""

    def __init__(self, name: str, build: BuildContext, *, recomputed: bool = False) -> None:
        model = build.model
        super().__init__(name, build, ffn=model.moe_shared_expert_intermediate_size, recomputed=recomputed)
        self.gate = None
        if model.moe_shared_expert_gate:
            init = Init("normal", model.init_method_std)
            spec = replicated(f"{name}.gate.weight", (1, model.hidden_size), init, decay=True)
            self.gate = Linear(
                model.hidden_size, 1, False, weight_spec=spec, params_dtype=build.dtype, device=build.device
            )

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """x: [T, hidden]; returns [T, hidden]."""
        y = super().forward(x, step)
        return y if self.gate is None else y * self.gate(x, step).sigmoid()
