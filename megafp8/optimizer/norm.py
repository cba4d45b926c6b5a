"""Norms and zero counts over all parameters, the same in every layout.

A norm is the root of FP64 partial sums of squares, one a parameter, added in the order of global names: which buffer
or rank holds a parameter changes nothing. A parameter that is replicated over an axis is counted on its first rank,
but is looked at on all of them, so that all ranks see a non-finite value alike. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megafp8.optimizer.stages import StageNames
from megafp8.parallel import Axis
from megafp8.params import ParamSpec, unpadded

CHUNK = 1 << 20
"""Elements converted to FP64 at once."""


def sum_of_squares(x: Tensor) -> Tensor:
    """FP64 scalar; NaN or Inf anywhere in `x` makes it non-finite."""
    return torch.stack([chunk.double().square_().sum() for chunk in x.reshape(-1).split(CHUNK)]).sum()


def count_zeros(x: Tensor) -> Tensor:
    """Int64 scalar: elements that are exactly 0."""
    return x.numel() - torch.count_nonzero(x)


def per_parameter(
    values: Mapping[str, Tensor],
    specs: Mapping[str, ParamSpec],
    measure: Callable[[Tensor], Tensor],
    tp: Axis | None = None,
    stages: StageNames | None = None,
) -> Tensor:
    """`measure` of every parameter's whole tensor without padding, as a vector in the order of global names.

    tp: the ranks that hold other parts of the parameters; their parts' measures are added.
    stages: the stages of a pipeline, which hold other parameters.
    """
    names, tp = sorted(values), tp or Axis()
    measured = torch.stack([measure(unpadded(values[name], specs[name])) for name in names])
    if tp.rank:
        repeated = torch.tensor(["tp" in specs[name].replicated_over for name in names], device=measured.device)
        measured = torch.where(repeated & measured.isfinite(), torch.zeros_like(measured), measured)
    tp.sum_(measured)
    return measured if stages is None else stages.whole(measured)


def l2_norm(
    values: Mapping[str, Tensor],
    specs: Mapping[str, ParamSpec],
    tp: Axis | None = None,
    stages: StageNames | None = None,
) -> Tensor:
    """FP64 scalar on the values' device: the L2 norm over all parameters, of all ranks of `tp` and all stages."""
    return per_parameter(values, specs, sum_of_squares, tp, stages).sum().sqrt()


def num_zeros(
    values: Mapping[str, Tensor],
    specs: Mapping[str, ParamSpec],
    tp: Axis | None = None,
    stages: StageNames | None = None,
) -> Tensor:
    """Int64 scalar: elements of all parameters that are exactly 0."""
    return per_parameter(values, specs, count_zeros, tp, stages).sum()


def clip_coefficient(norm: Tensor, clip_grad: float) -> Tensor:
    """FP64 scalar that brings `norm` down to at most `clip_grad`; 1 when clipping is off (`clip_grad` 0).

    `clip_grad / (norm + 1e-6)`, as in Megatron-LM and `torch.nn.utils.clip_grad_norm_`.
    """
    if clip_grad == 0:
        return torch.ones_like(norm)
    return (clip_grad / (norm + 1e-6)).clamp(max=1.0)
