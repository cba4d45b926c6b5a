"""The stack of layers, with recomputation of whole layers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.transformer.core_attention import Sequences
from megafp8.core.transformer.layer import TransformerLayer
from megafp8.core.transformer.recompute import recomputed
from megafp8.step import StepContext


class TransformerBlock(nn.ModuleList):
    """The layers with the given global numbers, in order."""

    def __init__(self, numbers: Iterable[int], build: BuildContext) -> None:
        numbers = list(numbers)
        plan = build.recompute
        recomputed = min(len(numbers), plan.layers or len(numbers)) if plan.unit else 0
        super().__init__(
            TransformerLayer(
                f"layers.{number}", build, experts=build.model.moe_layers[number], recomputed=place < recomputed
            )
            for place, number in enumerate(numbers)
        )
        self.unit, self.recomputed = plan.unit, recomputed

    def forward(self, x: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        """x: the residual stream [T, hidden]; returns the same shape."""
        if step.layers is not None:
            return step.layers.run(self, x, sequences, replace(step, layers=None))
        start = 0
        while start < len(self):
            if start < self.recomputed:
                stop = min(start + self.unit, self.recomputed)
                x = recomputed(lambda x, step, a=start, b=stop: self._run(a, b, x, sequences, step), step, x)
            else:
                stop = len(self)
                x = self._run(start, stop, x, sequences, step)
            start = stop
        return x

    def _run(self, start: int, stop: int, x: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        for layer in list(self)[start:stop]:
            x = layer(x, sequences, step)
        return x
