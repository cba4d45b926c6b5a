"""Operands, float64 results and comparisons that the tests of FP8 GEMM kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.kernels import testing

DEVICE = testing.test_device()
INTERPRETING = testing.interpreting()
if INTERPRETING:
    testing.fix_interpreter()

# Gluon kernels run on Hopper only; the interpreter knows plain Triton only.
HOPPER = not INTERPRETING and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
BACKENDS = ["gluon", "tl"] if HOPPER else ["tl"]

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16_ERROR, FP32_ERROR, FP32_ERROR_POSITIVE = 2e-3, 2e-4, 7e-4
NAN_BYTE = 0x7F  # in both formats


def blocks(length: int) -> int:
    return -(-length // 128)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def operand(rows: int, columns: int, dtype: torch.dtype = E4M3, seed: int = 0, positive: bool = False) -> Tensor:
    """Random FP8 `[rows, columns]` in a buffer whose padding, where there is any, holds NaN."""
    x = torch.randn(rows, columns, generator=generator(seed))
    x = (x.abs() if positive else x).to(DEVICE).to(dtype)
    width = -(-columns // 16) * 16 + 16
    buffer = torch.full((rows, width), NAN_BYTE, dtype=torch.uint8, device=DEVICE).view(dtype)
    buffer[:, :columns] = x
    return buffer[:, :columns]


def magnitudes(*shape: int, seed: int = 1) -> Tensor:
    """Scales from 1e-3 to 1e3."""
    return (10.0 ** (torch.rand(*shape, generator=generator(seed)) * 6 - 3)).to(DEVICE)


def row_scales(rows: int, columns: int, seed: int = 1) -> Tensor:
    """1D scales `[rows, columns]` in the layout of quantizers: contiguous along rows, padded to 16 bytes, with NaN."""
    buffer = torch.full((columns, -(-rows // 4) * 4), float("nan"), device=DEVICE)
    buffer[:, :rows] = magnitudes(columns, rows, seed=seed)
    return buffer[:, :rows].t()


def square_scales(rows: int, columns: int, seed: int = 2) -> Tensor:
    """2D scales, row-major with padded rows (NaN)."""
    buffer = torch.full((rows, -(-columns // 4) * 4), float("nan"), device=DEVICE)
    buffer[:, :columns] = magnitudes(rows, columns, seed=seed)
    return buffer[:, :columns]


def dequantized(x: Tensor, scale_inv: Tensor, two_dimensional: bool = False) -> Tensor:
    """float64 values of blockwise bytes."""
    scale = scale_inv.double().repeat_interleave(128, 1)[:, : x.shape[1]]
    if two_dimensional:
        scale = scale.repeat_interleave(128, 0)[: x.shape[0]]
    return x.double() * scale


def poisoned(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """An output buffer of NaN: every element must be written."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def error(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius error, NaN if any element is NaN."""
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


def assert_close(got: Tensor, want: Tensor, tolerance: float, what: str = "") -> None:
    measured = error(got, want)
    assert measured <= tolerance, f"{what}: error {measured:.2e}, allowed {tolerance:.0e}"
