"""The three GEMMs of a linear layer, by role, and which backend runs them.

            A                      B                      output
    fprop   X rowwise  [M, K]      W rowwise  [N, K]      Y  [M, N]
    dgrad   dY rowwise [M, N]      W colwise  [K, N]      dX [M, K]
    wgrad   dY colwise [N, M]      X colwise  [K, M]      dW [N, K], FP32, may be added into a buffer

Every product is `A @ B.T` of K-major operands, the only layout that Hopper's FP8 tensor cores take. Nobody assumes
that: `needs` says which orientations the GEMMs of a device want.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megafp8.fp8 import reference, scaled_mm
from megafp8.fp8.formats import Scale
from megafp8.fp8.recipe import Recipe
from megafp8.fp8.storage import QuantizedStorage

log = logging.getLogger(__name__)

BACKENDS = ("auto", "cublaslt", "reference")

# Role -> GEMM -> the orientation whose tiles run along the dimension that the GEMM sums over.
_ALONG_K = {
    "input": {"fprop": "rowwise", "wgrad": "colwise"},
    "weight": {"fprop": "rowwise", "dgrad": "colwise"},
    "grad_output": {"dgrad": "rowwise", "wgrad": "colwise"},
}


@dataclass(frozen=True)
class Capability:
    """What a device's FP8 tensor cores can do. The CPU stands for Hopper, so that it runs what GPUs run.

    any_layout: tensorwise operands need not be K-major. native_mxfp8: block-scaled tensor cores.
    """

    cublaslt: bool = False
    any_layout: bool = False
    native_mxfp8: bool = False


@cache
def capability(device: torch.device) -> Capability:
    """Capability of `device` (asked once a device)."""
    if device.type != "cuda":
        return Capability()
    sm = torch.cuda.get_device_capability(device)
    datacenter_blackwell = sm[0] == 10
    return Capability(cublaslt=sm >= (8, 9), any_layout=datacenter_blackwell, native_mxfp8=datacenter_blackwell)


def needs(recipe: Recipe, role: str, device: torch.device) -> dict[str, str]:
    """GEMM -> orientation of the operand `role` ("input", "weight", "grad_output") that it wants on `device`.

    On hardware that takes any layout, tensorwise operands serve both of their GEMMs from the rowwise bytes.
    """
    wanted = _ALONG_K[role]
    if recipe.quantizer(role).spec.tile.kind == "tensor" and capability(device).any_layout:
        return dict.fromkeys(wanted, "rowwise")
    return dict(wanted)


def fprop(
    x: QuantizedStorage,
    weight: QuantizedStorage,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """`Y [M, N] = X [M, K] @ W [N, K].T + bias [N]`, rounded once to `out_dtype`."""
    return _multiply(_oriented(x, "rowwise"), _oriented(weight, "rowwise"), bias, out_dtype, backend)


def dgrad(
    grad_output: QuantizedStorage,
    weight: QuantizedStorage,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """`dX [M, K] = dY [M, N] @ W [N, K]`, rounded once to `out_dtype`."""
    return _multiply(_oriented(grad_output, "rowwise"), _oriented(weight, "colwise"), None, out_dtype, backend)


def wgrad(
    grad_output: QuantizedStorage, x: QuantizedStorage, out: Tensor | None = None, backend: str = "auto"
) -> Tensor:
    """`dW [N, K] = dY [M, N].T @ X [M, K]` in FP32; with `out` (FP32) `out += dW`, which is returned."""
    product = _multiply(_oriented(grad_output, "colwise"), _oriented(x, "colwise"), None, torch.float32, backend)
    if out is None:
        return product
    assert out.dtype == torch.float32
    return out.add_(product)


def _oriented(storage: QuantizedStorage, orientation: str) -> QuantizedStorage:
    """The operand K-major for a GEMM; another layout of tensorwise bytes is a view."""
    if storage.orientation == orientation:
        return storage
    assert storage.tile.kind == "tensor", f"{orientation} copy is missing"
    return QuantizedStorage(storage.data.t(), storage.scale_inv, storage.tile, storage.scale, orientation)


def _multiply(
    a: QuantizedStorage, b: QuantizedStorage, bias: Tensor | None, out_dtype: torch.dtype, backend: str
) -> Tensor:
    """`A [M, K] @ B [N, K].T + bias` on the backend chosen by capability. ValueError if `backend` can't do it."""
    if backend not in BACKENDS:
        raise ValueError(f"gemm backend {backend!r}: use one of {', '.join(BACKENDS)}")
    device = a.data.device
    if 0 in (*a.data.shape, b.data.shape[0]):
        y = torch.zeros(a.data.shape[0], b.data.shape[0], dtype=out_dtype, device=device)
        return y if bias is None else y + bias.to(out_dtype)
    reason = scaled_mm.refuses(a, b) if capability(device).cublaslt else "this device has no FP8 tensor cores"
    if backend == "cublaslt" and reason:
        raise ValueError(f"gemm backend 'cublaslt': {reason}: use 'auto'")
    if backend != "reference" and not reason:
        return scaled_mm.matmul(a, b, bias, out_dtype)
    product = reference.matmul
    if backend != "reference" and device.type == "cuda":
        _say_emulated(reason)
        product = reference.matmul_emulated
    elif backend != "reference" and a.scale is Scale.E8M0:
        _say_emulated("this device has no MXFP8 GEMM")
    if bias is None:
        return product(a, b, out_dtype)
    return product(a, b).add_(bias).to(out_dtype)


@cache
def _say_emulated(reason: str) -> None:
    log.warning("FP8 GEMMs are emulated, operands decoded and multiplied in high precision: %s", reason)
