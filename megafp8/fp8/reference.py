"""The numerics of everything in `fp8`, in PyTorch: the CPU backend, and the oracle of every kernel.

Functions work on plain tensors. `x` is a high-precision `[M, K]` operand of any strides; results are in the
stored orientation (rowwise `[M, K]`, colwise `[K, M]`), whose tiles run along the last dimension. Nothing here
modifies its arguments, and no step depends on more than the operand (and, where given, amax or scale), so the
same input gives the same bytes everywhere.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megafp8.fp8.formats import NAN_BYTE, OperandSpec, Scale, Tile, decode_scale, reciprocal

if TYPE_CHECKING:
    from megafp8.fp8.storage import QuantizedStorage

Stored = tuple[Tensor, Tensor]  # data, scale_inv

_CHUNK = 1 << 17
"""Elements worked on at once on CPUs, so that intermediate results stay in cache and their memory is reused."""


def _finite_part(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """`x` with NaN and Inf replaced by 0, and their mask (None if there are none and asking costs no device sync).

    BF16 and FP16 stay as they are: their products with FP32 scales are made from FP32 values, without a copy.

    A finite sum has only finite terms, and is several times cheaper than an elementwise test.
    """
    x = x.detach()
    x = x.to(torch.float32) if x.dtype == torch.float64 else x
    if x.device.type == "cpu" and math.isfinite(x.sum(dtype=torch.float32)):
        return x, None
    mask = ~x.isfinite()
    return x.masked_fill(mask, 0.0), mask


def _tiles(x: Tensor, tile_shape: tuple[int, int]) -> Tensor:
    """`[M, K]` as `[tile rows, rows a tile, tile columns, columns a tile]`, edges padded with zeros."""
    (rows, cols), (tile_rows, tile_cols) = x.shape, tile_shape
    pad_rows, pad_cols = -rows % tile_rows, -cols % tile_cols
    if pad_rows or pad_cols:
        x = F.pad(x, (0, pad_cols, 0, pad_rows))
    return x.reshape(x.shape[0] // tile_rows, tile_rows, x.shape[1] // tile_cols, tile_cols)


def _tile_shape(x: Tensor, tile: Tile, orientation: str) -> tuple[int, int]:
    """Rows and columns of a tile of the logical `[M, K]` operand."""
    if orientation == "rowwise":
        return tile.shape(*x.shape)
    return tile.shape(x.shape[1], x.shape[0])[::-1]


def _tile_amax(magnitude: Tensor, tile: Tile, orientation: str) -> Tensor:
    """FP32 amax a tile of `|x| [M, K]`, finite, in the shape of the stored orientation's scales."""
    rows, cols = magnitude.shape if orientation == "rowwise" else magnitude.shape[::-1]
    if magnitude.numel() == 0:
        return magnitude.new_zeros(tile.scale_shape(rows, cols), dtype=torch.float32)
    amax = _tiles(magnitude, _tile_shape(magnitude, tile, orientation)).amax(dim=(1, 3)).to(torch.float32)
    amax = amax if orientation == "rowwise" else amax.t().contiguous()
    return amax.view(tile.scale_shape(rows, cols))


def amax(x: Tensor, tile: Tile, orientation: str = "rowwise") -> Tensor:
    """Largest absolute finite value of each tile, FP32, in the shape of that orientation's scales."""
    step = _chunk_rows(x, tile)
    if step is None:
        return _tile_amax(_finite_part(x)[0].abs(), tile, orientation)
    parts = [_tile_amax(_finite_part(part)[0].abs(), tile, orientation) for part in x.split(step)]
    if tile.kind == "tensor":
        return torch.stack(parts).amax(0)
    return torch.cat(parts, 0 if orientation == "rowwise" else 1)


