"""Grouped products of MXFP8 operands on GPUs that have none: decoded to BF16 in a pass of their own, then multiplied as
experts in BF16 are.

Two passes beat kernels that decode as they multiply (`kernels/gemm_scaled.py`), in whose products every tile of an
operand is decoded again for each tile of the other, by the warps that should keep the tensor cores busy. The price is
memory: both operands in BF16, 2 bytes an element, for as long as a product takes.

Decoding is exact, but below 2^-130 (`reference.matmul_emulated`). Weight gradients are left to the kernels that decode
as they multiply: `torch._grouped_mm` would round each to BF16 before it is added, an error ten times the GEMM's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.fp8 import backend, grouped_matmul
from megafp8.fp8.storage import QuantizedStorage

_ALIGNED = 8  # BF16 numbers at whose multiples `torch._grouped_mm` reads rows


def suits_grouped(a: QuantizedStorage, b: QuantizedStorage, out_dtype: torch.dtype) -> bool:
    """Whether `matmul_grouped` takes these operands."""
    return out_dtype == torch.bfloat16 and not any(n % _ALIGNED for n in b.data.shape[1:])


def matmul_grouped(a: QuantizedStorage, b: QuantizedStorage, ends: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`out[t] = A[t] @ B[g].T` for the tokens t of group g: A `[T, K]`, B `[G, N, K]`, out `[T, N]`, rounded once."""
    return grouped_matmul.fprop(_values(a), _values(b), ends).to(out_dtype)


def _values(stored: QuantizedStorage) -> Tensor:
    return backend.dequantize(stored.data, stored.scale_inv, stored.tile, torch.bfloat16)
