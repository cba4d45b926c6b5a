"""The experts of a layer: MLPs, each with its own rows, parameters and tiles, that run as one where they are alike.

A token's weight multiplies its row between the activation and fc2: the same as weighing the expert's output, as fc2
has no bias, and then no output needs to be kept for the weight's gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.tensor_parallel.specs import replicated
from megafp8.core.transformer.mlp import MLP
from megafp8.core.transformer.recompute import remade
from megafp8.fp8 import Linear
from megafp8.fp8.expert_scales import Groups
from megafp8.fp8.grouped_linear import GroupedLinear, can_group, rows_alignment
from megafp8.fp8.grouped_rows import RowSpec
from megafp8.fp8.tensor import QuantizedTensor
from megafp8.params import Init, attach_spec, spec_of
from megafp8.step import StepContext


@dataclass(frozen=True)
class ExpertRows:
    """What the experts of a rank work on: x [R, hidden], rows by expert; weights: FP32 [R]; ends: int32 [E], one past
    each one's last row, multiples of `alignment`. Rows past the last expert's are nobody's. alignment: None for one by
    one."""

    x: Tensor | QuantizedTensor
    weights: Tensor
    ends: Tensor
    alignment: int | None = None


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
        self.name = name
        for number, mlp in enumerate(self):
            for kind in ("fc1", "fc2"):
                weight = getattr(mlp, kind).weight
                attach_spec(weight, replace(spec_of(weight), stack=(f"{name}.{kind}", number)))
        self.recomputed = recomputed
        self._grouped = (GroupedLinear([mlp.fc1 for mlp in self]), GroupedLinear([mlp.fc2 for mlp in self]))
        self.apart = False  # True: run one after the other, so that each linear can be looked at

    @property
    def groups(self) -> bool:
        """Whether all run as one; else one after the other."""
        return not self.apart and all(can_group(grouped.linears) for grouped in self._grouped)

    def row_spec(self, step: StepContext) -> RowSpec:
        """How their input is wanted."""
        if not self.groups:
            return RowSpec()
        fc1, fc2 = self._grouped
        return fc1.row_spec(step, math.lcm(rows_alignment(fc1.linears), rows_alignment(fc2.linears)))

    def gradient_spec(self, rows: ExpertRows, step: StepContext) -> RowSpec | None:
        """How the gradient of their output is wanted; None: in high precision."""
        if rows.alignment is None or step.observer is not None:  # who observes wants to see the values
            return None
        return self._grouped[1].gradient_spec(step, rows.alignment)

    def forward(self, rows: ExpertRows, step: StepContext) -> Tensor:
        """Returns [R, hidden].

        An expert without rows runs too: its weights' gradients are zero, and they become ready like all others.
        """
        if rows.alignment is None:
            return self._one_by_one(rows, step)
        fc1, fc2 = self._grouped
        mlp, options = self[0], {"ends": rows.ends, "step": step, "alignment": rows.alignment}
        inner = fc1(rows.x, **options)
        if mlp.fc2.takes_producer:
            want = fc1.grad_want(step, Groups(rows.ends, len(rows.weights), rows.alignment))
            return fc2(inner, producer=mlp.activation, tensors=(rows.weights,), grad_want=want, **options)
        y = mlp.activation(inner, rows.weights)
        if self.recomputed or not mlp.remake:
            return fc2(y, **options)
        inner, weights = inner.detach(), rows.weights.detach()
        with remade(y, lambda: mlp.activation.compute(inner, weights)):
            return fc2(y, **options)

    @staticmethod
    def live_rows(rows: ExpertRows, *_: object) -> Tensor:
        """Bool [R, 1]: which rows of the output of `forward` are an expert's. What is in the others is no matter."""
        return (torch.arange(len(rows.weights), device=rows.weights.device) < rows.ends[-1])[:, None]

    def _one_by_one(self, rows: ExpertRows, step: StepContext) -> Tensor:
        ends = rows.ends.tolist()
        counts = [end - start for start, end in pairwise([0, *ends])]
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
            spec = replicated(
                f"{name}.gate.weight",
                (1, model.hidden_size),
                init,
                decay=True,
                gradient_is_part=build.sequence_parallel,
            )
            self.gate = Linear(
                model.hidden_size, 1, False, weight_spec=spec, params_dtype=build.dtype, device=build.device
            )

    def forward(self, x: Tensor, step: StepContext) -> Tensor:
        """x: [T, hidden]; returns [T, hidden]."""
        y = super().forward(x, step)
        return y if self.gate is None else y * self.gate(x, step).sigmoid()
