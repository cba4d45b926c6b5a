"""A layer's mixture of experts, in place of its MLP: route, permute, run the experts, sum; shared experts beside."""

from __future__ import annotations

from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.moe.experts import Experts, SharedExperts
from megafp8.core.moe.permutation import Permutation, combine, permute, permute_weights
from megafp8.core.moe.router import Router
from megafp8.core.transformer.core_attention import Sequences
from megafp8.step import StepContext


class MoELayer(nn.Module):
    """name: global name, e.g. "layers.3.mlp". recomputed: runs inside a part that backward computes again."""

    def __init__(self, name: str, build: BuildContext, *, recomputed: bool = False) -> None:
        super().__init__()
        self.router = Router(f"{name}.router", build)
        self.experts = Experts(f"{name}.experts", build, recomputed=recomputed)
        shared = build.model.moe_shared_expert_intermediate_size
        self.shared_experts = SharedExperts(f"{name}.shared_experts", build, recomputed=recomputed) if shared else None

    def forward(self, x: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        """x: [T, hidden]; returns [T, hidden]."""
        routing = self.router(x, sequences, step)
        order = Permutation.of(routing.experts, len(self.experts))
        rows, weights = permute(x, order), permute_weights(routing.weights, order)
        y = combine(self.experts(rows, order.counts.tolist(), weights, step), order)
        return y if self.shared_experts is None else y + self.shared_experts(x, step)
