"""The model's weights as the optimizer and checkpoints write them.

A weight that `fp8` owns (`param.owner`, an `fp8.param.Weight`) is written with `write_shard()` and announced with
`publish()`, which drops every derived FP8 copy; any other parameter is overwritten in place, rounded to its dtype.
Steps and loads both write here, so no path can leave a stale copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from megafp8.fp8.param import Weight, share_amaxes
from megafp8.params import ParamSpec, StateItem, unpadded

PREFIX = "model/"
"""Global names of weights in a checkpoint: `model/<parameter>`."""


class ModelWeights:
    """All parameters of a model, frozen ones too, under their global names."""

    def __init__(self, params: Iterable[tuple[ParamSpec, nn.Parameter]]):
        pairs = list(params)
        self.params: dict[str, nn.Parameter] = {spec.name: param for spec, param in pairs}
        self.specs: dict[str, ParamSpec] = {spec.name: spec for spec, _ in pairs}
        assert len(self.params) == len(pairs), "two parameters share a global name"

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Writes FP32 values in the parameters' local shapes, then publishes them together."""
        owners = []
        for name, value in values.items():
            param = self.params[name]
            owner = getattr(param, "owner", None)
            if owner is None:
                param.copy_(value)
            else:
                owner.write_shard(value)
                owners.append(owner)
        for owner in owners:
            owner.publish()
        share_amaxes(owner for owner in owners if isinstance(owner, Weight))

    def high_precision(self, name: str) -> Tensor:
        """The parameter's value in its compute dtype and local shape, not to be written to."""
        return self.params[name].detach()

    def state(self) -> dict[str, StateItem]:
        """Weights in their compute dtype (BF16 or FP32, whatever the recipe), without vocabulary padding."""
        return {
            PREFIX + name: StateItem(unpadded(self.high_precision(name), spec), spec.shape, spec.box)
            for name, spec in self.specs.items()
        }

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes `state()`'s tensors; KeyError when one is missing. Padding rows become zero."""
        values = {}
        for name, spec in self.specs.items():
            param = self.params[name]
            values[name] = torch.zeros(spec.local_shape, dtype=param.dtype, device=param.device)
            unpadded(values[name], spec).copy_(tensors[PREFIX + name])
        self.write(values)
