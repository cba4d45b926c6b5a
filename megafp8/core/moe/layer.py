"""A layer's mixture of experts, in place of its MLP: route, permute, run the experts, sum; shared experts beside.

Under tensor parallelism every rank routes all tokens alike and has a part of each expert. Under sequence parallelism
the layer gathers the tokens first, and keeps this rank's in the end.
"""

from __future__ import annotations

from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.moe.experts import Experts, SharedExperts
from megafp8.core.moe.permutation import Permutation, combine, permute, permute_weights
from megafp8.core.moe.router import Router
from megafp8.core.tensor_parallel.mappings import gather_tokens, keep_tokens, sum_gradient
from megafp8.core.transformer import recompute
from megafp8.core.transformer.core_attention import Sequences
from megafp8.parallel import Axis
from megafp8.step import StepContext


class MoELayer(nn.Module):
    """name: global name, e.g. "layers.3.mlp". recomputed: runs inside a part that backward computes again."""

    def __init__(self, name: str, build: BuildContext, *, recomputed: bool = False) -> None:
        super().__init__()
        self.tp, self.tokens = build.tp, build.tp if build.sequence_parallel else Axis()
        build = build.whole_sequences
        self.router = Router(f"{name}.router", build)
        self.experts = Experts(f"{name}.experts", build, recomputed=recomputed)
        shared = build.model.moe_shared_expert_intermediate_size
        self.recompute_shared = "shared_experts" in build.recompute.modules and not recomputed
        inside = recomputed or self.recompute_shared
        self.shared_experts = SharedExperts(f"{name}.shared_experts", build, recomputed=inside) if shared else None

    def forward(self, x: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        """x: [T, hidden]; returns [T, hidden]."""
        x = gather_tokens(x, self.tokens)
        routing = self.router(x, sequences, step)
        order = Permutation.of(routing.experts, len(self.experts))
        # A rank's part of an expert sees a part of what a weight multiplies.
        rows, weights = permute(x, order), permute_weights(sum_gradient(routing.weights, self.tp), order)
        y = combine(self.experts(rows, order.counts.tolist(), weights, step), order)
        if self.shared_experts is not None:
            y = y + self._shared(x, step)
        return keep_tokens(y, self.tokens)

    def _shared(self, x: Tensor, step: StepContext) -> Tensor:
        if self.recompute_shared:
            return recompute.recomputed(self.shared_experts, step, x)
        return self.shared_experts(x, step)
