"""Inputs and comparisons that the tests of quantization kernels share."""

from __future__ import annotations

import torch
from torch import Tensor

from megafp8.fp8 import reference
from megafp8.fp8.formats import E4M3, E5M2, OperandSpec, Scale, Tile

# Without a GPU, tests/kernels calls some of these tests inside `testing.emulated_launches`.
EMULATING = not torch.cuda.is_available()
DEVICE = torch.device("cpu" if EMULATING else "cuda")


SPECS = {
    "blockwise": OperandSpec(E4M3, Tile("1d", 128), Scale.POW2),
    "blockwise_e5m2": OperandSpec(E5M2, Tile("1d", 128), Scale.POW2),
    "blockwise_fp32": OperandSpec(E4M3, Tile("1d", 128), Scale.FP32),
    "blockwise_epsilon": OperandSpec(E4M3, Tile("1d", 128), Scale.POW2, 1e-3),
    "blockwise_64": OperandSpec(E4M3, Tile("1d", 64), Scale.FP32),
    "blockwise_2d": OperandSpec(E4M3, Tile("2d", 128), Scale.POW2),
    "blockwise_2d_fp32": OperandSpec(E5M2, Tile("2d", 128), Scale.FP32),
    "mxfp8": OperandSpec(E4M3, Tile("1d", 32), Scale.E8M0),
    "mxfp8_2d": OperandSpec(E4M3, Tile("2d", 32), Scale.E8M0),
    "tensorwise": OperandSpec(E4M3, Tile("tensor"), Scale.FP32),
    "tensorwise_e5m2": OperandSpec(E5M2, Tile("tensor"), Scale.FP32),
    "tensorwise_pow2": OperandSpec(E4M3, Tile("tensor"), Scale.POW2),
}
ONE_D = {name: spec for name, spec in SPECS.items() if spec.tile.kind == "1d"}


def normal(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(dtype)


def wide(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Magnitudes over the whole range of BF16, subnormals included."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-140, 127, (rows, columns), generator=generator).double()
    return (torch.randn(rows, columns, generator=generator).double() * 2.0**exponents).clamp(-3e38, 3e38).to(dtype)


def holes(rows: int, columns: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    """Zero rows, columns and blocks; NaN and Inf of both signs, a row and a block without a finite element."""
    x = normal(rows, columns, torch.float32, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for value in (float("nan"), float("inf"), float("-inf"), -0.0):
        x[torch.rand(rows, columns, generator=generator) < 0.01] = value
    x[rows // 2] = 0.0
    x[:, columns // 3] = 0.0
    x[rows // 3] = float("-inf")
    x[:, columns // 2] = float("nan")
    x[: rows // 4, : columns // 4] = 0.0
    return x.to(dtype)


def subnormal(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (normal(rows, columns, torch.float32, seed).double() * 2.0**-130).to(dtype)


INPUTS = {"normal": normal, "wide": wide, "holes": holes, "subnormal": subnormal}


def raw(tensor: Tensor) -> Tensor:
    """Bytes of 1-byte dtypes, bits of FP32: NaN equals NaN, -0 differs from 0."""
    tensor = tensor.contiguous()
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor.view(torch.int32)


def assert_same(got: tuple[Tensor, Tensor] | None, expected: tuple[Tensor, Tensor] | None, what: str = "") -> None:
    """Both (data, scale_inv) pairs equal bit for bit."""
    assert (got is None) == (expected is None), what
    if expected is None:
        return
    for part, g, e in zip(("data", "scale_inv"), got, expected, strict=True):
        assert g.shape == e.shape, f"{what} {part}: {tuple(g.shape)} instead of {tuple(e.shape)}"
        assert g.dtype == e.dtype, f"{what} {part}: {g.dtype} instead of {e.dtype}"
        differing = int((raw(g.cpu()) != raw(e)).sum())
        assert differing == 0, f"{what} {part}: {differing} of {e.numel()} differ"


class Peer:
    """Another rank, whose amax is twice this one's, to share with; notes what it was given."""

    def __init__(self) -> None:
        self.given: list[Tensor] = []

    def __call__(self, amax: Tensor) -> Tensor:
        assert (amax.dtype, amax.shape) == (torch.float32, (1,))
        self.given.append(amax.clone())
        return amax.mul_(2)

    def shared(self, own: float) -> Tensor:
        """What it made of this rank's amax, on the CPU, having been asked once."""
        assert [amax.item() for amax in self.given] == [own]
        return self.given[0].cpu() * 2


def expected(x: Tensor, spec: OperandSpec, rowwise: bool = True, colwise: bool = True, **kwargs):
    """The reference's answer, on the CPU."""
    kwargs = {name: value.cpu() for name, value in kwargs.items()}
    return reference.quantize(x.cpu(), spec, rowwise, colwise, **kwargs)
