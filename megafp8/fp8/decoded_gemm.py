"""Grouped products of MXFP8 operands on GPUs that have none: decoded to BF16 in a pass of their own, then multiplied as
experts in BF16 are.

Two passes beat kernels that decode as they multiply (`kernels/gemm_scaled.py`), in whose products every tile of an
operand is decoded again for each tile of the other, by the warps that should keep the tensor cores busy. The price is
memory: both operands in BF16, 2 bytes an element, for as long as a product takes.

Decoding is exact, but below 2^-130 (`reference.matmul_emulated`). Weight gradients are rounded to BF16 before they are
added in FP32, as those of experts in BF16 (`grouped_matmul.wgrad`).
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


def suits_wgrad_grouped(a: QuantizedStorage, b: QuantizedStorage, alignment: int) -> bool:
    """Whether `wgrad_grouped` takes these operands. alignment: what experts' first tokens are multiples of; of whole
    tiles the codes of the whole buffer are those of each expert."""
    tokens, block = a.data.shape[1], a.tile.block
    whole = alignment % block == 0 and all(s.scale_inv.shape[1] * block >= tokens for s in (a, b))
    return whole and not any(s.data.shape[0] % _ALIGNED for s in (a, b))


def matmul_grouped(a: QuantizedStorage, b: QuantizedStorage, ends: Tensor, out_dtype: torch.dtype) -> Tensor:
    """`out[t] = A[t] @ B[g].T` for the tokens t of group g: A `[T, K]`, B `[G, N, K]`, out `[T, N]`, rounded once."""
    return grouped_matmul.fprop(_values(a), _values(b), ends).to(out_dtype)


def wgrad_grouped(a: QuantizedStorage, b: QuantizedStorage, ends: Tensor, out: Tensor | None, adds: bool) -> Tensor:
    """`out[g] (+)= A[:, tokens of g] @ B[:, tokens of g].T`, FP32: A `[N, T]`, B `[K, T]`, out `[G, N, K]`.

    Operands become rows of tokens, as those of experts in BF16 are.
    """
    x, y = (backend.dequantize_transposed(s.data, s.scale_inv, s.tile, torch.bfloat16) for s in (a, b))
    return grouped_matmul.wgrad(x, y, ends, out, adds)


def _values(stored: QuantizedStorage) -> Tensor:
    return backend.dequantize(stored.data, stored.scale_inv, stored.tile, torch.bfloat16)
