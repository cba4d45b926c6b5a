"""Zeros in which kernels count, or take a maximum: filled many at a time, and each handed out once.

A fill of its own for every counter would be one more launch beside each of those kernels.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from triton.runtime import driver

_BYTES = 8192
"""Zeros that are filled together, or as many as one piece needs."""
_ALIGNMENT = 16  # kernels are compiled for pointers of this alignment, or for any

_pools: dict[tuple, Iterator[Tensor]] = {}


def zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """`[count]` zeros for what runs on the current stream, which nobody else has or will have."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():  # a replay must fill them again
        return torch.zeros(count, dtype=dtype, device=device)
    key = count, dtype, device.index, driver.active.get_current_stream(device.index)
    pool = _pools.get(key, iter(()))
    piece = next(pool, None)
    if piece is None:
        pieces = _filled(count, dtype, device)
        piece, _pools[key] = pieces[0], iter(pieces[1:])
    return piece


def _filled(count: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Pieces of one fill; each a tensor of its own to autograd: writing to one is not seen as a change of others."""
    width = -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT // dtype.itemsize
    with torch.inference_mode(False):  # what is left after an evaluation is kept for backward
        rows = torch.zeros(max(1, _BYTES // (width * dtype.itemsize)), width, dtype=dtype, device=device)
        return [row.data for row in rows[:, :count].unbind(0)]
