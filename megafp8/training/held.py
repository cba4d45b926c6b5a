"""Device tensors that can be put back: what a step writes besides gradients, until it is known whether it counts."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megafp8.training.build import Parts


class Held:
    """The values of tensors at the time it was made."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._pairs = [(tensor, tensor.clone()) for tensor in tensors]

    @staticmethod
    def of_routers(parts: Parts) -> Held:
        """What routers take from the counts of a forward."""
        named = [getattr(router, name, None) for router in parts.model.routers() for name in ("expert_bias", "shares")]
        return Held(tensor for tensor in named if tensor is not None)

    @staticmethod
    def of_amaxes(parts: Parts) -> Held:
        """This step's amaxes of delayed scaling."""
        return Held([parts.scaling.pending()] if parts.scaling is not None else [])

    @torch.no_grad()
    def restore(self) -> None:
        for tensor, value in self._pairs:
            tensor.copy_(value)

    @torch.no_grad()
    def restore_where(self, flag: Tensor) -> None:
        """Only if `flag`, a bool on the device, is set: nothing waits for it."""
        for tensor, value in self._pairs:
            tensor.copy_(torch.where(flag, value, tensor))


class HostCopy:
    """A small device tensor on its way to the host: reading it later doesn't wait for what was queued after it."""

    def __init__(self, tensor: Tensor) -> None:
        self._event = None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tensor.clone()

    def read(self) -> Tensor:
        if self._event is not None:
            self._event.synchronize()
        return self._host
