"""The three GEMMs of a linear layer, by role, and which backend runs them.

            A                      B                      output
    fprop   X rowwise  [M, K]      W rowwise  [N, K]      Y  [M, N]
    dgrad   dY rowwise [M, N]      W colwise  [K, N]      dX [M, K]
    wgrad   dY colwise [N, M]      X colwise  [K, M]      dW [N, K], FP32, may be added into a buffer

The grouped ones do this for every expert in one call: tokens are sorted by expert in one buffer, `ends` (int32 `[G]`,
on the device) is one past each expert's last token, weights are `[G, N, K]`.

Every product is `A @ B.T` of K-major operands, the only layout that Hopper's FP8 tensor cores take. Nobody assumes
that: `needs` says which orientations the GEMMs of a device want.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from megafp8.fp8 import decoded_gemm, gemm_speed, reference, scaled_mm, triton_gemm
from megafp8.fp8.expert_parts import tokens_of, weights_of
from megafp8.fp8.formats import Scale, Tile
from megafp8.fp8.recipe import Recipe
from megafp8.fp8.storage import QuantizedStorage
from megafp8.fp8.wgrad import put

log = logging.getLogger(__name__)

BACKENDS = ("auto", "triton", "cublaslt", "reference")

# Role -> GEMM -> the orientation whose tiles run along the dimension that the GEMM sums over.
_ALONG_K = {
    "input": {"fprop": "rowwise", "wgrad": "colwise"},
    "weight": {"fprop": "rowwise", "dgrad": "colwise"},
    "grad_output": {"dgrad": "rowwise", "wgrad": "colwise"},
}


@dataclass(frozen=True, eq=False)  # compared by identity: there is one a device, and many questions to a cache
class Capability:
    """What a device's FP8 tensor cores can do. The CPU stands for Hopper, so that it runs what GPUs run.

    cublaslt: FP8 GEMMs of cuBLASLt. triton: what the project's kernels need (TMA). any_layout: tensorwise operands need
    not be K-major. native_mxfp8: block-scaled tensor cores, which run blockwise with power-of-two scales as well.
    grouped_bf16: `torch._grouped_mm` is one kernel of the device. name: of it, as `torch.cuda.get_device_name` says.
    """

    cublaslt: bool = False
    triton: bool = False
    any_layout: bool = False
    native_mxfp8: bool = False
    grouped_bf16: bool = False
    name: str = ""


@cache
def capability(device: torch.device) -> Capability:
    """Capability of `device` (asked once a device)."""
    if device.type != "cuda":
        return Capability()
    sm, name = torch.cuda.get_device_capability(device), torch.cuda.get_device_name(device)
    blackwell = sm[0] == 10
    options = {"any_layout": blackwell, "native_mxfp8": blackwell, "grouped_bf16": sm == (9, 0), "name": name}
    return Capability(sm >= (8, 9), sm >= (9, 0), **options)


def needs(recipe: Recipe, role: str, device: torch.device) -> dict[str, str]:
    """GEMM -> orientation of the operand `role` ("input", "weight", "grad_output") that it wants on `device`.

    On hardware that takes any layout, tensorwise operands serve both of their GEMMs from the rowwise bytes.
    """
    wanted = _ALONG_K[role]
    if recipe.quantizer(role).spec.tile.kind == "tensor" and capability(device).any_layout:
        return dict.fromkeys(wanted, "rowwise")
    return dict(wanted)


def refusal(recipe: Recipe, device: torch.device, backend: str) -> str | None:
    """Why `backend` can't run one of the dense GEMMs of `recipe` on `device`; None if it can. For before a run."""
    if backend in ("auto", "reference"):
        return None
    able, tokens = capability(device), torch.zeros(32, 32)
    x, w, dy = (recipe.quantizer(role).quantize(tokens, colwise=True) for role in ("input", "weight", "grad_output"))
    bf16, fp32 = torch.bfloat16, torch.float32
    for a, b, dtype in ((x.rowwise, w.rowwise, bf16), (dy.rowwise, w.colwise, bf16), (dy.colwise, x.colwise, fp32)):
        a, b = _rewritten(a, b, backend, able)
        reason = _refusals(able, device, _kind(a), _kind(b), dtype, backend)[0][backend]
        if reason is not None:
            return reason
    return None


def fprop(
    x: QuantizedStorage,
    weight: QuantizedStorage,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    fast: bool = False,
) -> Tensor:
    """`Y [M, N] = X [M, K] @ W [N, K].T + bias [N]`, rounded once to `out_dtype`.

    fast: GPUs add up tensorwise products in their tensor cores alone, with about 13 bits.
    """
    x, weight = _oriented(x, "rowwise"), _oriented(weight, "rowwise")
    return _multiply(x, weight, bias, out_dtype, backend, fast=fast)


