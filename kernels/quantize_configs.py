"""Launch configurations of the quantization kernels: a short table, measured on an H200, no tuning at run time.

docs/quantize_kernels.md has the measurements. Tests compile every configuration, and check its bytes.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch


class Config(NamedTuple):
    """Register tile and launch of one kernel.

    r, c: rows and columns of the tile that a thread owns side by side (see quantize_device).
    maxnreg: register cap a thread, 0 for none. ctas: programs a multiprocessor of kernels that walk over tiles.
    held: see `NormRows`. slab: rows whose rstd is made before the tiles of the rows before them, in one launch; 0: two.
    rows: how many rows of a tile are worked on at a time (r of them a thread); 0: all of them.
    """

    block_m: int
    block_k: int
    num_warps: int
    r: int = 1
    c: int = 16
    maxnreg: int = 0
    ctas: int = 0
    held: bool = False
    slab: int = 0
    rows: int = 0

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


class NormRows(NamedTuple):
    """How `norm_rows_kernel` cuts rows: elements of a row a thread has (about), rows a program, and whether they stay
    in registers between its two loops (else they are read again, from L1)."""

    elements: int
    rows: int = 1
    held: bool = True
    maxnreg: int = 0

    def config(self, hidden: int) -> Config:
        warps = 1
        while warps < 16 and hidden > 32 * warps * self.elements:
            warps *= 2
        c = 16 if hidden % (512 * warps) == 0 else 8
        held = self.held and self.rows * hidden <= 32 * warps * 256
        return Config(self.rows, 32 * c * warps, warps, self.rows, c, self.maxnreg, held=held)


CONFIGS: dict[str, tuple[Config | NormRows, ...]] = {
    # The first one is used. The others were timed beside it, and are held to the same bytes by tests.
    "rows": (Config(32, 128, 4), Config(32, 256, 4), Config(32, 128, 8, c=8)),
    "columns": (Config(128, 64, 4, r=8, c=8), Config(128, 64, 4, c=8, rows=32)),
    "both": (Config(128, 128, 8, r=4), Config(128, 128, 8, rows=32, maxnreg=64)),
    # Quantization tiles of at most 32.
    "both of 32": (Config(64, 128, 4, r=4), Config(128, 128, 8, rows=32, maxnreg=64)),
    "squares": (Config(128, 128, 8, r=8, c=8),),
    "squares of 32": (Config(128, 128, 8, r=4), Config(128, 128, 8, r=8, c=8)),
    "amax": (Config(1, 4096, 4, ctas=8),),
    "amax strided": (Config(64, 128, 8, ctas=4),),
    "cast": (Config(1, 8192, 4),),
    "cast transposed": (Config(128, 128, 8, r=4),),
    "grouped": (Config(128, 128, 8, r=4), Config(128, 128, 8, rows=32, maxnreg=64)),
    "grouped rows": (Config(64, 128, 4, r=2),),
    "grouped columns": (Config(128, 64, 4, r=8, c=8),),
    "grouped derived": (Config(128, 128, 8, r=4, maxnreg=80), Config(128, 128, 16, r=4, c=8, maxnreg=64)),
    # One scale an expert.
    "row amax": (Config(8, 512, 4), Config(4, 512, 4), Config(16, 512, 8)),
    "experts": (Config(128, 128, 8, r=4), Config(128, 128, 8, r=4, maxnreg=80), Config(64, 128, 4, r=4)),
    "derived": (
        Config(128, 64, 4, r=8, c=8),
        Config(128, 64, 4, r=4, c=16, maxnreg=80),
        Config(128, 64, 8, r=4, c=8),
        Config(128, 128, 16, r=8, c=4, maxnreg=64),
    ),
    "transpose": (Config(128, 128, 8, r=4),),
    "norm rows": (NormRows(64), NormRows(64, rows=2)),
    "norm both": (
        Config(128, 128, 8, r=4, slab=512),
        Config(128, 128, 8, r=4, slab=1024),
        Config(128, 128, 8, rows=32, maxnreg=64, slab=512),
        Config(128, 128, 8, rows=32, maxnreg=80, slab=512),
        Config(128, 128, 8, rows=32, maxnreg=64),
    ),
    "norm columns": (Config(128, 64, 4, r=8, c=8), Config(128, 128, 8, rows=32), Config(128, 64, 4, c=8, rows=32)),
    "swiglu rows": (Config(128, 128, 8, rows=32, maxnreg=64), Config(32, 128, 8, c=8), Config(32, 128, 4)),
    # Under a tensor tile, with fc1's output as bytes beside them, or where tiles don't cover the result exactly.
    "swiglu rows, plain": (Config(32, 128, 8, c=8), Config(32, 128, 4)),
    "swiglu columns": (Config(128, 128, 8, rows=32, maxnreg=64), Config(128, 64, 8, r=4, c=8)),
    "swiglu both": (
        Config(128, 128, 8, rows=32, maxnreg=64),
        Config(128, 128, 8, rows=32, maxnreg=80),
        Config(128, 128, 16, r=4, c=8, maxnreg=64),
    ),
    # First passes under current scaling.
    "swiglu amax": (
        Config(16, 256, 8, c=8, ctas=4),
        Config(32, 256, 8, c=16, ctas=3),
        Config(16, 128, 4, c=8, ctas=8),
    ),
    "swiglu gradient amax": (
        Config(16, 256, 8, c=8, ctas=3),
        Config(16, 128, 8, c=8, ctas=5),
        Config(16, 128, 4, c=8, ctas=7),
    ),
    "swiglu gradient": (
        Config(128, 128, 8, rows=16, c=8, maxnreg=80),
        Config(128, 128, 8, rows=32, maxnreg=128),
    ),
    # With SwiGLU's output once more.
    "swiglu gradient, y": (
        Config(128, 128, 8, rows=32, maxnreg=128),
        Config(128, 128, 8, rows=32, c=8, maxnreg=128),
        Config(128, 128, 16, rows=32, c=8, maxnreg=64),
    ),
    # The same under tensor tiles.
    "swiglu gradient, y, tensor": (
        Config(128, 128, 16, rows=32, c=8, maxnreg=64),
        Config(128, 128, 8, rows=32, maxnreg=128),
    ),
}


def chosen(name: str) -> Config:
    """The configuration in use."""
    return CONFIGS[name][0]


def norm_rows_config(hidden: int) -> Config:
    """For rows of `hidden` elements. What is used must be the same for every call about the same rows, because rstd's
    additions are in the order of the layout."""
    return CONFIGS["norm rows"][0].config(hidden)


@contextmanager
def using(name: str, config: Config | NormRows) -> Iterator[None]:
    """Inside, one table entry is another one: for measurements and tests of what is not in use."""
    kept, CONFIGS[name] = CONFIGS[name], (config,)
    try:
        yield
    finally:
        CONFIGS[name] = kept
