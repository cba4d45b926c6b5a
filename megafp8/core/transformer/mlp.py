"""The MLP: fc1 -> activation -> fc2. With SwiGLU, fc1's output is [gate; up].

Backward keeps fc1's output only: before an FP8 fc2 the activation is that linear's producer, which makes fc2's input
anew and hands fc1 its gradient as the bytes that fc1's GEMMs read.
"""

from __future__ import annotations

from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from megafp8.core.transformer.activation import activation_of
from megafp8.core.transformer.norm import Norm
from megafp8.core.transformer.produce import branch_after
from megafp8.core.transformer.recompute import remade
from megafp8.step import StepContext


class MLP(nn.Module):
    """name: global name, e.g. "layers.3.mlp". ffn: inner width, by default the dense layers'.

    expert: one of many, which sees only the rows routed to it. recomputed: runs inside a part that backward computes
    again.
    """

    def __init__(
        self, name: str, build: BuildContext, *, ffn: int | None = None, expert: bool = False, recomputed: bool = False
    ) -> None:
        super().__init__()
        model = build.model
        hidden, ffn = model.hidden_size, ffn or model.ffn_hidden_size
        self.recomputed = recomputed
        self.remake = expert and "moe_act" in build.recompute.modules  # also where fc2 is not FP8
        self.activation = activation_of(model, build.stores_in_fp8(f"{name}.fc1", expert=expert))
        self.fc1 = ColumnParallelLinear(
            f"{name}.fc1",
            hidden,
            (2, ffn) if self.activation.gated else (ffn,),
            bias=model.add_bias_linear,
            init_std=model.init_method_std,
            requantize_input="layernorm" in build.recompute.modules and not expert,
            expert=expert,
            build=build,
        )
        self.fc2 = RowParallelLinear(
            f"{name}.fc2",
            ffn,
            hidden,
            bias=model.add_bias_linear,
            init_std=build.output_std,
            requantize_input=True,
            expert=expert,
            build=build,
        )

    def forward(self, x: Tensor, step: StepContext, weights: Tensor | None = None) -> Tensor:
        """x: [T, hidden]; returns [T, hidden]. weights: FP32 [T], by which rows are multiplied before fc2."""
        return self._rest(self.fc1(x, step), step, weights)

    def after(self, norm: Norm, x: Tensor, step: StepContext, *, remake: bool = False) -> tuple[Tensor, Tensor]:
        """`self(norm(x))`, and `x` for the sum that follows; see `branch_after`."""
        inner, x = branch_after(norm, self.fc1, x, step, remake=remake)
        return self._rest(inner, step), x

    def _rest(self, inner: Tensor, step: StepContext, weights: Tensor | None = None) -> Tensor:
        """What follows fc1."""
        if self.fc2.takes_producer:
            tensors = () if weights is None else (weights,)
            return self.fc2(inner, step, producer=self.activation, tensors=tensors, grad_want=self.fc1.grad_want(step))
        y = self.activation(inner, weights)
        if self.recomputed or not self.remake:
            return self.fc2(y, step)
        inner, weights = inner.detach(), None if weights is None else weights.detach()
        with remade(y, lambda: self.activation.compute(inner, weights)):
            return self.fc2(y, step)
