"""Recipes: a format, a tile and a kind of scale for each role, and which linears they cover.

The four names are presets; each axis can be overridden. The rest of the code asks a recipe and never compares its
name, so a new recipe is one class here.

    get_recipe("blockwise")                                  E4M3, 1x128 / 128x128 tiles, power-of-two scales
    get_recipe("tensorwise", fp8_format="e4m3")              E4M3 gradients too
    get_recipe("mxfp8", weight_tile="1d")                    1x32 weights
    get_recipe("delayed", amax_history_len=16, margin=1)
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import ClassVar

from megafp8.fp8.formats import FORMATS, OperandSpec, Scale, Tile
from megafp8.fp8.quantizer import Quantizer

ROLES = ("input", "weight", "grad_output")
COVERED = ("qkv", "proj", "fc1", "fc2", "q_proj", "q_down", "q_up", "kv_down", "kv_up")
"""Last components of the names of the linears that a recipe quantizes; the rest stays in high precision."""

_GEMM_ROLES = {
    "fprop": ("input", "weight"),
    "dgrad": ("grad_output", "weight"),
    "wgrad": ("grad_output", "input"),
}


def _axis(role: str, what: str) -> str:
    """Name of the argument that sets the tile or format of a role."""
    return f"{role.removesuffix('_output')}_{what}"


@dataclass(frozen=True)
class Recipe:
    """The axes that all recipes share. Presets override the defaults.

    fp8_format: "e4m3" everywhere, or "hybrid": E4M3 forward, E5M2 gradients. input_format, weight_format,
        grad_format: "e4m3" or "e5m2", instead of what fp8_format means for the role.
    power_of_two_scales: round FP32 scales down to a power of two.
    input_tile, weight_tile, grad_tile: "tensor", "1d" (1 x block) or "2d" (block x block).
    amax_epsilon: floor under the amaxes.
    fast_accumulation: tensor cores of GPUs add up fprop's products alone, with about 13 bits; tensor tiles only.
    coverage: last name components of the linears that are quantized.
    """

    name: ClassVar[str]
    block: ClassVar[int] = 128

    fp8_format: str = "e4m3"
    power_of_two_scales: bool = False
    input_tile: str = "tensor"
    weight_tile: str = "tensor"
    grad_tile: str = "tensor"
    input_format: str | None = None
    weight_format: str | None = None
    grad_format: str | None = None
    amax_epsilon: float = 0.0
    fast_accumulation: bool = False
    coverage: tuple[str, ...] = COVERED

    def __post_init__(self) -> None:
        """Raises ValueError for a combination that no GEMM can multiply."""
        if self.fp8_format not in ("e4m3", "hybrid"):
            raise ValueError(f"fp8_format={self.fp8_format!r}: use 'e4m3' or 'hybrid'")
        if self.amax_epsilon < 0:
            raise ValueError(f"amax_epsilon={self.amax_epsilon}: must be >= 0")
        tiles, formats = self.tiles, self.formats
        for role in ROLES:
            if tiles[role] not in ("tensor", "1d", "2d"):
                raise ValueError(f"{_axis(role, 'tile')}={tiles[role]!r}: use 'tensor', '1d' or '2d'")
            if formats[role] not in FORMATS:
                raise ValueError(f"{_axis(role, 'format')}={formats[role]!r}: use 'e4m3' or 'e5m2'")
        if "tensor" in tiles.values() and set(tiles.values()) != {"tensor"}:
            named = ", ".join(f"{_axis(role, 'tile')}={kind!r}" for role, kind in tiles.items())
            raise ValueError(
                f"{named}: a GEMM takes two tensorwise or two tiled operands: use 'tensor' for all three or for none"
            )
        if self.fast_accumulation and "tensor" not in tiles.values():
            raise ValueError(
                f"fast_accumulation with recipe {self.name!r}: each tile's product is scaled and added in FP32: "
                "use recipe 'tensorwise' or 'delayed', or leave it out"
            )
        for gemm, (a, b) in _GEMM_ROLES.items():
            if tiles[a] == tiles[b] == "2d":
                raise ValueError(
                    f"{_axis(a, 'tile')}='2d' with {_axis(b, 'tile')}='2d': {gemm} would multiply 2D by 2D blocks, "
                    f"which no GEMM does: use {_axis(a, 'tile')}='1d'"
                )
            if formats[a] == formats[b] == "e5m2":
                raise ValueError(
                    f"{_axis(a, 'format')}='e5m2' with {_axis(b, 'format')}='e5m2': no GEMM multiplies E5M2 by E5M2 "
                    f"({gemm} would): use {_axis(b, 'format')}='e4m3'"
                )

    @property
    def tiles(self) -> dict[str, str]:
        """Role -> kind of tile."""
        return {"input": self.input_tile, "weight": self.weight_tile, "grad_output": self.grad_tile}

    @property
    def formats(self) -> dict[str, str]:
        """Role -> name of the number format."""
        gradient = "e5m2" if self.fp8_format == "hybrid" else "e4m3"
        return {
            "input": self.input_format or "e4m3",
            "weight": self.weight_format or "e4m3",
            "grad_output": self.grad_format or gradient,
        }

    @property
    def scale(self) -> Scale:
        return Scale.POW2 if self.power_of_two_scales else Scale.FP32

    @property
    def uses_history(self) -> bool:
        """Whether scales come from the amaxes of earlier steps (StepContext.scaling)."""
        return False

    @cached_property
    def _quantizers(self) -> dict[str, Quantizer]:
        return {role: Quantizer(self._spec(role)) for role in ROLES}

    def _spec(self, role: str) -> OperandSpec:
        kind = self.tiles[role]
        tile = Tile(kind) if kind == "tensor" else Tile(kind, self.block)
        return OperandSpec(FORMATS[self.formats[role]], tile, self.scale, self.amax_epsilon)

    def quantizer(self, role: str) -> Quantizer:
        """The quantizer of a role: "input", "weight" or "grad_output" (ValueError for others)."""
        if role not in ROLES:
            raise ValueError(f"role {role!r}: use one of {', '.join(ROLES)}")
        return self._quantizers[role]

    def covers(self, module_name: str) -> bool:
        """Whether the linear of that (dotted) name is quantized."""
        return module_name.rpartition(".")[2] in self.coverage


@dataclass(frozen=True)
class Tensorwise(Recipe):
    """Current scaling: one FP32 scale a tensor, from its own amax."""

    name: ClassVar[str] = "tensorwise"

    fp8_format: str = "hybrid"


@dataclass(frozen=True)
class Blockwise(Recipe):
    """1 x 128 activations and gradients, 128 x 128 weights, power-of-two scales."""

    name: ClassVar[str] = "blockwise"

    power_of_two_scales: bool = True
    input_tile: str = "1d"
    weight_tile: str = "2d"
    grad_tile: str = "1d"


@dataclass(frozen=True)
class MXFP8(Recipe):
    """1 x 32 tiles with E8M0 scales; 32 x 32 weights, so that one set of bytes serves both directions."""

    name: ClassVar[str] = "mxfp8"
    block: ClassVar[int] = 32

    power_of_two_scales: bool = True
    input_tile: str = "1d"
    weight_tile: str = "2d"
    grad_tile: str = "1d"

    def __post_init__(self) -> None:
        if "e5m2" in self.formats.values():
            raise ValueError("fp8_format='hybrid' or E5M2 with recipe 'mxfp8': gradients diverge there: use 'e4m3'")
        if not self.power_of_two_scales:
            raise ValueError(
                "power_of_two_scales=False with recipe 'mxfp8': its scales are E8M0 bytes, powers of "
                "two: use recipe 'blockwise' for FP32 scales"
            )
        if self.amax_epsilon:
            raise ValueError("amax_epsilon with recipe 'mxfp8': it has no epsilon: leave it at 0")
        if "tensor" in self.tiles.values():
            raise ValueError("tile 'tensor' with recipe 'mxfp8': use '1d' or '2d', or recipe 'tensorwise'")
        super().__post_init__()

    @property
    def scale(self) -> Scale:
        return Scale.E8M0


@dataclass(frozen=True)
class Delayed(Recipe):
    """One FP32 scale a tensor, from a history of amaxes. Kept for comparison: known to converge worse above 7B.

    amax_history_len: steps that count; margin: scales are divided by 2^margin; amax_compute_algo: "max" of the
    history or "most_recent".
    """

    name: ClassVar[str] = "delayed"

    fp8_format: str = "hybrid"
    amax_history_len: int = 1024
    margin: int = 0
    amax_compute_algo: str = "max"

    def __post_init__(self) -> None:
        if self.amax_history_len < 1:
            raise ValueError(f"amax_history_len={self.amax_history_len}: must be at least 1")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(f"amax_compute_algo={self.amax_compute_algo!r}: use 'max' or 'most_recent'")
        if set(self.tiles.values()) != {"tensor"}:
            raise ValueError(
                "tiles with recipe 'delayed': a history is kept a tensor: use tile 'tensor', or recipe "
                "'blockwise' for tiles"
            )
        super().__post_init__()

    @property
    def uses_history(self) -> bool:
        return True


RECIPES: dict[str, type[Recipe]] = {cls.name: cls for cls in (Tensorwise, Blockwise, MXFP8, Delayed)}


def get_recipe(name: str, **axes) -> Recipe:
    """The preset `name` with some axes overridden; an axis that is None keeps the preset's value.

    Raises ValueError for an unknown name or axis, and for combinations that cannot work.
    """
    if name not in RECIPES:
        raise ValueError(f"recipe {name!r}: use one of {', '.join(RECIPES)}")
    cls = RECIPES[name]
    known = [f.name for f in fields(cls)]
    axes = {axis: value for axis, value in axes.items() if value is not None}
    for axis in axes:
        if axis not in known:
            raise ValueError(f"recipe {name!r} has no axis {axis!r}: use one of {', '.join(known)}")
    return cls(**axes)
