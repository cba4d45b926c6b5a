"""Dropout whose mask is a function of (seed, iteration, microbatch, place), so that nothing is saved.

Backward and recomputation draw the same mask again from the same seed; a resumed run needs no random state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megafp8.step import StepContext


def _drop(x: Tensor, p: float, seed: int) -> Tensor:
    generator = torch.Generator(x.device).manual_seed(seed)
    keep = torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(1 - p, generator=generator)
    return (x * keep).mul_(1 / (1 - p)) if p < 1 else torch.zeros_like(x)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        return _drop(x, p, seed)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, None, None]:
        return _drop(grad_output, ctx.p, ctx.seed), None, None


def dropout(x: Tensor, p: float, step: StepContext, place: str) -> Tensor:
    """Zeroes elements with probability `p` and scales the rest by `1 / (1 - p)`; `x` itself in evaluation.

    place: global name of the module that drops; two places never share a mask.
    """
    if p == 0 or not step.training:
        return x
    return _Dropout.apply(x, p, step.random_seed(place))


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, PyTorch's default generator of `device` starts at `seed`; afterwards it is as it was.

    For operators that take no generator, such as attention with dropout.
    """
    default = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    state = default.get_state()
    default.manual_seed(seed)
    try:
        yield
    finally:
        default.set_state(state)
