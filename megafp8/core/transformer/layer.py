"""A pre-norm transformer layer: x + attention(norm(x)), then + mlp(norm(.)), with dropout before each sum."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.moe.layer import MoELayer
from megafp8.core.tensor_parallel.random import dropout
from megafp8.core.transformer.attention import SelfAttention
from megafp8.core.transformer.core_attention import Sequences
from megafp8.core.transformer.latent_attention import LatentAttention
from megafp8.core.transformer.mlp import MLP
from megafp8.core.transformer.norm import Norm, hidden_norm
from megafp8.core.transformer.recompute import recomputed, remade
from megafp8.step import StepContext


class TransformerLayer(nn.Module):
    """name: global name with the global layer number from 0, e.g. "layers.3".

    experts: the MLP is a mixture of experts. recomputed: the whole layer runs inside a part that backward computes
    again.
    """

    def __init__(self, name: str, build: BuildContext, *, experts: bool = False, recomputed: bool = False) -> None:
        super().__init__()
        self.places = build.token_place(f"{name}.attention"), build.token_place(f"{name}.mlp")
        self.dropout = build.model.hidden_dropout
        self.has_experts = experts
        self.recompute_mlp = ("moe" if experts else "mlp") in build.recompute.modules
        self.remake_norms = "layernorm" in build.recompute.modules and not recomputed
        self.input_norm = hidden_norm(f"{name}.input_norm", build)
        attention = LatentAttention if build.model.multi_latent_attention else SelfAttention
        self.attention = attention(f"{name}.attention", build)
        self.mlp_norm = hidden_norm(f"{name}.mlp_norm", build)
        mlp = MoELayer if experts else MLP
        self.mlp = mlp(f"{name}.mlp", build, recomputed=recomputed or self.recompute_mlp)

    def forward(self, x: Tensor, sequences: Sequences, step: StepContext) -> Tensor:
        """x: the residual stream [T, hidden]; returns the same shape."""
        y, x = self._attention(x, sequences, step)
        x = x + dropout(y, self.dropout, step, self.places[0])
        if self.recompute_mlp:
            y = recomputed(lambda x, step: self._mlp(x, sequences, step)[0], step, x)
        else:
            y, x = self._mlp(x, sequences, step)
        return x + dropout(y, self.dropout, step, self.places[1])

    def _attention(self, x: Tensor, sequences: Sequences, step: StepContext) -> tuple[Tensor, Tensor]:
        """What attention adds to x, and x."""
        if isinstance(self.attention, SelfAttention):
            return self.attention.after(self.input_norm, x, sequences, step, remake=self.remake_norms)
        if not self.remake_norms:
            return self.attention.after(self.input_norm, x, sequences, step), x
        return _after(self.input_norm, x, lambda h: self.attention(h, sequences, step), remake=True), x

    def _mlp(self, x: Tensor, sequences: Sequences, step: StepContext) -> tuple[Tensor, Tensor]:
        """What the MLP adds to x, and x."""
        remake = self.remake_norms and not self.recompute_mlp
        if not self.has_experts:
            return self.mlp.after(self.mlp_norm, x, step, remake=remake)
        return _after(self.mlp_norm, x, lambda h: self.mlp(h, sequences, step), remake=remake), x


def _after(norm: Norm, x: Tensor, part: Callable[[Tensor], Tensor], *, remake: bool) -> Tensor:
    """`part(norm(x))`, whose linears share the norm's output; remake: backward makes it anew."""
    h = norm(x)
    with remade(h, lambda: norm.compute(x)) if remake else nullcontext():
        return part(h)
