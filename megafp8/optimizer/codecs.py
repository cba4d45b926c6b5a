"""How optimizer state is stored below FP32: formats, rounding and random bits, in PyTorch.

BF16 moments round stochastically: to a neighbour with a probability that makes the expected value exact, so that steps
far below BF16's resolution are not lost. The random bits are a function of seed, step, the parameter's global name and
box, and the element in it, so they depend neither on the number of data-parallel ranks nor on what ran before.

FP8 moments: 64 elements share an amax `a` and an expansion `k`, one of 8, 4, 2, 1, and are stored as E4M3 bytes of
`448 (|x| / a)^k`, rounded stochastically, with their sign. That is the dynamic range expansion of COAT (Xi et al.,
2024, section 4.2) with powers of two as exponents, so that only products are needed, which round alike on every device.
`k` is the largest for which the block's smallest element is at least 2^-6, E4M3's smallest normal number. Of the second
moment the root is stored, which halves its range in bits, and no root but 0 becomes 0: it would divide by eps alone.

Masters may be the BF16 weight and 16 bits: `bits(master) = (weight << 16) + remainder`, the remainder signed. So the
weight is the master rounded half up (away from zero), where FP32 masters round half to even.
"""

from __future__ import annotations

import hashlib
from functools import cache

import torch
from torch import Tensor

from megafp8.optimizer.adamw import sqrt_rn

BLOCK = 64
"""Elements of an FP8 block: neither a parameter nor a shard begins inside one (`layout.ALIGNMENT`)."""
EXPANSIONS = (8, 4, 2, 1)
"""Exponents, by code."""
SMALLEST_AMAX = 2.0**-126
"""Blocks below are stored as zero, so that `1 / amax` is finite."""
FMAX, SMALLEST_NORMAL, SMALLEST = 448.0, 2.0**-6, 2.0**-9
_ROUNDS_TO_NORMAL = SMALLEST_NORMAL - SMALLEST / 2
_MASK32 = 0xFFFFFFFF


def key_of(seed: int, name: str) -> int:
    """32 bits for the random bits of a parameter."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=4).digest(), "little")


def _mix(x: Tensor) -> Tensor:
    """The hash `lowbias32` of 32 bits in int64."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & _MASK32
    x = x ^ (x >> 15)
    x = x * 0x846CA68B & _MASK32
    return x ^ (x >> 16)


def random_words(index: Tensor, key: int, step: Tensor) -> Tensor:
    """32 random bits (int64) for each element `index` (int64) of a parameter, at an update (int64 scalar)."""
    seed = _mix((_mix(step & _MASK32) ^ key) & _MASK32)
    return _mix((index * 0x9E3779B9 + seed) & _MASK32)


def round_to_bf16(x: Tensor, random: Tensor) -> Tensor:
    """BF16 of finite FP32 `x`, rounded stochastically with 16 random bits (int64) an element."""
    bits = x.view(torch.int32) + random.to(torch.int32)
    return (bits & -0x10000).view(torch.float32).bfloat16()


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """FP32 -> (BF16 weight, rounded half up; int16 remainder)."""
    bits = master.view(torch.int32)
    weight = (bits + 0x8000 & -0x10000).view(torch.float32).bfloat16()
    return weight, bits.to(torch.int16)


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """The FP32 master that was split, bit for bit."""
    return ((weight.view(torch.int16).int() << 16) + remainder.int()).view(torch.float32)


def _expanded(ratio: Tensor, code: int) -> Tensor:
    """`448 ratio^k`, every operation rounded once."""
    for _ in range(3 - code):
        ratio = ratio * ratio
    return ratio * FMAX


def encode_fp8(
    x: Tensor, random: Tensor | None, *, keep: bool, code: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """FP32 `x`, flat, in blocks -> (bytes as uint8, amaxes FP32 [blocks], codes uint8 [blocks]).

    random: 16 bits (int64) an element; None rounds to nearest. keep: nothing but 0 becomes 0. code: instead of the
    rule's.
    """
    x = x.view(-1, BLOCK)
    size = x.abs()
    amax = size.amax(1)
    amax = torch.where(amax < SMALLEST_AMAX, 0.0, amax)
    inverse = torch.div(torch.ones_like(amax), amax.clamp(min=SMALLEST_AMAX))
    if code is None:
        smallest = torch.where(size == 0, torch.inf, size).amin(1) * inverse
        code = torch.full_like(amax, len(EXPANSIONS) - 1, dtype=torch.uint8)
        for candidate in range(len(EXPANSIONS) - 2, -1, -1):
            code[_expanded(smallest, candidate) >= _ROUNDS_TO_NORMAL] = candidate
    ratio = torch.where(size == amax[:, None], 1.0, size * inverse[:, None])
    y = torch.empty_like(ratio)
    for candidate in range(len(EXPANSIONS)):
        y = torch.where((code == candidate)[:, None], _expanded(ratio, candidate), y)
    shift = torch.where(y < SMALLEST_NORMAL, SMALLEST_NORMAL, 0.0)  # E4M3's subnormal grid is that of [2^-6, 2^-5)
    noise = 1 << 19 if random is None else (random.view(-1, BLOCK) * 16).int()
    bits = (y + shift).view(torch.int32) + noise
    y = (bits & -0x100000).view(torch.float32) - shift
    y = y.clamp(min=SMALLEST) if keep else y
    y = torch.where((size == 0) | (amax == 0)[:, None], 0.0, y)
    stored = torch.where(x < 0, 0.0 - y, y).clamp(-FMAX, FMAX).to(torch.float8_e4m3fn).view(torch.uint8)
    return stored.view(-1), amax, code


@cache
def _decoding_table() -> Tensor:
    magnitude = torch.arange(128, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ratio = torch.div(magnitude, torch.full_like(magnitude, FMAX))
    rows = []
    for code in range(len(EXPANSIONS)):
        row = ratio
        for _ in range(3 - code):
            row = sqrt_rn(row)
        rows.append(row)
    return torch.stack(rows)


def decoding_table(device: torch.device) -> Tensor:
    """FP32 [codes, 128]: `(byte / 448)^(1/k)` of the bytes 0 to 127; times the amax it is the element's magnitude."""
    return _decoding_table().to(device)


def decode_fp8(stored: Tensor, amax: Tensor, code: Tensor, table: Tensor) -> Tensor:
    """FP32 values, flat, of what `encode_fp8` gave. table: `decoding_table` of the device."""
    byte = stored.view(-1, BLOCK).int()
    magnitude = table.view(-1)[code.int()[:, None] * 128 + (byte & 127)] * amax[:, None]
    return torch.where(byte >= 128, -magnitude, magnitude).view(-1)


def restore_fp8(x: Tensor, table: Tensor, *, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Encodes values that were decoded before, in the same blocks, so that they decode to the same bits.

    A block that no expansion holds exactly (from other blocks, or from FP32) is encoded by the rule, to nearest.
    """
    stored, amax, code = encode_fp8(x, None, keep=keep)
    for candidate in range(len(EXPANSIONS)):
        trial = encode_fp8(x, None, keep=keep, code=torch.full_like(code, candidate))
        same = (decode_fp8(*trial, table) == x).view(-1, BLOCK).all(1)
        code = torch.where(same, trial[2], code)
        stored = torch.where(same[:, None], trial[0].view(-1, BLOCK), stored.view(-1, BLOCK)).view(-1)
    return stored, amax, code
