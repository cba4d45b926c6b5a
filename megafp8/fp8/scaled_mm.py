"""FP8 GEMMs through cuBLASLt (`torch.nn.functional.scaled_mm`), with the padding that it asks for.

Tensorwise, blockwise 1D x 2D, 2D x 1D and 1D x 1D, with accurate accumulation; MXFP8 where the hardware has it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megafp8.fp8.formats import Scale, Tile
from megafp8.fp8.storage import QuantizedStorage, gemm_layout

_ALIGN = 16  # rows and columns of FP8 operands
_BLOCK = 128  # of blockwise scales
_RECIPES = {
    "tensor": F.ScalingType.TensorWise,
    "1d": F.ScalingType.BlockWise1x128,
    "2d": F.ScalingType.BlockWise128x128,
}


def refuses(a: QuantizedStorage, b: QuantizedStorage, native_mxfp8: bool = False) -> str | None:
    """Why cuBLASLt can't multiply these operands; None if it can. native_mxfp8: the device multiplies MXFP8."""
    if Scale.E8M0 in (a.scale, b.scale):
        return None if native_mxfp8 else "this device has no MXFP8 GEMM"
    if blocks := {a.tile.block, b.tile.block} - {0, _BLOCK}:
        return f"cuBLASLt takes scale tiles of {_BLOCK}, not {max(blocks)}"
    if a.tile.kind == b.tile.kind == "2d":
        return "2D x 2D scales are no GEMM's"
    on_gpu = a.tile.kind != "tensor" and a.data.device.type == "cuda"
    if on_gpu and torch.cuda.get_device_capability(a.data.device) != (9, 0):
        return "blockwise scales need compute capability 9.0"
    formats = {a.data.dtype, b.data.dtype}
    if formats == {torch.float8_e5m2}:
        return "both operands are E5M2"
    if a.tile.kind != "tensor" and torch.float8_e5m2 in formats:
        return "PyTorch's blockwise scaled_mm takes E4M3 only"
    return None


def matmul(
    a: QuantizedStorage, b: QuantizedStorage, bias: Tensor | None, out_dtype: torch.dtype, fast: bool = False
) -> Tensor:
    """`A [M, K] @ B [N, K].T + bias`, `[M, N]` of `out_dtype`: FP32 accumulation; fast: the tensor cores' own."""
    m, n = a.data.shape[0], b.data.shape[0]
    if a.scale is Scale.E8M0:
        y = _matmul_mxfp8(_padded(_one_dimensional(a)), _padded(_one_dimensional(b)), bias, out_dtype)
        return y[:m, :n].contiguous()
    if m % _BLOCK or n % _BLOCK or a.data.shape[1] % _BLOCK:
        a, b = _padded(a), _padded(b)
    in_epilogue = bias is not None and a.tile.kind == "tensor" and out_dtype == bias.dtype == torch.bfloat16
    in_epilogue = in_epilogue and n == b.data.shape[0]
    y = F.scaled_mm(
        a.data,
        b.data.t(),
        _scale_argument(a),
        _RECIPES[a.tile.kind],
        _scale_argument(b),
        _RECIPES[b.tile.kind],
        bias=bias if in_epilogue else None,
        output_dtype=out_dtype,
        use_fast_accum=fast,
    )
    if y.shape != (m, n):
        y = y[:m, :n].contiguous()  # attention's backward takes no gradient whose rows lie apart
    return y if bias is None or in_epilogue else y + bias.to(out_dtype)


def _matmul_mxfp8(a: QuantizedStorage, b: QuantizedStorage, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    recipe, swizzle = F.ScalingType.BlockWise1x32, F.SwizzleType.SWIZZLE_32_4_4
    y = F.scaled_mm(
        a.data,
        b.data.t(),
        swizzled(a.scale_inv),
        recipe,
        swizzled(b.scale_inv),
        recipe,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=out_dtype if bias is None else torch.float32,
    )
    return y if bias is None else y.narrow(1, 0, len(bias)).add(bias).to(out_dtype)


def swizzled(scale_inv: Tensor) -> Tensor:
    """E8M0 scales `[R, C]` as block-scaled tensor cores read them: blocks of 128 x 4, one after the other along C, in
    each of which row r lies at `(r % 32) * 16 + r // 32 * 4`. Padded with zeros; flat. Source: cuBLAS's manual, "1D
    Block Scaling Factors Layout"."""
    rows, cols = scale_inv.shape
    raw = F.pad(scale_inv.view(torch.uint8), (0, -cols % 4, 0, -rows % 128))
    blocks = raw.view(raw.shape[0] // 128, 4, 32, raw.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return blocks.flatten().view(scale_inv.dtype)


def _one_dimensional(s: QuantizedStorage) -> QuantizedStorage:
    """MXFP8 operands with 32 x 32 tiles: the same scale for each of a tile's rows."""
    if s.tile.kind == "1d":
        return s
    rows = s.scale_inv.view(torch.uint8).repeat_interleave(s.tile.block, 0)[: s.data.shape[0]]
    return QuantizedStorage(s.data, rows.view(s.scale_inv.dtype), Tile("1d", s.tile.block), s.scale, s.orientation)


def _padded(s: QuantizedStorage) -> QuantizedStorage:
    """The operand with zeros up to multiples of 16, of 128 where a tile ends; padding adds exactly 0."""
    rows, cols = s.data.shape
    row_step = s.tile.block if s.tile.kind == "2d" else _ALIGN
    col_step = _ALIGN if s.tile.kind == "tensor" else s.tile.block
    pad_rows, pad_cols = -rows % row_step, -cols % col_step
    if not pad_rows and not pad_cols:
        return s
    data = F.pad(s.data.view(torch.uint8), (0, pad_cols, 0, pad_rows)).view(s.data.dtype)
    scale_inv = s.scale_inv
    if s.tile.kind == "1d" and pad_rows and s.scale is not Scale.E8M0:
        scale_inv = gemm_layout(F.pad(scale_inv, (0, 0, 0, pad_rows), value=1.0), s.tile)
    return QuantizedStorage(data, scale_inv, s.tile, s.scale, s.orientation)


def _scale_argument(s: QuantizedStorage) -> Tensor:
    """scale_inv as checked for: 1D `[rows, K blocks]` M-major, 2D `[K blocks padded to 4, row blocks]` K-major."""
    if s.tile.kind != "2d":
        return s.scale_inv
    rows, padded = s.scale_inv.shape[0], s.scale_inv.stride(0)
    return s.scale_inv.as_strided((padded, rows), (1, padded))
