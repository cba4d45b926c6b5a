"""Number formats, tiles, and scales made from bits.

A value `x` is stored as `cast(x * s)`, and read back as `data * scale_inv`. This module knows what the 8-bit
formats look like, how an operand is cut into tiles that share a scale, and how power-of-two scales are built
exactly: `exp2`, `log2` and PyTorch's own E8M0 cast round otherwise, so exponents are read from and written to
the bits of FP32 numbers.
"""

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from torch import Tensor

NAN_BYTE = 0x7F  # a NaN or Inf element of either sign, in both formats
MAX_SCALE = 2.0**126  # so that 1 / scale is never subnormal, which GPUs may flush to zero
_MANTISSA_BITS = 23
_HALF_MANTISSA = 1 << (_MANTISSA_BITS - 1)  # as a subnormal FP32: 2^-127
_RECIPROCAL_448 = 1.0 / 448.0  # rounded to FP32 before use


@dataclass(frozen=True)
class Format:
    """An 8-bit floating point format: its name, torch dtype and largest finite value."""

    name: str
    dtype: torch.dtype
    fmax: float


E4M3 = Format("e4m3", torch.float8_e4m3fn, 448.0)
E5M2 = Format("e5m2", torch.float8_e5m2, 57344.0)
FORMATS = {f.name: f for f in (E4M3, E5M2)}


def format_of(dtype: torch.dtype) -> Format:
    """The Format stored in tensors of `dtype`."""
    return next(f for f in FORMATS.values() if f.dtype == dtype)


class Scale(Enum):
    """What a scale may be: any FP32 number, an FP32 power of two, or an E8M0 byte (MXFP8)."""

    FP32 = "fp32"
    POW2 = "pow2"
    E8M0 = "e8m0"


@dataclass(frozen=True)
class Tile:
    """How an operand is cut into tiles that share one scale.

    `kind` is "tensor" (one tile), "1d" (`1 x block` along the contraction dimension) or "2d"
    (`block x block`). Tiles start at the origin; edge tiles behave as if padded with zeros.
    """

    kind: str
    block: int = 0

    def __post_init__(self) -> None:
        assert self.kind in ("tensor", "1d", "2d")
        assert (self.block > 0) == (self.kind != "tensor")

    def shape(self, rows: int, cols: int) -> tuple[int, int]:
        """Rows and columns of one tile of a stored `[rows, cols]` operand."""
        if self.kind == "tensor":
            return max(rows, 1), max(cols, 1)
        return (1 if self.kind == "1d" else self.block), self.block

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Shape of the scales of a stored `[rows, cols]` operand."""
        if self.kind == "tensor":
            return (1,)
        tile_rows, tile_cols = self.shape(rows, cols)
        return -(-rows // tile_rows), -(-cols // tile_cols)

    @property
    def symmetric(self) -> bool:
        """Whether rowwise and colwise copies hold the same bytes, transposed."""
        return self.kind != "1d"


def scale_from_amax(amax: Tensor, fmax: float, power_of_two: bool, epsilon: float = 0.0) -> Tensor:
    """FP32 scales `s` from FP32 amaxes (finite, >= 0), of the same shape.

    `s = RN32(fmax / max(amax, epsilon))`, 1 where that is 0, clamped to 2^126; powers of two round down, so
    that nothing saturates. The division is of two tensors: `number / tensor` is a reciprocal and a product.
    """
    amax = amax.clamp(min=epsilon) if epsilon else amax
    scale = torch.div(torch.full_like(amax, fmax), amax).clamp_(max=MAX_SCALE)
    if power_of_two:
        scale = power_of_two_floor(scale)
    return torch.where(amax == 0, torch.ones_like(scale), scale)


def power_of_two_floor(scale: Tensor) -> Tensor:
    """The largest power of two <= each FP32 `scale`, normal and positive: its mantissa cleared."""
    return (scale.view(torch.int32) & -(1 << _MANTISSA_BITS)).view(torch.float32)


def reciprocal(scale: Tensor) -> Tensor:
    """`scale_inv = RN32(1 / scale)`, correctly rounded."""
    return torch.div(torch.ones_like(scale), scale)


def e8m0_from_amax(amax: Tensor) -> Tensor:
    """E8M0 scale_inv (`float8_e8m0fnu`) from FP32 amaxes, for E4M3 elements.

    The smallest power of two >= `amax / 448`: rounded up, so that nothing saturates. 0 and all up to 2^-127
    give code 0.
    """
    value = amax * torch.full((), _RECIPROCAL_448, dtype=torch.float32, device=amax.device)
    bits = value.view(torch.int32)
    exponent, mantissa = bits >> _MANTISSA_BITS, bits & ((1 << _MANTISSA_BITS) - 1)
    threshold = torch.where(exponent == 0, _HALF_MANTISSA, 0)  # a subnormal 2^-127 still has code 0
    code = exponent + (mantissa > threshold)
    return code.clamp_(max=254).to(torch.uint8).view(torch.float8_e8m0fnu)


def _power_of_two(biased_exponent: Tensor) -> Tensor:
    """FP32 `2^(biased_exponent - 127)`, exact for 0 (subnormal) to 254; NaN for 255."""
    bits = torch.where(biased_exponent == 0, _HALF_MANTISSA, biased_exponent << _MANTISSA_BITS)
    return torch.where(biased_exponent == 255, 0x7FC00000, bits).to(torch.int32).view(torch.float32)


def e8m0_decode(scale_inv: Tensor) -> Tensor:
    """FP32 values of E8M0 bytes: exactly `2^(code - 127)`, NaN for 255."""
    return _power_of_two(scale_inv.view(torch.uint8).to(torch.int32))


def e8m0_multiplier(scale_inv: Tensor) -> Tensor:
    """FP32 `2^(127 - code)`: what elements are multiplied by before the cast."""
    return _power_of_two(254 - scale_inv.view(torch.uint8).to(torch.int32))


def decode_scale(scale_inv: Tensor) -> Tensor:
    """scale_inv as FP32, whatever it is stored as."""
    return e8m0_decode(scale_inv) if scale_inv.dtype == torch.float8_e8m0fnu else scale_inv


@dataclass(frozen=True)
class OperandSpec:
    """How one operand is stored: format, tile, what its scales may be, and the floor under its amaxes."""

    format: Format
    tile: Tile
    scale: Scale
    amax_epsilon: float = 0.0

    @cached_property
    def _hash(self) -> int:
        return hash((self.format, self.tile, self.scale, self.amax_epsilon))

    def __hash__(self) -> int:
        """Worked out once: every launch of a kernel is looked up by its spec."""
        return self._hash

    def __reduce__(self) -> tuple:
        return OperandSpec, (self.format, self.tile, self.scale, self.amax_epsilon)  # hashes are a process's own

    def scale_and_inverse(self, amax: Tensor) -> tuple[Tensor, Tensor]:
        """From FP32 amaxes: the FP32 multiplier of the elements, and scale_inv as it is stored."""
        if self.scale is Scale.E8M0:
            scale_inv = e8m0_from_amax(amax)
            return e8m0_multiplier(scale_inv), scale_inv
        scale = scale_from_amax(amax, self.format.fmax, self.scale is Scale.POW2, self.amax_epsilon)
        return scale, reciprocal(scale)
