"""A layer's mixture of experts, in place of its MLP: route, send tokens to experts, run those, sum; shared ones beside.

Where experts are cut as the dense layers are, every tensor-parallel rank routes all tokens alike and has a part of each
expert; under sequence parallelism it gathers the tokens first, and keeps its own in the end. Elsewhere (expert
parallelism, another expert tensor parallelism) each rank routes its own tokens, which go to the ranks of their experts.
"""

from __future__ import annotations

from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.moe.dispatch import dispatcher_of
from megafp8.core.moe.experts import Experts, SharedExperts
from megafp8.core.moe.router import Router, Routing
from megafp8.core.tensor_parallel.mappings import gather_tokens, keep_tokens, sum_gradient, sum_over
from megafp8.core.transformer import recompute
from megafp8.core.transformer.core_attention import Sequences
from megafp8.parallel import Axis
from megafp8.step import StepContext


class MoELayer(nn.Module):
    """name: global name, e.g. "layers.3.mlp". recomputed: runs inside a part that backward computes again."""

    def __init__(self, name: str, build: BuildContext, *, recomputed: bool = False) -> None:
        super().__init__()
        tokens = build.tp if build.sequence_parallel else Axis()
        exchanges = build.exchanges_tokens
        self.gathered, self.tp = (Axis(), Axis()) if exchanges else (tokens, build.tp)
        self.router = Router(f"{name}.router", build, tokens=tokens if exchanges else None)
        self.experts = Experts(f"{name}.experts", build, recomputed=recomputed)
        self.dispatcher = dispatcher_of(f"{name}.experts", build)
        shared = build.model.moe_shared_expert_intermediate_size
        self.recompute_shared = "shared_experts" in build.recompute.modules and not recomputed
        inside = recomputed or self.recompute_shared
        build = build if exchanges else build.whole_sequences
        self.shared_experts = SharedExperts(f"{name}.shared_experts", build, recomputed=inside) if shared else None
        self.overlap_shared = build.dispatch.overlaps_shared and shared is not None

    def forward(self, x: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        """x: [T, hidden]; returns [T, hidden]."""
        x = gather_tokens(x, self.gathered)
        routing = self.router(x, sequences, step)
        y, shared = self._experts(x, routing, step)
        if self.shared_experts is not None:
            y = y + (self._shared(x, step) if shared is None else shared)
        return keep_tokens(y, self.gathered)

    def _experts(self, x: Tensor, routing: Routing, step: StepContext) -> tuple[Tensor, Tensor | None]:
        """The sum of the routed experts' outputs; and that of the shared ones, if they run while tokens travel."""
        # A tensor-parallel rank's part of an expert sees a part of what tokens and weights give.
        weights = sum_gradient(routing.weights, self.tp)
        spec = self.experts.row_spec(step)
        on_the_way = self.dispatcher.send(sum_gradient(x, self.tp), routing, weights, spec)
        shared = self._shared(x, step) if self.overlap_shared else None
        rows = self.dispatcher.receive(on_the_way)
        gradient = self.experts.gradient_spec(rows, step)
        y = self.dispatcher.bring_back(self.experts(rows, step), on_the_way, gradient)
        return sum_over(y, self.tp, scatter=False), shared

    def _shared(self, x: Tensor, step: StepContext) -> Tensor:
        if self.recompute_shared:
            return recompute.recomputed(self.shared_experts, step, x)
        return self.shared_experts(x, step)