def dgrad(
    grad_output: QuantizedStorage,
    weight: QuantizedStorage,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """`dX [M, K] = dY [M, N] @ W [N, K]`, rounded once to `out_dtype`."""
    return _multiply(_oriented(grad_output, "rowwise"), _oriented(weight, "colwise"), None, out_dtype, backend)


def wgrad(
    grad_output: QuantizedStorage,
    x: QuantizedStorage,
    out: Tensor | None = None,
    backend: str = "auto",
    adds: bool = True,
) -> Tensor:
    """`dW [N, K] = dY [M, N].T @ X [M, K]` in FP32; with `out` (FP32) it is added there, or written over what is there,
    and `out` returned: the bits are those of an addition to zeros, but that zeros may bear a sign."""
    assert out is None or out.dtype == torch.float32
    a, b = _oriented(grad_output, "colwise"), _oriented(x, "colwise")
    return _multiply(a, b, None, torch.float32, backend, out, adds=adds)


def grouped_fprop(
    x: QuantizedStorage,
    weight: QuantizedStorage,
    ends: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    fast: bool = False,
) -> Tensor:
    """`Y [T, N]`: `Y[t] = X[t] @ W[g].T` for the tokens t of expert g, rounded once to `out_dtype`.

    x: rowwise `[T, K]`; scales `[T, ceil(K/B)]`, tensorwise `[G]`.
    weight: rowwise, data `[G, N, K]`, scales `[G, ceil(N/B), ceil(K/B)]` (1D tiles `[G, N, ceil(K/B)]`), tensorwise
    `[G]`. Experts may lie apart: any first stride.
    ends: int32 `[G]` on the operands' device. An expert may have any number of tokens, and padding gains no speed here.
    Rows of X past the last end are not read, those of Y not written: they hold whatever the allocator left.
    fast: as in `fprop`.
    """
    x, weight = _oriented(x, "rowwise"), _oriented(weight, "rowwise")
    return _multiply_grouped(x, weight, ends, out_dtype, backend, fast)


def grouped_dgrad(
    grad_output: QuantizedStorage,
    weight: QuantizedStorage,
    ends: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """`dX [T, K]`: `dX[t] = dY[t] @ W[g]` for the tokens t of expert g, rounded once to `out_dtype`.

    grad_output: rowwise `[T, N]`. weight: colwise, data `[G, K, N]`. All else as in `grouped_fprop`.
    """
    return _multiply_grouped(_oriented(grad_output, "rowwise"), _oriented(weight, "colwise"), ends, out_dtype, backend)


def grouped_wgrad(
    grad_output: QuantizedStorage,
    x: QuantizedStorage,
    ends: Tensor,
    out: Tensor | None = None,
    alignment: int = 1,
    backend: str = "auto",
    adds: bool = True,
) -> Tensor:
    """`dW [G, N, K]`: `dW[g] = dY[tokens of g].T @ X[tokens of g]` in FP32; `out` and `adds` as in `wgrad`.

    grad_output, x: colwise `[N, T]`, `[K, T]`, whose tiles restart at each expert's first token: scales
    `[N or K, S]`, S at least `sum(ceil(m_g / B))`; tensorwise `[G]`. Tokens past the last end are not read.
    out: any first stride (experts may lie apart), rows contiguous. An expert without tokens gets zeros, or adds
    nothing. alignment: a promise that all `ends` are multiples of it (rows of zeros fill up an expert's tokens). At
    multiples of 16 the kernels read the operands in place, else they copy both first.
    """
    a, b = _oriented(grad_output, "colwise"), _oriented(x, "colwise")
    return _wgrad_grouped(a, b, ends, out, alignment, backend, adds)


def _oriented(storage: QuantizedStorage, orientation: str) -> QuantizedStorage:
    """The operand K-major for a GEMM; another layout of tensorwise bytes is a view."""
    if storage.orientation == orientation:
        return storage
    assert storage.tile.kind == "tensor", f"{orientation} copy is missing"
    data = storage.data.transpose(-1, -2)
    return QuantizedStorage(data, storage.scale_inv, storage.tile, storage.scale, orientation)


def _multiply(
    a: QuantizedStorage,
    b: QuantizedStorage,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    backend: str,
    out: Tensor | None = None,
    fast: bool = False,
    adds: bool = True,
) -> Tensor:
    """`A [M, K] @ B [N, K].T + bias`; where `out` is given, added into it or written over it, by the backend that is
    best at adding: so one microbatch is multiplied as another. ValueError if `backend` can't do it."""
    device = a.data.device
    if 0 in (*a.data.shape, b.data.shape[0]):
        if out is not None:
            return out if adds else out.zero_()
        y = torch.zeros(a.data.shape[0], b.data.shape[0], dtype=out_dtype, device=device)
        return y if bias is None else y + bias.to(out_dtype)
    a, b = _rewritten(a, b, backend, capability(device))
    chosen, reason = _choose(a, b, out_dtype, backend, out is not None, fast)
    if chosen == "triton":
        return triton_gemm.matmul(a, b, bias, out_dtype, out, fast, adds)
    if chosen == "cublaslt":
        y = scaled_mm.matmul(a, b, bias, out_dtype, fast)
        return put(y, out, adds)
    product = reference.matmul
    if backend != "reference" and (device.type == "cuda" or a.scale is Scale.E8M0):
        _say_emulated(reason)
        product = reference.matmul_emulated if device.type == "cuda" else product
    if out is not None:
        return put(product(a, b), out, adds)
    return product(a, b, out_dtype) if bias is None else product(a, b).add_(bias).to(out_dtype)


def _choose(
    a: QuantizedStorage,
    b: QuantizedStorage,
    out_dtype: torch.dtype,
    backend: str,
    accumulates: bool,
    fast: bool = False,
) -> tuple[str, str]:
    """The backend that multiplies, and why no faster one does. ValueError if `backend` is asked for and can't."""
    device = a.data.device
    weight = (a.data.shape[0], b.data.shape[0]) if accumulates else tuple(b.data.shape)
    return _choice(
        capability(device), device, _kind(a), _kind(b), out_dtype, backend, weight, accumulates=accumulates, fast=fast
    )


_Kind = tuple[torch.dtype, str, int, bool]


def _kind(s: QuantizedStorage) -> _Kind:
    """All that backends refuse operands for: (dtype, kind of tile, its block, whether scales are E8M0)."""
    tile = s.tile
    return s.data.dtype, tile.kind, tile.block, s.scale is Scale.E8M0


@cache
def _choice(
    can: Capability,
    device: torch.device,
    a: _Kind,
    b: _Kind,
    out_dtype: torch.dtype,
    backend: str,
    weight: tuple[int, int],
    *,
    accumulates: bool,
    fast: bool,
) -> tuple[str, str]:
    """`_choose` for operands of these kinds: asked for every GEMM, so answered once."""
    reasons, able, kind = _refusals(can, device, a, b, out_dtype, backend)
    if backend in reasons:
        if backend not in able:
            raise ValueError(f"gemm backend {backend!r}: {reasons[backend]}: use 'auto'")
        return backend, ""
    if backend == "reference" or not able:
        return "reference", reasons["cublaslt"] or ""
    if len(able) == 1:
        return able[0], ""
    kind = f"{kind} fast" if fast else kind
    return gemm_speed.fastest(can.name, f"{kind}+=" if accumulates else kind, weight, able), ""


def _refusals(
    able: Capability, device: torch.device, a: _Kind, b: _Kind, out_dtype: torch.dtype, backend: str
) -> tuple[dict[str, str | None], tuple[str, ...], str | None]:
    """Backend -> why it can't multiply operands of these kinds, None where it can; those that can; the kind of GEMM."""
    if backend not in BACKENDS:
        raise ValueError(f"gemm backend {backend!r}: use one of {', '.join(BACKENDS)}")
    a, b = (_example(kind, device) for kind in (a, b))
    nothing = "this device has no FP8 tensor cores"
    triton = nothing if not able.cublaslt else "the kernels need TMA (compute capability 9.0)"
    reasons = {
        "cublaslt": scaled_mm.refuses(a, b, able.native_mxfp8) if able.cublaslt else nothing,
        "triton": triton_gemm.refuses(a, b, out_dtype, able.native_mxfp8) if able.triton else triton,
    }
    able_ones = tuple(name for name, reason in reasons.items() if reason is None)
    return reasons, able_ones, triton_gemm.kind(a, b)


def _example(kind: _Kind, device: torch.device) -> QuantizedStorage:
    """An operand of that kind, of no elements."""
    dtype, tile, block, e8m0 = kind
    data, scales = torch.empty(0, 0, dtype=dtype, device=device), torch.empty(0, device=device)
    return QuantizedStorage(data, scales, Tile(tile, block), Scale.E8M0 if e8m0 else Scale.FP32, "rowwise")


def _rewritten(
    a: QuantizedStorage, b: QuantizedStorage, backend: str, able: Capability, token_tile: int = 0
) -> tuple[QuantizedStorage, QuantizedStorage]:
    """Blockwise operands with power-of-two scales as the same numbers in MXFP8, where tensor cores multiply that.

    Others as they are; so too where tiles restart at tokens that are no multiples of `token_tile`.
    """
    if not able.native_mxfp8 or backend == "reference":
        return a, b
    if not all(s.scale is Scale.POW2 and s.tile.kind != "tensor" and s.tile.block % 32 == 0 for s in (a, b)):
        return a, b
    if token_tile and token_tile % a.tile.block:
        return a, b
    rewritten = []
    for s in (a, b):
        data, codes = reference.blockwise_as_mxfp8(s.data, s.scale_inv, s.tile)
        rewritten.append(QuantizedStorage(data, codes, Tile("1d", 32), Scale.E8M0, s.orientation))
    return tuple(rewritten)


def _multiply_grouped(
    a: QuantizedStorage, b: QuantizedStorage, ends: Tensor, out_dtype: torch.dtype, backend: str, fast: bool = False
) -> Tensor:
    """`out[t] = A[t] @ B[g].T`, A `[T, K]`, B `[G, N, K]`."""
    able = capability(a.data.device)
    a, b = _rewritten(a, b, backend, able)
    reason = triton_gemm.refuses_grouped(a, b, out_dtype, able.native_mxfp8)
    if _decodes(a, b, reason, backend) and decoded_gemm.suits_grouped(a, b, out_dtype):
        return decoded_gemm.matmul_grouped(a, b, ends, out_dtype)
    if _runs_grouped(a, b, reason, backend):
        return triton_gemm.matmul_grouped(a, b, ends, out_dtype, fast)
    out = torch.empty(a.data.shape[0], b.data.shape[1], dtype=out_dtype, device=a.data.device)
    start = 0
    for part, weight, end in zip(tokens_of(a, ends, 0), weights_of(b), ends.tolist(), strict=True):
        out[start:end] = _multiply(part, weight, None, out_dtype, backend, fast=fast)
        start = end
    return out


def _wgrad_grouped(
    a: QuantizedStorage, b: QuantizedStorage, ends: Tensor, out: Tensor | None, alignment: int, backend: str, adds: bool
) -> Tensor:
    """`out[g] (+)= A[:, tokens of g] @ B[:, tokens of g].T`, A `[N, T]`, B `[K, T]`."""
    able = capability(a.data.device)
    a, b = _rewritten(a, b, backend, able, alignment)
    reason = triton_gemm.refuses_wgrad_grouped(a, b, able.native_mxfp8)
    if _runs_grouped(a, b, reason, backend):
        return triton_gemm.wgrad_grouped(a, b, ends, out, alignment, adds)
    if out is None:
        out, adds = torch.empty(len(ends), a.data.shape[0], b.data.shape[0], device=a.data.device), False
    assert out.dtype == torch.float32
    for index, (part_a, part_b) in enumerate(zip(tokens_of(a, ends, 1), tokens_of(b, ends, 1), strict=True)):
        _multiply(part_a, part_b, None, torch.float32, backend, out[index], adds=adds)
    return out


def _decodes(a: QuantizedStorage, b: QuantizedStorage, reason: str | None, backend: str) -> bool:
    """Whether operands in MXFP8, which the device can't multiply for that `reason`, had best be decoded first."""
    if backend != "auto" or not capability(a.data.device).grouped_bf16 or not triton_gemm.decodes(a, b, reason):
        return False
    _say_emulated(reason)
    return True


def _runs_grouped(a: QuantizedStorage, b: QuantizedStorage, reason: str | None, backend: str) -> bool:
    """Whether one kernel runs all groups. ValueError if it is asked for and can't.

    reason: why it can't multiply these operands as they are. Where that is for want of MXFP8's products alone, "auto"
    takes it nevertheless: it decodes operands, and doesn't wait for the groups' sizes.
    """
    able = capability(a.data.device)
    if backend == "triton" and (reason or not able.triton):
        raise ValueError(f"gemm backend 'triton': {reason or 'needs a GPU with TMA (9.0)'}: use 'auto'")
    if backend == "auto" and able.triton and triton_gemm.decodes(a, b, reason):
        _say_emulated(reason)
        return True
    return backend in ("auto", "triton") and not reason and able.triton


@cache
def _say_emulated(reason: str) -> None:
    log.warning("FP8 GEMMs are emulated, operands decoded and multiplied in high precision: %s", reason)
