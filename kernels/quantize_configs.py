"""Launch configurations of the quantization kernels: a short table, measured on an H200, no tuning at run time.

docs/quantize_kernels.md has the measurements. Every configuration in `ALL` is compiled and byte-checked by tests.
"""

import functools
from typing import NamedTuple

import torch


class Config(NamedTuple):
    """Register tile and launch of one kernel.

    ctas: programs a multiprocessor that stay and walk over tiles; 0: one program a tile.
    stages: software-pipelining depth of that walk. maxnreg: register cap a thread, 0 for none.
    """

    block_m: int
    block_k: int
    num_warps: int
    ctas: int = 0
    stages: int = 1
    maxnreg: int = 0

    @property
    def j(self) -> int:
        """Rows a thread holds: a warp covers 4 rows of 128 elements, 16 a thread (see quantize_device)."""
        return max(1, min(self.block_m, self.block_m * self.block_k // (512 * self.num_warps)))

    def constants(self) -> dict:
        return {"BLOCK_M": self.block_m, "BLOCK_K": self.block_k, "J": self.j, "STAGES": self.stages}

    def options(self) -> dict:
        options = {"num_warps": self.num_warps}
        return options | {"maxnreg": self.maxnreg} if self.maxnreg else options

    def grid(self, rows: int, columns: int, device: torch.device) -> tuple[int]:
        tiles = max(1, -(-rows // self.block_m) * -(-columns // self.block_k))
        if not self.ctas:
            return (tiles,)
        return (min(tiles, self.ctas * multiprocessors(device)),)

    def even(self, rows: int, columns: int) -> bool:
        """Whether register tiles cover the tensor exactly, so that no access needs a mask."""
        return rows % self.block_m == 0 and columns % self.block_k == 0


@functools.cache
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return torch.cuda.get_device_properties(device).multi_processor_count


ROWS = Config(32, 128, 4)
BOTH = Config(128, 128, 8, maxnreg=128)
COLUMNS = Config(128, 128, 8, maxnreg=128)
SQUARES = Config(128, 128, 8, maxnreg=128)
AMAX = Config(1, 8192, 8, ctas=8)
AMAX_STRIDED = Config(64, 128, 8, ctas=4)
CAST = Config(1, 8192, 8)
CAST_TRANSPOSED = Config(128, 128, 8, maxnreg=128)
GROUPED = Config(128, 128, 8, maxnreg=128)
TRANSPOSE = Config(128, 128, 8)
NORM_COLUMNS = Config(128, 128, 8, maxnreg=128)
SWIGLU_ROWS = Config(32, 128, 4)
SWIGLU_BOTH = Config(128, 128, 16)
SWIGLU_GRAD = Config(128, 128, 16)


def norm_rows_config(hidden: int) -> Config:
    """One program normalizes whole rows, up to 16384 elements of them in registers at once."""
    width = 1 << max(hidden - 1, 1).bit_length()
    rows = max(1, 8192 // width)
    return Config(rows, width, 4 if rows * width <= 4096 else 8 if width <= 8192 else 16)
