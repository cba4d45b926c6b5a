"""Optimizer: FP32 masters and moments of all trained parameters, and the step that moves them.

A step: gradient norm, clip coefficient and skip flag as device scalars -> one AdamW update a buffer segment -> the
new weights, rounded from the masters. The host waits for nothing. Every data-parallel rank holds all masters of its
model part and makes the same step from the same reduced gradients; sharding cuts the flat buffers and leaves the rest
as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megafp8.config import Config
from megafp8.optimizer.adamw import adamw_, step_scalars
from megafp8.optimizer.buffers import BufferLayout, FlatState, GradBuffers, Group, entry_of, plan_layouts
from megafp8.optimizer.norm import clip_coefficient, l2_norm, num_zeros
from megafp8.optimizer.stages import StageNames
from megafp8.optimizer.weights import ModelWeights
from megafp8.parallel import ParallelContext
from megafp8.params import ParamSpec, StateItem, initial_value, unpadded

PREFIX = "optimizer/"
"""Global names of the optimizer's state: `optimizer/{master,exp_avg,exp_avg_sq}/<parameter>`, `optimizer/step`."""


@dataclass(frozen=True)
class StepStats:
    """What one step found; device scalars, read by whoever logs them.

    grad_norm: FP64, L2 norm of the mean gradient before clipping. nan: bool, loss or gradient norm not finite.
    skipped: bool, the update was left out. num_zeros: int64, gradient elements that are exactly 0; params_norm: FP64,
    L2 norm of the masters after the step; both None unless asked for.
    """

    grad_norm: Tensor
    nan: Tensor
    skipped: Tensor
    num_zeros: Tensor | None = None
    params_norm: Tensor | None = None


