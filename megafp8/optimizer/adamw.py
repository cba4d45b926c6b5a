"""AdamW (Loshchilov and Hutter, 2019, algorithm 2) on flat FP32 buffers, as `torch.optim.AdamW` defines it:

    g = grad * grad_scale
    m += (1 - beta1) * (g - m)
    v += (1 - beta2) * (g * g - v)
    p -= lr * weight_decay * p + lr / (1 - beta1^t) * m / (sqrt(v / (1 - beta2^t)) + eps)

The decay and the step are added before they are taken from the master, so that a master is rounded once a step:
`p * (1 - lr * weight_decay)` would round the factor, and with it the decay rate, in every step alike. Only operations
that round once are used (no fused multiply-add), so an element's result doesn't depend on its place in a buffer or on
where shards begin.

`adamw_` is the seam for a fused kernel: one call a segment, scalars on the device, nothing read by the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CPU_CHUNK = 1 << 15
"""Elements updated at once on the CPU, so that the temporaries stay in the cache."""
DEVICE_CHUNK = 1 << 24
"""The same on a GPU: bounds the temporaries' memory to 64 MiB each."""


@dataclass(frozen=True)
class StepScalars:
    """Device scalars of one step, shared by all segments.

    grad_scale: FP32, what gradients are multiplied by (1 / valid tokens, times the clip coefficient).
    skip: bool, leave master and moments as they are, bit for bit.
    correction1: FP64, 1 / (1 - beta1^t); correction2: FP32, 1 / sqrt(1 - beta2^t).
    """

    grad_scale: Tensor
    skip: Tensor
    correction1: Tensor
    correction2: Tensor


def step_scalars(step: Tensor, grad_scale: Tensor, skip: Tensor, *, beta1: float, beta2: float) -> StepScalars:
    """step: number of this update, counted from 1 (int64 scalar on the device)."""
    t = step.double()
    correction1 = 1 / (1 - torch.pow(beta1, t))
    correction2 = torch.rsqrt(1 - torch.pow(beta2, t))
    return StepScalars(grad_scale.float(), skip, correction1, correction2.float())


@torch.no_grad()
def adamw_(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    scalars: StepScalars,
    *,
    lr: float,
    weight_decay: float,
    beta1: float,
    beta2: float,
    eps: float,
) -> None:
    """One update in place of flat FP32 `master`, `exp_avg` and `exp_avg_sq`; `grad` (flat, FP32) is only read."""
    step_size = (lr * scalars.correction1).float()
    chunk = DEVICE_CHUNK if master.is_cuda else CPU_CHUNK
    parts = zip(*(t.split(chunk) for t in (master, exp_avg, exp_avg_sq, grad)), strict=True)
    for p, m, v, raw in parts:
        g = raw * scalars.grad_scale
        new_m = torch.sub(g, m).mul_(1 - beta1).add_(m)
        new_v = torch.mul(g, g).sub_(v).mul_(1 - beta2).add_(v)
        denominator = new_v.sqrt().mul_(scalars.correction2).add_(eps)
        update = torch.mul(new_m, step_size).div_(denominator)
        if weight_decay:
            update.add_(p * (lr * weight_decay))
        # A skipped step's values may be NaN: they are computed and dropped, so that the host needn't know.
        torch.where(scalars.skip, p, torch.sub(p, update), out=p)
        torch.where(scalars.skip, m, new_m, out=m)
        torch.where(scalars.skip, v, new_v, out=v)
