"""The router: a small linear in FP32, the choice of experts, and losses that keep their load even.

The auxiliary losses don't show in the model's loss; their gradients do. Each is a mean over the microbatch's tokens,
times their number, as the model's loss is a sum over tokens that the optimizer divides. Context-parallel ranks have
parts of the microbatch's tokens: the counts of the losses are summed over them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megafp8.core.build import BuildContext
from megafp8.core.moe.balancing import balance_loss, balance_scores, global_balance_loss, z_loss
from megafp8.core.moe.capacity import Capacity, drop
from megafp8.core.moe.logits import Logits
from megafp8.core.moe.routing import RoutingRule, choose, choose_sinkhorn, count_tokens, dealt_out
from megafp8.core.tensor_parallel.mappings import gather_tokens
from megafp8.core.tensor_parallel.specs import replicated
from megafp8.core.transformer.core_attention import Sequences
from megafp8.parallel import Axis
from megafp8.params import Init, attach_spec
from megafp8.step import Statistics, StepContext


@dataclass(frozen=True)
class Routing:
    """experts: int64 [T, k], best first; the number of experts, E, is a choice that was dropped. weights: FP32 [T, k].

    drops: choices may be dropped. capacity: rows that every expert is filled up to; None: as many as chose it.
    """

    experts: Tensor
    weights: Tensor
    drops: bool = False
    capacity: int | None = None


class Router(nn.Module):
    """name: global name, e.g. "layers.3.mlp.router".

    expert_bias: FP32 [E], seen by selection only; None without `--moe-router-enable-expert-bias`.
    shares: FP32 [E], which part of the last step's choices each expert was, over the global batch; None without the
    global auxiliary loss. Training moves both once a step (`end_step`).
    tokens: ranks that each have a part of the tokens: their logits are gathered, so that all tokens are chosen for, and
    losses taken, as on one rank; then each rank goes on with its own.
    """

    def __init__(self, name: str, build: BuildContext, *, tokens: Axis | None = None) -> None:
        super().__init__()
        model = build.model
        self.name, self.rule, self.num_experts = name, RoutingRule.of(model), model.num_experts
        self.dtype = torch.float64 if model.moe_router_dtype == "fp64" else torch.float32
        self.balancing, self.z_coefficient = model.balancing_losses, model.moe_z_loss_coeff
        self.sinkhorn = "sinkhorn" in model.moe_router_load_balancing_type
        self.forced, self.capacity = model.moe_router_force_load_balancing, Capacity.of(model)
        self.update_rate, self.by_layer = model.moe_router_bias_update_rate, model.moe_per_layer_logging
        self.ranks, self.tokens = build.parallel.cp, tokens or Axis()
        shape = (model.num_experts, model.hidden_size)
        init, part = Init("normal", model.init_method_std), self.tokens.size > 1
        spec = replicated(f"{name}.weight", shape, init, decay=True, gradient_is_part=part)
        self.weight = attach_spec(nn.Parameter(torch.empty(shape, dtype=build.dtype, device=build.device)), spec)
        even = torch.full((model.num_experts,), 1 / model.num_experts, device=build.device)
        bias = torch.zeros_like(even) if model.moe_router_enable_expert_bias else None
        self.register_buffer("expert_bias", bias, persistent=False)
        self.register_buffer("shares", even if "global_aux_loss" in self.balancing else None, persistent=False)

    def forward(self, x: Tensor, sequences: Sequences, step: StepContext) -> Routing:
        """x: [T, hidden]."""
        logits = gather_tokens(Logits.apply(x, self.weight, self.dtype, step), self.tokens)
        routing = self._route(logits, sequences, step)
        if self.tokens.size == 1:
            return routing
        own = slice(*self.tokens.split(len(logits)))
        return replace(routing, experts=routing.experts[own], weights=routing.weights[own])

    def _route(self, logits: Tensor, sequences: Sequences, step: StepContext) -> Routing:
        experts, weights = self._choose(logits, step)
        self._count(self.load_name, experts, step)
        weights = self._with_losses(weights.float(), logits, sequences.batch, step)
        if self.capacity is None:
            return Routing(experts, weights)
        rows = self.capacity.rows(*experts.shape, self.num_experts)
        kept = drop(experts, weights, self.num_experts, rows, by_position=self.capacity.by_position)
        if step.records and step.statistics is not None:
            step.statistics.add_mean("dropped_share", (kept == self.num_experts).sum(), kept.numel())
        return Routing(kept, weights, drops=True, capacity=rows if self.capacity.fill else None)

    def _choose(self, logits: Tensor, step: StepContext) -> tuple[Tensor, Tensor]:
        if self.forced:
            experts = dealt_out(len(logits), self.rule.topk, self.num_experts, logits.device)
            return choose(logits, self.rule, experts=experts)
        if self.sinkhorn:
            return choose_sinkhorn(logits, self.rule.topk, training=step.training)
        return choose(logits, self.rule, self.expert_bias)

    @property
    def load_name(self) -> str:
        """Under which statistic the tokens of each expert are counted, before any are dropped."""
        return f"{self.name}/load"

    @property
    def balance_name(self) -> str:
        """The same of the choices that auxiliary losses count."""
        return f"{self.name}/balance"

    def _count(self, name: str, experts: Tensor, step: StepContext) -> None:
        if step.records and step.statistics is not None:
            step.statistics.add(name, count_tokens(experts, self.num_experts))

    def _with_losses(self, weights: Tensor, logits: Tensor, batch: int, step: StepContext) -> Tensor:
        """`weights`, whose backward also runs that of the auxiliary losses."""
        if not torch.is_grad_enabled() or not step.training or not len(logits):
            return weights
        tokens = len(logits)
        for name, coefficient, loss in self._losses(logits, batch, step):
            self._report(name, loss, tokens, step)
            weights = with_loss(weights, loss * coefficient)
        return weights

    def _losses(self, logits: Tensor, batch: int, step: StepContext) -> Iterator[tuple[str, float, Tensor]]:
        """(name in the log, coefficient, loss times the tokens that it is a mean of), of this rank's tokens."""
        tokens = len(logits)
        if self.balancing:
            scores, chosen = balance_scores(logits, self.rule)
        for kind, coefficient in self.balancing.items():
            if kind == "global_aux_loss":
                self._count(self.balance_name, chosen, step)
                loss = global_balance_loss(scores, self.shares) * tokens
            else:
                sequences = batch if kind == "seq_aux_loss" else 1
                loss = balance_loss(scores, chosen, sequences, self.ranks) * (tokens * self.ranks.size)
            yield kind if len(self.balancing) > 1 else "aux_loss", coefficient, loss
        if self.z_coefficient:
            yield "z_loss", self.z_coefficient, z_loss(logits) * tokens

    def _report(self, name: str, total: Tensor, tokens: int, step: StepContext) -> None:
        if step.records and step.statistics is not None:
            step.statistics.add_mean(name, total, tokens)
            if self.by_layer:
                step.statistics.add_mean(f"{name}/{self.layer_name}", total, tokens)

    @property
    def layer_name(self) -> str:
        """Of the mixture that the router belongs to, for the log, e.g. "layers.3.mlp"."""
        return self.name.removesuffix(".router")

    def end_step(self, statistics: Statistics) -> None:
        """Once a step, with counts over the global batch: moves each expert's bias towards the mean load."""
        if self.expert_bias is not None:
            load = statistics.sums[self.load_name].double()
            self.expert_bias += self.update_rate * torch.sign(load.mean() - load).float()
        if self.shares is not None:
            counts = statistics.sums[self.balance_name].double()
            self.shares.copy_(counts / counts.sum())


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