@dataclass(frozen=True)
class AdamWOptions:
    """Constants of the update; `clip_grad` 0 turns clipping off."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip_grad: float = 1.0


class Optimizer:
    """Owns masters, moments, gradient buffers and the step count. Made by `build_optimizer`."""

    def __init__(
        self,
        params: Iterable[tuple[ParamSpec, nn.Parameter]],
        options: AdamWOptions,
        *,
        seed: int,
        decoupled: frozenset[str] = frozenset(),
        parallel: ParallelContext | None = None,
    ):
        self.parallel = parallel or ParallelContext()
        self.weights = ModelWeights(params)
        self.options = options
        trained = {name: param for name, param in self.weights.params.items() if param.requires_grad}
        if not trained:
            raise ValueError("no parameter requires a gradient: there is nothing to optimize")
        self._specs = {name: self.weights.specs[name] for name in sorted(trained)}
        self._stages = StageNames.of(self._specs, self.parallel.pp)
        self._groups = {name: Group(spec.decay, name in decoupled) for name, spec in self._specs.items()}
        self._device = next(iter(trained.values())).device
        self.layouts: tuple[BufferLayout, ...] = plan_layouts(
            entry_of(spec, trained[name], self._groups[name]) for name, spec in self._specs.items()
        )
        self.grads = GradBuffers(trained, self.layouts, self._device)
        shapes = {name: tuple(param.shape) for name, param in trained.items()}
        self.masters, self.exp_avg, self.exp_avg_sq = (
            FlatState(self.layouts, shapes, self._device) for _ in ("master", "exp_avg", "exp_avg_sq")
        )
        self.step_count = torch.zeros((), dtype=torch.int64, device=self._device)
        self.skipped_count = torch.zeros((), dtype=torch.int64, device=self._device)
        for name, spec in self._specs.items():
            self.masters.views[name].copy_(initial_value(spec, seed))

    def groups(self) -> dict[str, Group]:
        """Global name -> group, in the order of names."""
        return dict(self._groups)

    def zero_grad(self) -> None:
        """Call before the first microbatch of a step."""
        self.grads.zero()

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sums the gradients over the ranks that each have a part; call once, after the last microbatch of a step."""
        self._stages.sum_shared(self.grads.state.views)
        self.grads.sum_partial(self._specs, "tp", self.parallel.tp)
        self.grads.sum_replicas(self.parallel.dp_cp, self.parallel.edp)

    @torch.no_grad()
    def step(
        self,
        *,
        lr: float,
        weight_decay: float,
        valid_tokens: Tensor | int,
        loss: Tensor | None = None,
        decoupled_lr: float | None = None,
        with_num_zeros: bool = False,
        with_params_norm: bool = False,
    ) -> StepStats:
        """Updates masters, moments and weights from the gradients in the buffers, which stay until `zero_grad()`.

        Args:
            lr, decoupled_lr: this step's rates, of all parameters and of embedding and LM head (None: as the others).
            weight_decay: decoupled decay of the parameters whose spec asks for it.
            valid_tokens: of the whole global batch; gradients are of the sum of its token losses and are divided by
                it. A step without a valid token has zero gradients: only decay and the old moments move the masters.
            loss: the step's loss; not finite, it skips the step like a gradient norm that is not finite (unless
                there is no valid token, where a mean is NaN by nature). A skipped step leaves weights, masters,
                moments and the step count as they are, bit for bit; the learning rate, a function of the
                consumed samples, moves on.
        """
        valid = self._scalar(valid_tokens)
        divisor = valid.clamp(min=1)
        norm = l2_norm(self.grads.state.views, self._specs, self.parallel.tp, self._stages) / divisor
        nan = ~torch.isfinite(norm)
        if loss is not None:
            nan |= ~torch.isfinite(loss.to(self._device)) & (valid > 0)
        nan = self.parallel.everyone.max_(nan.int()).bool()  # all ranks skip, or none
        grad_scale = clip_coefficient(norm, self.options.clip_grad) / divisor
        self.step_count += ~nan
        self.skipped_count += nan
        self._update(lr, lr if decoupled_lr is None else decoupled_lr, weight_decay, grad_scale, skip=nan)
        self.weights.write(self.masters.views)
        return StepStats(
            grad_norm=norm,
            nan=nan,
            skipped=nan.clone(),
            num_zeros=self._num_zeros() if with_num_zeros else None,
            params_norm=self.params_norm() if with_params_norm else None,
        )

    def _scalar(self, value: Tensor | int) -> Tensor:
        """As FP64 on the device; a number is filled in there, since a copy would wait for the device."""
        if isinstance(value, Tensor):
            return value.to(self._device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=self._device)

    def params_norm(self) -> Tensor:
        """FP64 scalar: L2 norm of the masters."""
        return l2_norm(self.masters.views, self._specs, self.parallel.tp, self._stages)

    def _num_zeros(self) -> Tensor:
        return num_zeros(self.grads.state.views, self._specs, self.parallel.tp, self._stages)

    def _update(self, lr: float, decoupled_lr: float, weight_decay: float, grad_scale: Tensor, *, skip: Tensor) -> None:
        o = self.options
        scalars = step_scalars(self.step_count, grad_scale, skip, beta1=o.beta1, beta2=o.beta2)
        state = (self.masters, self.exp_avg, self.exp_avg_sq, self.grads.state)
        for layout, *flats in zip(self.layouts, *(s.flats for s in state), strict=True):
            for group, start, stop in layout.segments:
                adamw_(
                    *(flat[start:stop] for flat in flats),
                    scalars,
                    lr=decoupled_lr if group.decoupled else lr,
                    weight_decay=weight_decay if group.decay else 0.0,
                    beta1=o.beta1,
                    beta2=o.beta2,
                    eps=o.eps,
                )

    def state(self) -> dict[str, StateItem]:
        """Masters and moments (FP32, without vocabulary padding) and counts; the tensors are views, not copies."""
        items = {
            f"{PREFIX}{kind}/{name}": StateItem(unpadded(values.views[name], spec), spec.shape, spec.box)
            for kind, values in self._flat_states().items()
            for name, spec in self._specs.items()
        }
        items[PREFIX + "step"] = StateItem.whole(self.step_count)
        items[PREFIX + "skipped_steps"] = StateItem.whole(self.skipped_count)
        return items

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes what `state()` gave (FP32; KeyError when one is missing) and writes the weights from the masters."""
        for key, item in self.state().items():
            item.tensor.copy_(tensors[key])
        self.weights.write(self.masters.views)

    @torch.no_grad()
    def reset_from_weights(self) -> None:
        """Starts afresh from weights that were loaded alone: masters are the weights, moments and counts zero."""
        for name, master in self.masters.views.items():
            master.copy_(self.weights.high_precision(name))
        for values in (self.exp_avg, self.exp_avg_sq):
            values.zero()
        self.step_count.zero_()
        self.skipped_count.zero_()

    def _flat_states(self) -> dict[str, FlatState]:
        return {"master": self.masters, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


def build_optimizer(
    params: Iterable[tuple[ParamSpec, nn.Parameter]],
    config: Config,
    parallel: ParallelContext,
    *,
    decoupled: frozenset[str] = frozenset(),
) -> Optimizer:
    """The optimizer of `named_specs(model)`; masters start from `initial_value`, never from a rounded weight.

    Args:
        params: every parameter of the model; those that require no gradient are only saved and loaded.
        decoupled: global names of the parameters that follow --decoupled-lr.

    """
    o = config.optimizer
    options = AdamWOptions(beta1=o.adam_beta1, beta2=o.adam_beta2, eps=o.adam_eps, clip_grad=o.clip_grad)
    return Optimizer(params, options, seed=config.train.seed, decoupled=decoupled, parallel=parallel)
