"""The model's weights as the optimizer and checkpoints write them.

Trained weights are views of flat buffers, laid out as their gradients: a step rounds this rank's shards of the masters
into them, and gathers the others' in place. A weight that `fp8` owns (`param.owner`, an `fp8.param.Weight`) is then
announced with `publish()`, which drops every derived FP8 copy. Loads write whole parameters and announce them alike, so
no path can leave a stale copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from megafp8.fp8.param import Weight, share_amaxes
from megafp8.optimizer.layout import Bucket, Shard
from megafp8.parallel import Axis, Pending
from megafp8.params import ParamSpec, StateItem, name_of, spec_of, unpadded

PREFIX = "model/"
"""Global names of weights in a checkpoint: `model/<parameter>`."""
MASTERS = "optimizer/master/"
"""And of the optimizer's masters."""


class ModelWeights:
    """All parameters of a model, frozen ones too, under their global names.

    primary: gives the masters of FP8 primary weights, from which those are written, under global names.
    """

    def __init__(self, params: Iterable[tuple[ParamSpec, nn.Parameter]]):
        pairs = list(params)
        self.params: dict[str, nn.Parameter] = {spec.name: param for spec, param in pairs}
        self.specs: dict[str, ParamSpec] = {spec.name: spec for spec, _ in pairs}
        assert len(self.params) == len(pairs), "two parameters share a global name"
        self.arrivals = Arrivals()
        self.primary: Callable[[], dict[str, StateItem]] = dict

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Writes FP32 values in the parameters' local shapes, then publishes them together."""
        self.arrivals.wait_all()
        for name, value in values.items():
            owner = getattr(self.params[name], "owner", None)
            if owner is None:
                self.params[name].copy_(value)
            else:
                owner.write_shard(value)
        publish(self.params[name] for name in values)

    def high_precision(self, name: str) -> Tensor:
        """The parameter's value in its compute dtype and local shape, not to be written to."""
        return self.params[name].detach()

    def state(self) -> dict[str, StateItem]:
        """Weights in their compute dtype (BF16 or FP32, whatever the recipe), without vocabulary padding.

        Of FP8 primary weights that is this rank's shards of their masters, rounded: copies.
        """
        self.arrivals.wait_all()
        primary = self.primary()
        rounded = {
            PREFIX + key: replace(item, tensor=item.tensor.to(self.params[name_of(key)].dtype))
            for key, item in primary.items()
        }
        return rounded | {
            PREFIX + name: StateItem(unpadded(self.high_precision(name), spec), spec.shape, spec.box)
            for name, spec in self.specs.items()
            if name not in primary
        }

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes `state()`'s tensors; KeyError when one is missing. Padding rows become zero.

        FP8 primary weights are loaded into their masters; the optimizer's load or reset, which follows, writes them.
        """
        values, primary = {}, self.primary()
        for key, item in primary.items():
            if MASTERS + key not in tensors:  # an exact master was loaded in place
                item.tensor.copy_(tensors[PREFIX + key])
        for name, spec in self.specs.items():
            if name not in primary:
                param = self.params[name]
                values[name] = torch.zeros(spec.local_shape, dtype=param.dtype, device=param.device)
                unpadded(values[name], spec).copy_(tensors[PREFIX + name])
        self.write(values)


def publish(params: Iterable[nn.Parameter]) -> None:
    """Announces that the parameters were written: their owners drop what they derived from them."""
    owners = [param.owner for param in params if getattr(param, "owner", None) is not None]
    for owner in owners:
        owner.publish()
    share_amaxes(owner for owner in owners if isinstance(owner, Weight))


class Arrival:
    """Weights that are on their way from other ranks, until somebody waits for them."""

    def __init__(self, pending: Pending):
        self._pending: Pending | None = pending

    def wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None


class Arrivals:
    """The weights that may not be read yet, by global name."""

    def __init__(self) -> None:
        self._of: dict[str, Arrival] = {}

    def expect(self, names: Iterable[str], pending: Pending, params: Mapping[str, nn.Parameter]) -> None:
        """Their owners, if any, wait before they derive anything; others are waited for by name."""
        arrival = Arrival(pending)
        for name in names:
            self._of[name] = arrival
            owner = getattr(params[name], "owner", None)
            if isinstance(owner, Weight):
                owner.arrival = arrival

    def wait(self, names: Iterable[str]) -> None:
        for name in names:
            arrival = self._of.pop(name, None)
            if arrival is not None:
                arrival.wait()

    def wait_all(self) -> None:
        self.wait(list(self._of))

    def wait_before_use(self, model: nn.Module) -> None:
        """From now on every module waits for its own weights when it is called, in whatever order that happens."""
        for module in model.modules():
            names = [spec_of(param).name for param in module.parameters(recurse=False)]
            if names:
                module.register_forward_pre_hook(lambda module, args, names=names: self.wait(names))


class FlatWeights:
    """The high-precision weights of one flat buffer: the parameters become views of it.

    axis: the ranks that share the buffer's buckets.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], shard: Shard, axis: Axis):
        self.shard, self.axis = shard, axis
        first = next(iter(params.values()))
        self.flat = torch.zeros(shard.layout.numel, dtype=shard.layout.dtype, device=first.device)
        self.params = [params[slot.name] for slot in shard.layout.slots]
        with torch.no_grad():
            for slot, param in zip(shard.layout.slots, self.params, strict=True):
                view = self.flat[slot.start : slot.stop].view(param.shape)
                param.data = view.copy_(param)

    @torch.no_grad()
    def write(self, masters: Tensor) -> None:
        """Rounds this rank's shards of the masters (flat) into the buffer."""
        for run in self.shard.ranges:
            self.flat[run.start : run.stop].copy_(masters[run.local : run.local + run.stop - run.start])
        self.announce()

    def announce(self) -> None:
        """Call it after writing to the buffer, which doesn't count as writing to a view of it."""
        for param in self.params:
            torch.autograd.graph.increment_version(param)

    def tiles(self, name: str) -> dict[str, int]:
        """What an update needs to know of the tiles of a weight: nothing, there are none."""
        return {}

    def post_gather(self, bucket: Bucket) -> Pending:
        """Starts to gather the other ranks' shards of a bucket."""
        own = self.flat[self.shard.layout.share(bucket, self.shard.rank)]
        axis = self.axis if self.shard.layout.shards > 1 and bucket.start < bucket.stop else Axis()
        return axis.post_gather_into(self.flat[bucket.start : bucket.stop], own)
