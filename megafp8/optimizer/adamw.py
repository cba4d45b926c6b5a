"""AdamW (Loshchilov and Hutter, 2019, algorithm 2) on flat buffers, as `torch.optim.AdamW` defines it:

    g = grad * grad_scale
    m += (1 - beta1) * (g - m)
    v += (1 - beta2) * (g * g - v)
    p -= lr * weight_decay * p + lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

The decay and the step are added before they are taken from the master, so that a master is rounded once a step:
`p * (1 - lr * weight_decay)` would round the factor, and with it the decay rate, in every step alike. Only operations
that round once are used (no fused multiply-add), so an element's result doesn't depend on its place in a buffer or on
where shards begin, and the fused kernel (`kernels/adamw.py`) gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CPU_CHUNK = 1 << 15
"""Elements updated at once on the CPU, so that the temporaries stay in the cache."""
DEVICE_CHUNK = 1 << 24
"""The same on a GPU: bounds the temporaries' memory to 64 MiB each."""


def sqrt_rn(x: Tensor) -> Tensor:
    """Square roots (FP32), correctly rounded. PyTorch's on the CPU are not, where a vector library computes them."""
    return x.sqrt() if x.is_cuda else torch.from_numpy(np.sqrt(x.numpy()))


class Rates(NamedTuple):
    """Of one group of parameters: learning rate, and decoupled weight decay."""

    lr: float
    weight_decay: float


@dataclass(frozen=True)
class StepScalars:
    """Device scalars of one step, shared by all buffers.

    grad_scale: FP32, what gradients are multiplied by (1 / valid tokens, times the clip coefficient).
    skip: bool, leave masters and moments as they are, bit for bit. step: int64, number of this update, from 1.
    correction2: FP32, 1 / sqrt(1 - beta2^t). rates: FP32 [groups, 2], lr / (1 - beta1^t) and lr * weight_decay.
    decays: which groups' decay is not 0.
    """

    grad_scale: Tensor
    skip: Tensor
    step: Tensor
    correction2: Tensor
    rates: Tensor
    decays: tuple[bool, ...]


def step_scalars(
    step: Tensor, grad_scale: Tensor, skip: Tensor, rates: Sequence[Rates], *, beta1: float, beta2: float
) -> StepScalars:
    """step: number of this update, counted from 1 (int64 scalar on the device)."""
    t = step.double()
    correction1 = 1 / (1 - torch.pow(beta1, t))
    correction2 = torch.rsqrt(1 - torch.pow(beta2, t))
    decays = [rate.lr * rate.weight_decay for rate in rates]
    columns = [correction1 * rate.lr for rate in rates] + [torch.full_like(t, decay) for decay in decays]
    table = torch.stack(columns).view(2, len(decays)).t().float().contiguous()
    return StepScalars(grad_scale.float(), skip, step, correction2.float(), table, tuple(d != 0 for d in decays))


@torch.no_grad()
def adamw(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    scalars: StepScalars,
    group: int,
    *,
    beta1: float,
    beta2: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The new (master, exp_avg, exp_avg_sq) of flat FP32 tensors; `scalars.skip` is the caller's to heed."""
    step_size, decay = scalars.rates[group]
    g = grad * scalars.grad_scale
    m = torch.sub(g, exp_avg).mul_(1 - beta1).add_(exp_avg)
    v = torch.mul(g, g).sub_(exp_avg_sq).mul_(1 - beta2).add_(exp_avg_sq)
    denominator = sqrt_rn(v).mul_(scalars.correction2).add_(eps)
    update = torch.mul(m, step_size).div_(denominator)
    if scalars.decays[group]:
        update.add_(master * decay)
    return torch.sub(master, update), m, v
