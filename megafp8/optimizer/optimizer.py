"""Optimizer: FP32 masters and moments of all trained parameters, and the step that moves them.

A step: gradient norm, clip coefficient and skip flag as device scalars -> one AdamW update a buffer segment -> the
new weights, rounded from the masters. The host waits for nothing. Every data-parallel rank holds all masters of its
model part, or with --use-distributed-optimizer (ZeRO-1) its shards of them; the step is the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megafp8.config import Config
from megafp8.fp8.param import Weight
from megafp8.optimizer.adamw import step_scalars
from megafp8.optimizer.buffers import GradBuffers, entry_of, launch_order
from megafp8.optimizer.codecs import key_of
from megafp8.optimizer.groups import check_patterns, default_groups, groups_of, precision_of, rates_of
from megafp8.optimizer.layout import Bucket, BufferLayout, Entry, Group, Shard
from megafp8.optimizer.norm import Measure, clip_coefficient
from megafp8.optimizer.precision import FP32_STATE, Precision
from megafp8.optimizer.primary import FlatPrimary
from megafp8.optimizer.sharding import REPLICATED, Sharding
from megafp8.optimizer.shards import ShardState
from megafp8.optimizer.stages import StageNames
from megafp8.optimizer.stored import Masters, Moments
from megafp8.optimizer.update import BufferUpdate
from megafp8.optimizer.weights import FlatWeights, ModelWeights, publish
from megafp8.parallel import ParallelContext
from megafp8.params import InitialValues, ParamSpec, StateItem, initial_value
from megafp8.step import ScalingHistory

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
        groups: Mapping[str, Group] | None = None,
        precisions: Mapping[str, Precision] | None = None,
        parallel: ParallelContext | None = None,
        sharding: Sharding = REPLICATED,
        scaling: ScalingHistory | None = None,
        initial: InitialValues = initial_value,
        fused: bool = True,
    ):
        """See `build_optimizer`.

        Args:
            params: in the order in which the model uses them, where gradients are to be reduced during backward.
            seed: of initial values, and of the random bits that state below FP32 is rounded with.
            groups: by global name; None: decay as the specs say. precisions: of those whose state isn't all FP32.
            scaling: delayed scaling's history, for FP8 primary weights.
            initial: what masters start from.
            fused: on a GPU, with kernels; without, the same bits by PyTorch's operations.

        """
        self.parallel = parallel or ParallelContext()
        self.weights = ModelWeights(params)
        self.options, self._initial = options, initial
        trained = {name: param for name, param in self.weights.params.items() if param.requires_grad}
        if not trained:
            raise ValueError("no parameter requires a gradient: there is nothing to optimize")
        self._specs = {name: self.weights.specs[name] for name in sorted(trained)}
        self._stages = StageNames.of(self._specs, self.parallel.pp)
        self._groups = default_groups(self._specs) | {n: g for n, g in (groups or {}).items() if n in self._specs}
        self._group_order = sorted(set(self._groups.values()))
        self._precisions = precisions or {}
        self._device = next(iter(trained.values())).device
        self._primary = {name for name, param in trained.items() if sharding.fp8_primary and _is_fp8(param)}
        self.layouts: tuple[BufferLayout, ...] = sharding.plan(self._entries(trained), self.parallel)
        axes = [self.parallel.edp if layout.expert else self.parallel.dp_cp for layout in self.layouts]
        self.shards = tuple(
            Shard(layout, axis.rank if layout.shards > 1 else 0)
            for layout, axis in zip(self.layouts, axes, strict=True)
        )
        shapes = {name: tuple(param.shape) for name, param in trained.items()}
        self.masters, self.exp_avg, self.exp_avg_sq = self._zero_state(shapes)
        self._flat_weights = [
            FlatPrimary(trained, shard, axis, scaling) if self._holds_fp8(shard) else FlatWeights(trained, shard, axis)
            for shard, axis in zip(self.shards, axes, strict=True)
        ]
        self._seed_masters(seed)
        self._updates = self._build_updates(seed, fused)
        self.grads = GradBuffers(trained, self.shards, self._device, sharding.reduction(self.parallel))
        counted_before = self._stages.counted_before
        self._measure = Measure(self.shards, self._specs, self.parallel, self._device, counted_before, fused=fused)
        self._overlaps_gather = False
        self.step_count = torch.zeros((), dtype=torch.int64, device=self._device)
        self.skipped_count = torch.zeros((), dtype=torch.int64, device=self._device)
        if self._primary:
            self.weights.primary = self._primary_items
        if self._primary or any(layout.precision.master != "fp32" for layout in self.layouts):
            self.write_weights()

    def _entries(self, trained: Mapping[str, nn.Parameter]) -> Iterator[Entry]:
        """Gradients get ready in the opposite order of use."""
        for order, (name, param) in enumerate(reversed(trained.items())):
            spec = self._specs[name]
            partial = bool(spec.grad_sum_over) or name in self._stages.shared
            dtype = param.owner.recipe.quantizer("weight").spec.format.dtype if name in self._primary else param.dtype
            entry = entry_of(spec, param, self._groups[name], dtype=dtype, partial=partial, order=order)
            yield replace(entry, precision=self._precisions.get(name, FP32_STATE))

    def _holds_fp8(self, shard: Shard) -> bool:
        return any(slot.name in self._primary for slot in shard.layout.slots)

    def _zero_state(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Masters, Moments, Moments]:
        precisions = [layout.precision for layout in self.layouts]
        rest = (self.shards, shapes, self._device)
        return (
            Masters([p.master for p in precisions], *rest),
            Moments([p.exp_avg for p in precisions], *rest, root=False),
            Moments([p.exp_avg_sq for p in precisions], *rest, root=True),
        )

    def _seed_masters(self, seed: int) -> None:
        """From `initial_value`, a parameter at a time; a rank draws only those that it holds some of."""
        self.masters.attach([w.shard.parts(w.flat) if isinstance(w, FlatWeights) else [] for w in self._flat_weights])
        masters = self.masters.blank()
        for piece, master in masters.pieces():
            value = self._initial(self._specs[piece.name], seed)
            master.copy_(value.view(-1)[piece.start : piece.stop])
        self.masters.assign(masters)

    def _build_updates(self, seed: int, fused: bool) -> list[BufferUpdate]:
        rows = {name: self._group_order.index(group) for name, group in self._groups.items()}
        keys = {name: key_of(seed, f"{name}{[a for a, _ in spec.box]}") for name, spec in self._specs.items()}
        states = (self.masters.stored, self.exp_avg.stored, self.exp_avg_sq.stored)
        return [
            BufferUpdate(shard, rows, keys, *state, weights, fused=fused)
            for shard, *state, weights in zip(self.shards, *states, self._flat_weights, strict=True)
        ]

    @property
    def all_names(self) -> tuple[str, ...]:
        """Global names of the trained parameters of all pipeline stages."""
        return self._stages.names

    def groups(self) -> dict[str, Group]:
        """Global name -> group, in the order of names."""
        return dict(self._groups)

    def zero_grad(self, microbatches: int | None = None) -> None:
        """Call before the first microbatch of a step; their number lets reductions overlap with the last backward."""
        self.grads.zero(microbatches)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Sums the gradients over the ranks that each have a part; call once, after the last microbatch of a step."""
        self.grads.settle()
        self._stages.sum_shared(self.grads.state.views)
        self.grads.sum_partial(self._specs, "tp", self.parallel.tp)
        self.grads.finish()

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
        bad = None if loss is None else ~torch.isfinite(loss.to(self._device)) & (valid > 0)
        parts = self.grads.parts()
        norm, nan, zeros = self._measure.measure(parts, bad, count_zeros=with_num_zeros)  # all ranks skip, or none
        norm = norm / divisor
        grad_scale = clip_coefficient(norm, self.options.clip_grad) / divisor
        self.step_count += ~nan
        self.skipped_count += nan
        self.weights.arrivals.wait_all()  # what is still on its way must not arrive later
        self._update(lr, lr if decoupled_lr is None else decoupled_lr, weight_decay, grad_scale, skip=nan)
        self._gather_weights()
        return StepStats(
            grad_norm=norm,
            nan=nan,
            skipped=nan.clone(),
            num_zeros=zeros,
            params_norm=self.params_norm() if with_params_norm else None,
        )

    def hold_in_fp8(self, name: str, only: bool) -> bool:
        """For an FP8 primary weight: from the next `write_weights` on a copy in the compute dtype is there as well, or
        (`only`) no longer. Between steps; then the linear changes its recipe. False for other weights."""
        for weights in self._flat_weights:
            if isinstance(weights, FlatPrimary) and name in weights.weights:
                if only:
                    weights.drop_copy(name, self.weights.params[name].owner)
                else:
                    weights.hold_copy(name)
                return True
        return False

    @torch.no_grad()
    def write_weights(self) -> None:
        """Writes the weights from the masters, on all ranks together."""
        self.weights.arrivals.wait_all()
        for update in self._updates:
            update.write_weights()
        self._gather_weights()

    def _gather_weights(self) -> None:
        """Brings the other ranks' shards of the weights, and announces all of them."""
        for update in self._updates:
            if isinstance(update.weights, FlatPrimary):
                update.weights.write_copies(update.master)
        for number, bucket in reversed(launch_order(self.layouts)):  # what the next forward needs first goes first
            pending = self._flat_weights[number].post_gather(bucket)
            self.weights.arrivals.expect(self._names_in(number, bucket), pending, self.weights.params)
        if not self._overlaps_gather:
            self.weights.arrivals.wait_all()
        publish(param for weights in self._flat_weights for param in weights.params)

    def wait_before_use(self, model: nn.Module) -> None:
        """Lets the gather of weights overlap with the next forward: each module of `model` waits for its own."""
        self.weights.arrivals.wait_before_use(model)
        self._overlaps_gather = True

    def _names_in(self, number: int, bucket: Bucket) -> list[str]:
        return [s.name for s in self.layouts[number].slots if bucket.start <= s.start < s.stop <= bucket.stop]

    def _scalar(self, value: Tensor | int) -> Tensor:
        """As FP64 on the device; a number is filled in there, since a copy would wait for the device."""
        if isinstance(value, Tensor):
            return value.to(self._device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=self._device)

    def params_norm(self) -> Tensor:
        """FP64 scalar: L2 norm of the masters."""
        return self._measure.norm(self.masters.values().parts())[0]

    def _update(self, lr: float, decoupled_lr: float, weight_decay: float, grad_scale: Tensor, *, skip: Tensor) -> None:
        o = self.options
        rates = [
            rates_of(group, lr=lr, decoupled_lr=decoupled_lr, weight_decay=weight_decay) for group in self._group_order
        ]
        scalars = step_scalars(self.step_count, grad_scale, skip, rates, beta1=o.beta1, beta2=o.beta2)
        for update, grads in zip(self._updates, self.grads.state.flats, strict=True):
            update(grads, scalars, beta1=o.beta1, beta2=o.beta2, eps=o.eps)

    def state(self) -> dict[str, StateItem]:
        """This rank's masters and moments (FP32, without vocabulary padding) and counts.

        Views, but copies where less than FP32 is stored.
        """
        items = {}
        for kind, held in self._held().items():
            items |= held.state(f"{PREFIX}{kind}/", self._specs, self._stages.counted_before)
        items[PREFIX + "step"] = StateItem.whole(self.step_count)
        items[PREFIX + "skipped_steps"] = StateItem.whole(self.skipped_count)
        return items

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes what `state()` gave (FP32; KeyError when one is missing) and writes the weights from the masters."""
        for kind, held in self._held().items():
            values = held.values()
            for key, item in values.state(f"{PREFIX}{kind}/", self._specs).items():
                item.tensor.copy_(tensors[key])
            held.assign(values)
        self.step_count.copy_(tensors[PREFIX + "step"])
        self.skipped_count.copy_(tensors[PREFIX + "skipped_steps"])
        self.write_weights()

    @torch.no_grad()
    def reset_from_weights(self) -> None:
        """Starts afresh from weights that were loaded alone: masters are the weights, moments and counts zero."""
        masters = self.masters.values()
        for piece, master in masters.pieces():
            if piece.name not in self._primary:  # those were loaded into their masters
                master.copy_(self.weights.high_precision(piece.name).reshape(-1)[piece.start : piece.stop])
        self.masters.assign(masters)
        for values in (self.exp_avg, self.exp_avg_sq):
            values.zero()
        self.step_count.zero_()
        self.skipped_count.zero_()
        self.write_weights()

    def _primary_items(self) -> dict[str, StateItem]:
        """The masters of FP8 primary weights, which have no other high-precision value; views."""
        specs = {name: self._specs[name] for name in sorted(self._primary)}
        return self.masters.state("", specs, self._stages.counted_before)

    def gradients(self) -> dict[str, StateItem]:
        """Global name -> this rank's shards of the reduced gradients (copies), as `state()` gives masters."""
        copies = ShardState(
            self.shards, {name: tuple(self._specs[name].local_shape) for name in self._specs}, self._device
        )
        for mine, theirs in zip(copies.parts(), self.grads.parts(), strict=True):
            for a, b in zip(mine, theirs, strict=True):
                a.copy_(b)
        return copies.state("", self._specs)

    def _held(self) -> dict[str, Masters | Moments]:
        return {"master": self.masters, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}


