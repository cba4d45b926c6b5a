"""Launch configurations of the quantization kernels: a short table, measured on an H200, no tuning at run time.

docs/quantize_kernels.md has the measurements. Tests compile every configuration, and check its bytes.
"""

import functools
from typing import NamedTuple

import torch


class Config(NamedTuple):
    """Register tile and launch of one kernel.

    r, c: rows and columns of the tile that a thread owns side by side (see quantize_device).
    maxnreg: register cap a thread, 0 for none. ctas: programs a multiprocessor of kernels that walk over tiles.
    """

    block_m: int
    block_k: int
    num_warps: int
    r: int = 1
    c: int = 16
    maxnreg: int = 0
    ctas: int = 0

    def options(self) -> dict:
        """The keyword arguments of a launch."""
        options = {"BLOCK_M": self.block_m, "BLOCK_K": self.block_k, "R": self.r, "C": self.c, "W": self.num_warps}
        options["num_warps"] = self.num_warps
        return options | {"maxnreg": self.maxnreg} if self.maxnreg else options

    def grid(self, rows: int, columns: int, device: torch.device) -> tuple[int]:
        """One program a tile (at least one), or as many as stay on the device together."""
        tiles = max(1, -(-rows // self.block_m) * -(-columns // self.block_k))
        return (min(tiles, self.ctas * multiprocessors(device)) if self.ctas else tiles,)

    def even(self, rows: int, columns: int) -> bool:
        """Whether register tiles cover the tensor exactly, so that no access needs a mask."""
        return rows * columns > 0 and rows % self.block_m == 0 and columns % self.block_k == 0


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


ROWS = Config(32, 128, 4)
COLUMNS = Config(128, 64, 4, r=8, c=8)
BOTH = Config(128, 128, 8, r=4)
BOTH_32 = Config(64, 128, 4, r=4)  # quantization tiles of at most 32
SQUARES = Config(128, 128, 8, r=8, c=8)
AMAX = Config(1, 4096, 4, ctas=8)
AMAX_STRIDED = Config(64, 128, 8, ctas=4)
CAST = Config(1, 4096, 4)
CAST_TRANSPOSED = Config(128, 128, 8, r=4)
GROUPED = Config(128, 128, 8, r=4)
GROUPED_COLUMNS = Config(128, 64, 4, r=8, c=8)
TRANSPOSE = Config(128, 128, 4, r=8)
NORM_COLUMNS = Config(128, 64, 4, r=8, c=8)
NORM_BOTH = Config(128, 128, 8, r=4)
SWIGLU_ROWS = Config(64, 128, 8, r=2)
SWIGLU_COLUMNS = Config(128, 64, 8, r=4, c=8)
SWIGLU_BOTH = Config(128, 128, 16, r=8, c=4)
SWIGLU_GRAD = Config(128, 128, 16, r=8, c=4, maxnreg=64)
SWIGLU_GRAD_HIGH_PRECISION = Config(128, 128, 16, r=4, c=8)


def norm_rows_config(hidden: int) -> Config:
    """One program a row of `hidden` elements, `block_k` at a time, which it reads twice.

    Few warps a row mean few instructions an element, but many rows under way: so many that all fit into L1.
    """
    warps = min(16, 1 << max(0, -(-hidden // 1800) - 1).bit_length())
    return Config(1, 512 * warps, warps)
