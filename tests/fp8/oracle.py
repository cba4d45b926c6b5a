"""A second derivation of NUMERICS' quantization in NumPy and ml_dtypes: loops over tiles, shares no code with fp8."""

import ml_dtypes
import numpy as np
import torch

DTYPES = {"e4m3": (ml_dtypes.float8_e4m3fn, 448.0), "e5m2": (ml_dtypes.float8_e5m2, 57344.0)}


def bits_to_float(bits: int) -> np.float32:
    return np.array([bits], np.uint32).view(np.float32)[0]


def e8m0_code(amax: np.float32) -> int:
    value = np.float32(amax) * (np.float32(1) / np.float32(448))
    if float(value) <= 2.0**-127:
        return 0
    mantissa, exponent = np.frexp(float(value))  # value = mantissa * 2^exponent, mantissa in [0.5, 1)
    return min(int(exponent) - (1 if mantissa == 0.5 else 0) + 127, 254)


def tile_scale(amax: np.float32, fmax: float, kind: str, epsilon: float):
    """(multiplier as FP32, stored scale_inv)."""
    if kind == "e8m0":
        code = e8m0_code(amax)
        return np.float32(2.0 ** (127 - code)), np.uint8(code)
    a = max(np.float32(amax), np.float32(epsilon))
    if a == 0:
        return np.float32(1), np.float32(1)
    with np.errstate(over="ignore"):
        s = np.float32(fmax) / np.float32(a)
    s = min(s, np.float32(2.0**126))
    if kind == "pow2":
        s = np.float32(2.0 ** (np.frexp(float(s))[1] - 1))
    return s, np.float32(1) / s


def quantize(x: torch.Tensor, fmt: str, tile, kind: str, orientation: str, epsilon: float = 0.0):
    """(data bytes, scale_inv) of `x`, in the stored orientation. `tile` is "tensor" or (rows, cols)."""
    values = x.detach().to(torch.float32).numpy()
    if orientation == "colwise":
        values = values.T
    dtype, fmax = DTYPES[fmt]
    rows, cols = values.shape
    tile_rows, tile_cols = (max(rows, 1), max(cols, 1)) if tile == "tensor" else tile
    data = np.zeros((rows, cols), np.uint8)
    grid = (-(-rows // tile_rows), -(-cols // tile_cols))
    scales = np.zeros(grid, np.uint8 if kind == "e8m0" else np.float32)
    for i in range(grid[0]):
        for j in range(grid[1]):
            box = np.s_[i * tile_rows : (i + 1) * tile_rows, j * tile_cols : (j + 1) * tile_cols]
            part = values[box]
            finite = np.isfinite(part)
            amax = np.abs(part[finite]).max(initial=np.float32(0))
            s, scales[i, j] = tile_scale(amax, fmax, kind, epsilon)
            scaled = np.clip(np.where(finite, part, 0).astype(np.float32) * s, -fmax, fmax)
            data[box] = np.where(finite, scaled.astype(np.float32).astype(dtype).view(np.uint8), 0x7F)
    if tile == "tensor":
        scales = scales.reshape(-1) if scales.size else np.ones(1, np.float32)
    return torch.from_numpy(data), torch.from_numpy(np.ascontiguousarray(scales))
