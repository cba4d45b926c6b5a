"""The router: a small linear in FP32, the choice of experts, and losses that keep their load even.

The auxiliary losses don't show in the model's loss; their gradients do. Each is a mean over the microbatch's tokens,
times their number, as the model's loss is a sum over tokens that the optimizer divides.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.moe.routing import RoutingRule, balance_loss, choose, count_tokens, z_loss
from megafp8.core.tensor_parallel.specs import replicated
from megafp8.core.transformer.core_attention import Sequences
from megafp8.params import Init, attach_spec
from megafp8.step import StepContext


@dataclass(frozen=True)
class Routing:
    """experts: int64 [T, k], best first. weights: FP32 [T, k]."""

    experts: Tensor
    weights: Tensor


class Router(nn.Module):
    """name: global name, e.g. "layers.3.mlp.router".

    expert_bias: FP32 [E], seen by selection only; None without `--moe-router-enable-expert-bias`. Its owner is the
    model, and training moves it once a step (`update_expert_bias`).
    """

    def __init__(self, name: str, build: BuildContext) -> None:
        super().__init__()
        model = build.model
        self.name, self.rule, self.num_experts = name, RoutingRule.of(model), model.num_experts
        self.dtype = torch.float64 if model.moe_router_dtype == "fp64" else torch.float32
        self.balancing, self.z_coefficient = model.balancing_losses, model.moe_z_loss_coeff
        self.update_rate = model.moe_router_bias_update_rate
        shape = (model.num_experts, model.hidden_size)
        spec = replicated(f"{name}.weight", shape, Init("normal", model.init_method_std), decay=True)
        self.weight = attach_spec(nn.Parameter(torch.empty(shape, dtype=build.dtype, device=build.device)), spec)
        bias = torch.zeros(model.num_experts, device=build.device) if model.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias, persistent=False)

    def forward(self, x: Tensor, sequences: Sequences, step: StepContext) -> Routing:
        """x: [T, hidden]."""
        logits = _Logits.apply(x, self.weight, self.dtype, step)
        experts, weights = choose(logits, self.rule, self.expert_bias)
        if step.records and step.statistics is not None and self.expert_bias is not None:
            step.statistics.add(self.load_name, count_tokens(experts, self.num_experts))
        return Routing(experts, self._with_losses(weights.float(), logits, sequences.batch, step))

    @property
    def load_name(self) -> str:
        """Under which statistic the tokens of each expert are counted."""
        return f"{self.name}/load"

    def _with_losses(self, weights: Tensor, logits: Tensor, batch: int, step: StepContext) -> Tensor:
        """`weights`, whose backward also runs that of the auxiliary losses."""
        if not torch.is_grad_enabled() or not step.training:
            return weights
        tokens = logits.shape[0]
        for kind, coefficient in self.balancing.items():
            loss = balance_loss(logits, self.rule, batch if kind == "seq_aux_loss" else 1)
            _report(step, "aux_loss", loss, tokens)
            weights = with_loss(weights, loss * (coefficient * tokens))
        if self.z_coefficient:
            loss = z_loss(logits)
            _report(step, "z_loss", loss, tokens)
            weights = with_loss(weights, loss * (self.z_coefficient * tokens))
        return weights

    def update_expert_bias(self, load: Tensor) -> None:
        """Moves each expert's bias towards the mean load; `load`: tokens of each expert over the global batch."""
        load = load.double()
        self.expert_bias += self.update_rate * torch.sign(load.mean() - load).float()


def _report(step: StepContext, name: str, loss: Tensor, tokens: int) -> None:
    if step.records and step.statistics is not None:
        step.statistics.add_mean(name, loss * tokens, tokens)


class _WithLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss.dtype, loss.device
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        dtype, device = ctx.like
        return grad_output, torch.ones((), dtype=dtype, device=device)


def with_loss(x: Tensor, loss: Tensor) -> Tensor:
    """`x`, unchanged; its backward runs `loss`'s (a scalar) too, as if the loss had been added to the model's."""
    return _WithLoss.apply(x, loss)


class _Logits(torch.autograd.Function):
    """x W^T in FP32 or FP64. Keeps x in its own dtype; the weight's gradient is added as a linear's is."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, dtype: torch.dtype, step: StepContext) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.dtype, ctx.step = weight, dtype, step
        return x.to(dtype) @ weight.to(dtype).t()

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        (x,) = ctx.saved_tensors
        weight, sink = ctx.weight, ctx.step.grads
        dx = (grad_output @ weight.to(ctx.dtype)).to(x.dtype)
        dw = grad_output.t() @ x.to(ctx.dtype)
        if sink is None:
            return dx, dw.to(weight.dtype), None, None
        sink.buffer(weight).add_(dw)
        sink.ready(weight)
        return dx, None, None, None