def _is_fp8(param: nn.Parameter) -> bool:
    """Whether it is the weight of a linear that runs in FP8."""
    owner = getattr(param, "owner", None)
    return isinstance(owner, Weight) and owner.recipe is not None


def build_optimizer(
    params: Iterable[tuple[ParamSpec, nn.Parameter]],
    config: Config,
    parallel: ParallelContext,
    *,
    decoupled: frozenset[str] = frozenset(),
    scaling: ScalingHistory | None = None,
    initial: InitialValues = initial_value,
) -> Optimizer:
    """The optimizer of a model's parameters; masters start from `initial`, never from a rounded weight.

    Args:
        params: every parameter of the model, in the order of their use; those that require no gradient are only saved
            and loaded.
        decoupled: global names of the parameters that follow --decoupled-lr.
        scaling: delayed scaling's history, if the model has one.

    """
    o = config.optimizer
    options = AdamWOptions(beta1=o.adam_beta1, beta2=o.adam_beta2, eps=o.adam_eps, clip_grad=o.clip_grad)
    params = list(params)
    specs = {spec.name: spec for spec, _ in params}
    optimizer = Optimizer(
        params,
        options,
        seed=config.train.seed,
        groups=groups_of(specs, config, decoupled),
        precisions={name: precision_of(name, spec.shape, config) for name, spec in specs.items()},
        parallel=parallel,
        sharding=Sharding.of(config),
        scaling=scaling,
        initial=initial,
    )
    if parallel.ep.size == 1:  # else other ranks' experts have other names
        check_patterns(optimizer.all_names, config)
    return optimizer
