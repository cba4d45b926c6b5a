"""The optimizer's kernels, compiled for Hopper without a GPU: nothing spills, FP32 moves 16 bytes at a time."""

import pytest
import torch
from megafp8.kernels import adamw, grad_norm

from megafp8.fp8.formats import E4M3, OperandSpec, Scale, Tile
from tests.cases import quick
from tests.kernels import testing

CHUNKS = 1024
N, CPU = 64 * CHUNKS, torch.device("cpu")
ROWS = [adamw.PieceRow(0, 0, CHUNKS, 0, 0, 5, 0, 4, CHUNKS // 4, 0)]
CONSTANTS = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
SQUARES, SQUARES_32, ROWS_32 = (
    OperandSpec(E4M3, Tile("2d", 128), Scale.POW2),
    OperandSpec(E4M3, Tile("2d", 32), Scale.E8M0),
    OperandSpec(E4M3, Tile("1d", 32), Scale.E8M0),
)


def f32():
    return torch.empty(N)


def scalars():
    return adamw.Scalars(torch.ones(()), torch.ones(()), torch.ones((), dtype=torch.int64),
                         torch.zeros((), dtype=torch.uint8), torch.ones(1, 2))  # fmt: skip


def moment(kind):
    if kind == "fp8":
        return torch.empty(N, dtype=torch.uint8), torch.empty(CHUNKS), torch.empty(CHUNKS, dtype=torch.uint8)
    return torch.empty(N, dtype=torch.bfloat16 if kind == "bf16" else torch.float32), None, None


def flat(master=torch.float32, kind="fp32", **rest):
    weight = None if rest else torch.empty(N, dtype=torch.bfloat16)
    tables = adamw.Tables.of(ROWS, CPU)
    moments = moment(kind), moment(kind)
    adamw.adamw(tables, torch.empty(N, dtype=master), weight, *moments, f32(), scalars(), decoding=torch.empty(4, 128),
                **CONSTANTS, **rest)  # fmt: skip


def tiles(spec):
    data = {"rowwise": torch.empty(N, dtype=torch.uint8)}
    if spec.tile.kind == "1d":
        data["colwise"] = torch.empty(N, dtype=torch.uint8)
    tables, moments = adamw.Tables.of_tiles(ROWS, spec, CPU), (moment("fp32"), moment("fp32"))
    adamw.adamw_tiles(tables, f32(), *moments, f32(), scalars(), data, f32(), spec, **CONSTANTS)


LAUNCHES = {
    "fp32": flat,
    "remainder": lambda: flat(torch.int16),
    "fp8 moments": lambda: flat(kind="fp8"),
    "amaxes 32x32": lambda: flat(amax=f32(), block=32),
    "tiles 128x128": lambda: tiles(SQUARES),
    "tiles 32x32": lambda: tiles(SQUARES_32),
    "tiles 1x32": lambda: tiles(ROWS_32),
    "squares": lambda: grad_norm.squares(f32(), None, torch.empty(N // 64, dtype=torch.float64)),
}


QUICK = {"remainder", "fp8 moments", "amaxes 32x32", "tiles 128x128", "tiles 1x32", "squares"}


@pytest.mark.parametrize("name", quick(LAUNCHES, QUICK))
def test_compiles_for_hopper_without_spills(name):
    with testing.captured_launches() as launches:
        LAUNCHES[name]()
    (captured,) = launches
    compiled = testing.compile_launch(captured)
    used = testing.resources(compiled)
    assert used.spills == 0
    assert any(op.startswith("LDG.E.128") for op in used.instructions)
