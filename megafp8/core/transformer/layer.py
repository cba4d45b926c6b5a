"""A pre-norm transformer layer: x + attention(norm(x)), then + mlp(norm(.)), with dropout before each sum."""

from __future__ import annotations

from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.tensor_parallel.random import dropout
from megafp8.core.transformer.attention import SelfAttention
from megafp8.core.transformer.core_attention import Sequences
from megafp8.core.transformer.mlp import MLP
from megafp8.core.transformer.norm import hidden_norm
from megafp8.core.transformer.recompute import recomputed
from megafp8.step import StepContext


class TransformerLayer(nn.Module):
    """name: global name with the global layer number from 0, e.g. "layers.3"."""

    def __init__(self, name: str, build: BuildContext) -> None:
        super().__init__()
        self.name, self.dropout = name, build.model.hidden_dropout
        self.recompute_mlp = "mlp" in build.recompute.modules
        self.input_norm = hidden_norm(f"{name}.input_norm", build)
        self.attention = SelfAttention(f"{name}.attention", build)
        self.mlp_norm = hidden_norm(f"{name}.mlp_norm", build)
        self.mlp = MLP(f"{name}.mlp", build)

    def forward(self, x: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        """x: the residual stream [T, hidden]; returns the same shape."""
        y = self.attention(self.input_norm(x), sequences, step)
        x = x + dropout(y, self.dropout, step, f"{self.name}.attention")
        h = self.mlp_norm(x)
        y = recomputed(self.mlp, step, h) if self.recompute_mlp else self.mlp(h, step)
        return x + dropout(y, self.dropout, step, f"{self.name}.mlp")