def _chunk_rows(x: Tensor, tile: Tile) -> int | None:
    """Rows of `x` a chunk, whole tiles; None where `x` is worked on at once."""
    if x.device.type != "cpu" or x.numel() < 2 * _CHUNK:
        return None
    block = tile.block or 1
    step = max(_CHUNK // x.shape[1] // block, 1) * block
    return step if step < x.shape[0] else None


tensor_amax = amax  # where an argument is called amax


def _cast(x: Tensor, scale: Tensor, spec: OperandSpec, orientation: str) -> Tensor:
    """FP8 of finite `x [M, K]` times `scale` (in the stored orientation's shape), stored as `[M, K]`."""
    if x.numel() == 0:
        return x.new_empty(x.shape, dtype=spec.format.dtype)
    if spec.tile.kind == "tensor":
        y = x * scale
    else:
        grid = scale if orientation == "rowwise" else scale.t()
        y = _tiles(x, _tile_shape(x, spec.tile, orientation)) * grid[:, None, :, None]
        y = y.reshape(y.shape[0] * y.shape[1], -1)[: x.shape[0], : x.shape[1]]
    # Casts differ by PyTorch version and format past the maximum (NaN, Inf or saturation), hence the clamp.
    return y.clamp_(-spec.format.fmax, spec.format.fmax).to(spec.format.dtype).contiguous()


def transpose(data: Tensor) -> Tensor:
    """Bytes of a 2-D FP8 tensor, physically transposed."""
    return data.view(torch.uint8).t().contiguous().view(data.dtype)


def quantize(
    x: Tensor,
    spec: OperandSpec,
    rowwise: bool = True,
    colwise: bool = False,
    amax: Tensor | None = None,
    amax_colwise: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Stored | None, Stored | None]:
    """Quantizes `x [M, K]`: (data, scale_inv) rowwise and colwise, None where not asked for.

    `amax` and `amax_colwise` replace this tensor's own (tiles shared with other ranks); tensor and 2D tiles have
    one amax for both orientations. `scale` (tensor tiles only, FP32, one element) replaces both (delayed).
    """
    tile, step = spec.tile, _chunk_rows(x, spec.tile)
    if tile.symmetric and colwise:
        row, _ = quantize(x, spec, True, False, amax, None, scale)
        return (row if rowwise else None), flip(*row, tile)
    if step is None:
        row, col = _quantize(x, spec, rowwise, colwise, amax, amax_colwise, scale)
        return row, (transpose(col[0]), col[1]) if colwise else None
    if tile.kind == "tensor" and amax is None and scale is None:
        amax = tensor_amax(x, tile)
    parts = []
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        part_amax, part_colwise = amax, amax_colwise
        if amax is not None and tile.kind != "tensor":
            part_amax = amax[rows] if tile.kind == "1d" else amax[start // tile.block : (start + step) // tile.block]
        if amax_colwise is not None:
            part_colwise = amax_colwise[:, start // tile.block : -(-min(start + step, x.shape[0]) // tile.block)]
        parts.append(_quantize(x[rows], spec, rowwise, colwise, part_amax, part_colwise, scale))
    row = _join([row for row, _ in parts], 0, 0) if rowwise else None
    if not colwise:
        return row, None
    data, scale_inv = _join([col for _, col in parts], 0, 1)
    return row, (transpose(data), scale_inv)


def _quantize(
    x: Tensor,
    spec: OperandSpec,
    rowwise: bool,
    colwise: bool,
    amax: Tensor | None,
    amax_colwise: Tensor | None,
    scale: Tensor | None,
) -> tuple[Stored | None, Stored | None]:
    """`quantize` of one chunk of rows; colwise data are not transposed yet."""
    x, mask = _finite_part(x)
    magnitude = None

    def one(orientation: str, given_amax: Tensor | None) -> Stored:
        nonlocal magnitude
        if scale is not None:
            assert spec.tile.kind == "tensor"
            multiplier, scale_inv = scale.view(1), reciprocal(scale.view(1))
        else:
            if given_amax is None:
                magnitude = x.abs() if magnitude is None else magnitude
                given_amax = _tile_amax(magnitude, spec.tile, orientation)
            multiplier, scale_inv = spec.scale_and_inverse(given_amax)
        data = _cast(x, multiplier, spec, orientation)
        if mask is not None:
            data.view(torch.uint8).masked_fill_(mask, NAN_BYTE)
        return data, scale_inv

    return (one("rowwise", amax) if rowwise else None), (one("colwise", amax_colwise) if colwise else None)


def _join(stored: list[Stored], data_dim: int, scale_dim: int) -> Stored:
    """Parts of an operand put together. Tensor tiles have one scale for all parts."""
    data, scales = zip(*stored, strict=True)
    joined = torch.cat([d.view(torch.uint8) for d in data], data_dim).view(data[0].dtype)
    if scales[0].dim() == 1:
        return joined, scales[0]
    if scales[0].dtype == torch.float8_e8m0fnu:
        raw = torch.cat([scale.view(torch.uint8) for scale in scales], scale_dim)
        return joined, raw.view(torch.float8_e8m0fnu)
    return joined, torch.cat(scales, scale_dim)


def flip(data: Tensor, scale_inv: Tensor, tile: Tile) -> Stored:
    """The other orientation of a tensor- or 2D-tiled operand: the same bytes, transposed."""
    assert tile.symmetric
    return transpose(data), (scale_inv if tile.kind == "tensor" else scale_inv.t().contiguous())


def _decode(data: Tensor) -> Tensor:
    """FP32 values of FP8 bytes. PyTorch's E4M3 cast is scalar on CPUs, so there it goes through FP16's bits."""
    if data.device.type != "cpu" or data.dtype != torch.float8_e4m3fn or not data.numel():
        return data.to(torch.float32)
    signed = data.view(torch.int8)
    if int(signed.bitwise_and(0x7F).amax()) == NAN_BYTE:
        return data.to(torch.float32)
    # As FP16 bits, sign eeee mmm is the number times 2^-8: FP16 has one more exponent bit and a bias of 15, not 7.
    half = signed.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return half.view(torch.float16).to(torch.float32).mul_(256.0)


def _dequantize(data: Tensor, scale_inv: Tensor, tile: Tile) -> Tensor:
    """FP32 values of a chunk of rows; `scale_inv` in FP32."""
    values = _decode(data)
    if tile.kind == "tensor":
        return values.mul_(scale_inv)
    y = _tiles(values, tile.shape(*data.shape)).mul_(scale_inv[:, None, :, None])
    return y.view(y.shape[0] * y.shape[1], -1)[: data.shape[0], : data.shape[1]]


def dequantize(data: Tensor, scale_inv: Tensor, tile: Tile, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of a stored operand, in its stored orientation: `RN32(data * scale_inv)`, rounded to `dtype`."""
    scale_inv = decode_scale(scale_inv)
    out = torch.empty(data.shape, dtype=dtype, device=data.device)
    if data.numel() == 0:
        return out
    step = _chunk_rows(data, tile) or data.shape[0]
    for start in range(0, data.shape[0], step):
        rows, scales = slice(start, start + step), scale_inv
        if tile.kind != "tensor":
            tile_rows = tile.shape(*data.shape)[0]
            scales = scale_inv[start // tile_rows : -(-min(start + step, data.shape[0]) // tile_rows)]
        out[rows] = _dequantize(data[rows], scales, tile)
    return out


def derive_colwise(data: Tensor, scale_inv: Tensor, spec: OperandSpec) -> Stored:
    """Colwise copy from rowwise 1D bytes: dequantize, then quantize the other way.

    For receivers of an FP8 dispatch, who never see the high-precision tensor. Scales must be powers of two: FP32
    scales would round every value a second time.
    """
    assert spec.scale is not Scale.FP32
    _, colwise = quantize(dequantize(data, scale_inv, spec.tile), spec, rowwise=False, colwise=True)
    return colwise


def quantize_grouped(
    x: Tensor, counts: list[int], spec: OperandSpec, rowwise: bool = True, colwise: bool = True
) -> tuple[Stored | None, Stored | None]:
    """Quantizes tokens sorted by expert, `x [sum(counts), K]`: tiles restart at each expert's first row.

    Returns the same pair as `quantize`. Colwise 1D scales are `[K, sum(ceil(m_e / B))]`; tensor tiles have one
    scale an expert, `[E]`.
    """
    parts = [quantize(part, spec, rowwise, colwise) for part in x.split(counts)]
    one_scale_each = spec.tile.kind == "tensor"

    def join(orientation: int) -> Stored:
        stored = [part[orientation] for part in parts]
        data, scale_inv = _join(stored, orientation, orientation)
        return data, (torch.cat([scale for _, scale in stored]) if one_scale_each else scale_inv)

    return (join(0) if rowwise else None), (join(1) if colwise else None)


def blockwise_as_mxfp8(data: Tensor, scale_inv: Tensor, tile: Tile) -> Stored:
    """Rewrites blockwise with power-of-two scales as 1D MXFP8: the same bytes, each 128-scale as four 32-scales.

    The numbers stay the same, code 0 included. Operands may be stacks of matrices.
    """
    assert tile.block % 32 == 0
    rows, cols = data.shape[-2:]
    bits = scale_inv.contiguous().view(torch.int32)
    codes = (bits >> 23).to(torch.uint8)  # powers of two in [2^-126, 2^120]: the exponent field is the code
    if tile.kind == "2d":
        codes = codes.repeat_interleave(tile.block, -2)[..., :rows, :]
    codes = codes.repeat_interleave(tile.block // 32, -1)[..., : -(-cols // 32)]
    return data, codes.contiguous().view(torch.float8_e8m0fnu)


def matmul(a: QuantizedStorage, b: QuantizedStorage, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """`A [M, K] @ B [N, K].T` of stored operands whose tiles run along K.

    One FP32 product of the dequantized operands: those are exact under power-of-two scales and rounded once
    under FP32 scales, so the result is within 1e-6 (Frobenius) of FP64. On CPUs with BF16 matrix instructions a BF16
    result of operands that are exact in BF16 comes from a BF16 product, which too adds in FP32 and rounds once. On
    GPUs, where FP32 products may run in TF32, the product is FP64.
    """
    on_cpu = a.data.device.type == "cpu"
    if on_cpu and out_dtype == torch.bfloat16 and _fast_bf16():
        x, y = _exact_bf16(a), _exact_bf16(b)
        if x is not None and y is not None:
            return x @ y.t()
    dtype = torch.float32 if on_cpu else torch.float64
    return (a.dequantize(dtype) @ b.dequantize(dtype).t()).to(out_dtype)


def matmul_emulated(a: QuantizedStorage, b: QuantizedStorage, out_dtype: torch.dtype = torch.float32) -> Tensor:
    """The same product from a GPU's BF16 tensor cores, for formats that it has no instructions for.

    Under power-of-two scales values are exact in BF16, but that below 2^-130 they are rounded to a multiple of 2^-133:
    nobody waits for the scales to find out. Operands with FP32 scales are multiplied by `matmul`.
    """
    if Scale.FP32 in (a.scale, b.scale):
        return matmul(a, b, out_dtype)
    return torch.mm(a.dequantize(torch.bfloat16), b.dequantize(torch.bfloat16).t(), out_dtype=out_dtype)


@cache
def _fast_bf16() -> bool:
    """Whether this CPU has matrix instructions for BF16 with FP32 sums."""
    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(capabilities.get("amx_bf16"))


def _exact_bf16(storage: QuantizedStorage) -> Tensor | None:
    """The dequantized values in BF16, None where that would round them (or make subnormals, which CPUs flush)."""
    if storage.scale is Scale.FP32 or storage.data.numel() == 0:
        return None
    low, high = decode_scale(storage.scale_inv).aminmax()
    if low >= 2.0**-100 and high <= 2.0**100:
        return storage.dequantize(torch.bfloat16)
    magnitude = storage.dequantize().abs()  # a tile of zeros has the smallest scale, and is exact
    tiny = (magnitude < 2.0**-110) & (magnitude > 0)
    return None if bool((tiny | (magnitude > 2.0**110)).any()) else storage.dequantize(torch.bfloat16)


def matmul_promoted(a: QuantizedStorage, b: QuantizedStorage) -> Tensor:
    """The same product in the order of the blockwise kernels: `y += p * scale_inv_A * scale_inv_B` a K block.

    `p` is the FP32 dot product of one block's raw FP8 values. Slower than `matmul`; an oracle for kernels.
    """
    block = a.tile.block
    (m, k), n = a.data.shape, b.data.shape[0]
    a_scale, b_scale = _row_scales(a, m), _row_scales(b, n)
    a_data, b_data = _decode(a.data), _decode(b.data)
    y = torch.zeros(m, n, dtype=torch.float32, device=a.data.device)
    for index, start in enumerate(range(0, k, block)):
        partial = a_data[:, start : start + block] @ b_data[:, start : start + block].t()
        y += partial * a_scale[:, index, None] * b_scale[None, :, index]
    return y


def _row_scales(storage: QuantizedStorage, rows: int) -> Tensor:
    """Scales a row and K block, `[rows, ceil(K / block)]` FP32, of a 1D or 2D operand."""
    scale = decode_scale(storage.scale_inv)
    return scale if storage.tile.kind == "1d" else scale.repeat_interleave(storage.tile.block, 0)[:rows]
