"""The numerics of everything in `fp8`, in PyTorch: the CPU backend, and the oracle of every kernel.

Functions work on plain tensors. `x` is a high-precision `[M, K]` operand of any strides; results are in the
stored orientation (rowwise `[M, K]`, colwise `[K, M]`), whose tiles run along the last dimension. Nothing here
modifies its arguments, and no step depends on more than the operand (and, where given, amax or scale), so the
same input gives the same bytes everywhere.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megafp8.fp8.formats import NAN_BYTE, OperandSpec, Scale, Tile, decode_scale, reciprocal

if TYPE_CHECKING:
    from megafp8.fp8.storage import QuantizedStorage

Stored = tuple[Tensor, Tensor]  # data, scale_inv


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
    return _tile_amax(_finite_part(x)[0].abs(), tile, orientation)


def _cast(x: Tensor, scale: Tensor, spec: OperandSpec, orientation: str) -> Tensor:
    """FP8 of finite `x [M, K]` times `scale` (in the stored orientation's shape), stored as `[M, K]`."""
    if x.numel() == 0:
        return x.new_empty(x.shape, dtype=spec.format.dtype)
    if spec.tile.kind == "tensor":
        y = x * scale
    else:
        grid = scale if orientation == "rowwise" else scale.t()
        y = _tiles(x, _tile_shape(x, spec.tile, orientation)) * grid[:, None, :, None]
        y = y.view(y.shape[0] * y.shape[1], -1)[: x.shape[0], : x.shape[1]]
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
    x, mask = _finite_part(x)
    own_amax = scale is None and ((rowwise and amax is None) or (colwise and amax_colwise is None))
    magnitude = x.abs() if own_amax else None

    def one(orientation: str, given_amax: Tensor | None) -> Stored:
        if scale is not None:
            assert spec.tile.kind == "tensor"
            multiplier, scale_inv = scale.view(1), reciprocal(scale.view(1))
        else:
            own = _tile_amax(magnitude, spec.tile, orientation) if given_amax is None else given_amax
            multiplier, scale_inv = spec.scale_and_inverse(own)
        data = _cast(x, multiplier, spec, orientation)
        if mask is not None:
            data.view(torch.uint8).masked_fill_(mask, NAN_BYTE)
        return (data if orientation == "rowwise" else transpose(data)), scale_inv

    if spec.tile.symmetric:
        row = one("rowwise", amax)
        return (row if rowwise else None), (flip(*row, spec.tile) if colwise else None)
    return (one("rowwise", amax) if rowwise else None), (one("colwise", amax_colwise) if colwise else None)


def flip(data: Tensor, scale_inv: Tensor, tile: Tile) -> Stored:
    """The other orientation of a tensor- or 2D-tiled operand: the same bytes, transposed."""
    assert tile.symmetric
    return transpose(data), (scale_inv if tile.kind == "tensor" else scale_inv.t().contiguous())


def _decode(data: Tensor) -> Tensor:
    """FP32 values of FP8 bytes. PyTorch's E4M3 cast is scalar on CPUs, so there it goes through FP16's bits."""
    if data.device.type != "cpu" or data.dtype != torch.float8_e4m3fn:
        return data.to(torch.float32)
    signed = data.view(torch.int8)
    if bool((signed.bitwise_and(0x7F) == 0x7F).any()):
        return data.to(torch.float32)
    # As FP16 bits, sign eeee mmm is the number times 2^-8: FP16 has one more exponent bit and a bias of 15, not 7.
    half = signed.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(-0x4080)
    return half.view(torch.float16).to(torch.float32).mul_(256.0)


def dequantize(data: Tensor, scale_inv: Tensor, tile: Tile) -> Tensor:
    """FP32 values of a stored operand, in its stored orientation: `RN32(data * scale_inv)`."""
    values, scale_inv = _decode(data), decode_scale(scale_inv)
    if tile.kind == "tensor" or values.numel() == 0:
        return values * scale_inv if values.numel() else values
    tile_shape = tile.shape(*data.shape)
    if data.shape[0] % tile_shape[0] == 0 and data.shape[1] % tile_shape[1] == 0:
        return _tiles(values, tile_shape).mul_(scale_inv[:, None, :, None]).view(data.shape)
    y = _tiles(values, tile_shape) * scale_inv[:, None, :, None]
    return y.view(y.shape[0] * y.shape[1], -1)[: data.shape[0], : data.shape[1]].contiguous()


def derive_colwise(data: Tensor, scale_inv: Tensor, spec: OperandSpec) -> Stored:
    """Colwise copy from rowwise 1D bytes: dequantize, then quantize the other way.

    For receivers of an FP8 dispatch, who never see the high-precision tensor. Scales must be powers of two: FP32
    scales would round every value a second time.
    """
    assert spec.scale is not Scale.FP32
    _, colwise = quantize(dequantize(data, scale_inv, spec.tile), spec, rowwise=False, colwise=True)
    return colwise


def quantize_grouped(x: Tensor, counts: list[int], spec: OperandSpec, rowwise: bool = True, colwise: bool = True):
    """Quantizes tokens sorted by expert, `x [sum(counts), K]`: tiles restart at each expert's first row.

    Returns the same pair as `quantize`. Colwise 1D scales are `[K, sum(ceil(m_e / B))]`; tensor tiles have one
    scale an expert, `[E]`.
    """
    parts = [quantize(part, spec, rowwise, colwise) for part in x.split(counts)]

    def join(index: int, dim: int) -> Stored:
        scale_dim = 0 if spec.tile.kind == "tensor" else dim
        data = torch.cat([p[index][0].view(torch.uint8) for p in parts], dim).view(spec.format.dtype)
        scales = [p[index][1] for p in parts]
        raw = torch.cat([s.view(torch.uint8) if spec.scale is Scale.E8M0 else s for s in scales], scale_dim)
        return data, raw.view(scales[0].dtype)

    return (join(0, 0) if rowwise else None), (join(1, 1) if colwise else None)


def blockwise_as_mxfp8(data: Tensor, scale_inv: Tensor, tile: Tile) -> Stored:
    """Rewrites blockwise with power-of-two scales as 1D MXFP8: the same bytes, each 128-scale as four 32-scales.

    The numbers stay the same, code 0 included.
    """
    assert tile.block % 32 == 0
    rows, cols = data.shape
    bits = scale_inv.contiguous().view(torch.int32)
    codes = (bits >> 23).to(torch.uint8)  # powers of two in [2^-126, 2^120]: the exponent field is the code
    if tile.kind == "2d":
        codes = codes.repeat_interleave(tile.block, 0)[:rows]
    codes = codes.repeat_interleave(tile.block // 32, 1)[:, : -(-cols // 32)]
    return data, codes.contiguous().view(torch.float8_e8m0fnu)


def matmul(a: QuantizedStorage, b: QuantizedStorage) -> Tensor:
    """`A [M, K] @ B [N, K].T` in FP32, of stored operands whose tiles run along K.

    One FP32 product of the dequantized operands: those are exact under power-of-two scales and rounded once
    under FP32 scales, so the result is within 1e-6 (Frobenius) of FP64.
    """
    return a.dequantize() @ b.dequantize().t()


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
