"""Every quantization kernel and configuration, compiled for Hopper without a GPU: nothing spills, memory is read and
written 16 bytes at a time, shared memory fits."""

import pytest
import torch
from megafp8.kernels import (
    norm_quantize,
    quantize,
    quantize_configs,
    quantize_derive,
    quantize_experts,
    swiglu_quantize,
)

from megafp8.fp8.formats import E4M3, E5M2, OperandSpec, Scale, Tile
from tests.cases import quick
from tests.kernels import testing

BLOCKWISE = OperandSpec(E4M3, Tile("1d", 128), Scale.POW2)
BLOCKWISE_FP32 = OperandSpec(E5M2, Tile("1d", 128), Scale.FP32)
MXFP8 = OperandSpec(E4M3, Tile("1d", 32), Scale.E8M0)
SQUARES = OperandSpec(E4M3, Tile("2d", 128), Scale.POW2)
SQUARES_32 = OperandSpec(E4M3, Tile("2d", 32), Scale.E8M0)
GRADIENT = OperandSpec(E5M2, Tile("tensor"), Scale.FP32)
TENSORWISE = OperandSpec(E4M3, Tile("tensor"), Scale.FP32)

X = torch.empty(256, 1024, dtype=torch.bfloat16)
ROWS = torch.empty(64, 8192, dtype=torch.bfloat16)
HIDDEN = torch.empty(128, 7168, dtype=torch.bfloat16)
WEIGHT = torch.empty(7168, dtype=torch.bfloat16)
OFFSETS = torch.zeros(9, dtype=torch.int64)
INDEX = torch.zeros(256, dtype=torch.int64)
ENDS = torch.zeros(100, dtype=torch.int32)
EACH = torch.ones(100)
ONE = torch.ones(1)
FLAG = torch.zeros(1, dtype=torch.int32)
BYTES = quantize.allocate(256, 1024, BLOCKWISE, X.device)

LAUNCHES = {
    "rows": lambda: quantize.quantize(X, BLOCKWISE),
    "rows fp32 scales": lambda: quantize.quantize(X, BLOCKWISE_FP32),
    "rows mxfp8": lambda: quantize.quantize(X, MXFP8),
    "columns": lambda: quantize.quantize(X, BLOCKWISE, False, True),
    "both": lambda: quantize.quantize(X, BLOCKWISE, True, True),
    "both fp32 scales": lambda: quantize.quantize(X, BLOCKWISE_FP32, True, True),
    "both mxfp8": lambda: quantize.quantize(X, MXFP8, True, True),
    "both of FP32": lambda: quantize.quantize(X.float(), BLOCKWISE, True, True),
    "both, given amaxes": lambda: quantize.quantize(X, BLOCKWISE, True, True, torch.ones(256, 8), torch.ones(1024, 2)),
    "weights": lambda: quantize.quantize(X, SQUARES, True, True, noop=FLAG),
    "weights mxfp8": lambda: quantize.quantize(X, SQUARES_32, True, True),
    "tensorwise": lambda: quantize.quantize(ROWS, TENSORWISE),
    "tensorwise strided": lambda: quantize.quantize(ROWS[:, :4096], TENSORWISE),
    "tensorwise both": lambda: quantize.quantize(X, TENSORWISE, True, True),
    "delayed": lambda: quantize.quantize(ROWS, TENSORWISE, scale=ONE, amax_out=ONE),
    "tile amaxes": lambda: quantize.amax(X, BLOCKWISE.tile),
    "grouped": lambda: quantize_derive.quantize_grouped(X, OFFSETS, BLOCKWISE, alignment=16),
    "grouped rows": lambda: quantize_derive.quantize_grouped(X, OFFSETS, BLOCKWISE, True, False, index=INDEX),
    "grouped columns": lambda: quantize_derive.quantize_grouped(X, OFFSETS, BLOCKWISE, False, alignment=16),
    "grouped derived": lambda: quantize_derive.quantize_grouped(
        X, OFFSETS, BLOCKWISE, alignment=16, index=INDEX, derived=True
    ),
    "row amax": lambda: quantize_experts.row_amaxes(ROWS),
    "experts": lambda: quantize_experts.quantize_experts(X, ENDS, GRADIENT, True, True, amax=EACH, index=INDEX),
    "experts as they lie": lambda: quantize_experts.quantize_experts(X, ENDS, TENSORWISE, True, True, scale=EACH),
    "derived": lambda: quantize_derive.derive_colwise(*BYTES, BLOCKWISE),
    "transpose": lambda: quantize_derive.transpose(BYTES[0]),
    "norm rows": lambda: norm_quantize.rms_norm_quantize(HIDDEN, WEIGHT, BLOCKWISE),
    "norm both": lambda: norm_quantize.rms_norm_quantize(HIDDEN, WEIGHT, BLOCKWISE, colwise=True),
    "norm columns": lambda: norm_quantize.norm_columns_quantize(HIDDEN, WEIGHT, torch.ones(128), BLOCKWISE),
    "swiglu rows": lambda: swiglu_quantize.swiglu_quantize(X, BLOCKWISE),
    "swiglu rows, plain": lambda: swiglu_quantize.swiglu_quantize(X, TENSORWISE),
    "swiglu columns": lambda: swiglu_quantize.swiglu_quantize(X, BLOCKWISE, rowwise=False, colwise=True),
    "swiglu both": lambda: swiglu_quantize.swiglu_quantize(X, BLOCKWISE, colwise=True),
    "swiglu amax": lambda: swiglu_quantize.swiglu_amax(X),
    "swiglu gradient amax": lambda: swiglu_quantize.swiglu_grad_amax(X[:, :512], X),
    "swiglu gradient": lambda: swiglu_quantize.swiglu_grad_quantize(X[:, :512], X, BLOCKWISE),
    "swiglu gradient, y": lambda: swiglu_quantize.swiglu_grad_quantize(X[:, :512], X, BLOCKWISE, y_spec=BLOCKWISE),
    "swiglu gradient, y, tensor": lambda: swiglu_quantize.swiglu_grad_quantize(
        X[:, :512], X, GRADIENT, y_spec=TENSORWISE, y_scale=ONE
    ),
    "swiglu of experts": lambda: swiglu_quantize.swiglu_quantize(
        X, TENSORWISE, x_spec=BLOCKWISE, weights=torch.ones(256), ends=ENDS
    ),
    "swiglu gradient of experts": lambda: swiglu_quantize.swiglu_grad_quantize(
        X[:, :512], BYTES, GRADIENT, y_spec=TENSORWISE, y_amax=EACH, weights=torch.ones(256), ends=ENDS
    ),
    "swiglu gradient kept": lambda: swiglu_quantize.swiglu_grad_quantize(
        X[:, :512], X, BLOCKWISE, y_spec=BLOCKWISE, high_precision=True
    ),
    "swiglu gradient of bytes": lambda: swiglu_quantize.swiglu_grad_quantize(
        X[:, :512], BYTES, BLOCKWISE, y_spec=BLOCKWISE, weights=torch.ones(256)
    ),
}


# What else is in the table of configurations, by the launch that uses the entry.
ENTRIES = {
    "both of 32": "both mxfp8",
    "squares": "weights",
    "squares of 32": "weights mxfp8",
    "amax": "tensorwise",
    "amax strided": "tensorwise strided",
    "cast": "tensorwise",
    "cast transposed": "tensorwise both",
}
OTHERS = [(entry, i) for entry, configs in quantize_configs.CONFIGS.items() for i in range(1, len(configs))]


# Each kernel with the most that it does at once; what is left out does less, or the same with other constants.
QUICK = {
    "rows mxfp8",
    "both of FP32",
    "weights",
    "weights mxfp8",
    "tensorwise both",
    "delayed",
    "grouped derived",
    "experts",
    "swiglu gradient of experts",
    "derived",
    "transpose",
    "norm both",
    "swiglu both",
    "swiglu gradient, y, tensor",
    "swiglu gradient kept",
}


@pytest.mark.parametrize("name", quick(LAUNCHES, QUICK))
def test_compiles_for_hopper_without_spills(name):
    check(LAUNCHES[name])


@pytest.mark.slow
@pytest.mark.parametrize(("entry", "index"), OTHERS, ids=lambda value: str(value).replace(" ", "_"))
def test_every_other_configuration_compiles_without_spills(entry, index):
    with quantize_configs.using(entry, quantize_configs.CONFIGS[entry][index]):
        check(LAUNCHES[ENTRIES.get(entry, entry)])


def test_every_entry_of_the_table_is_launched():
    assert {ENTRIES.get(entry, entry) for entry in quantize_configs.CONFIGS} <= LAUNCHES.keys()


def check(launch):
    with testing.captured_launches() as launches:
        launch()
    assert launches
    for captured in launches:
        used = testing.resources(testing.compile_launch(captured))
        name = captured.kernel.__name__
        assert used.spills == 0, f"{name}: {used.spills} local loads and stores"
        assert used.shared <= testing.SHARED_MEMORY, name
        assert any(op.startswith(("LDG.E.128", "LDG.E.64")) for op in used.instructions), f"{name}: narrow loads"
        if _writes_bytes(captured):
            assert any(op.startswith(("STG.E.128", "STG.E.64")) for op in used.instructions), f"{name}: narrow stores"
            assert _has_e8m0(captured) or not used.instructions["STG.E.U8"], f"{name}: stores single bytes"
            cast = any(op.startswith("F2FP.SATFINITE") for op in used.instructions)
            assert cast or name == "transpose_kernel", f"{name}: no native FP8 cast"


def _writes_bytes(captured: testing.Launch) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.dtype == torch.uint8 for arg in captured.args)


def _has_e8m0(captured: testing.Launch) -> bool:
    """E8M0 scales are single bytes, which may be stored one by one."""
    return any(2 in captured.kwargs.get(name, ())[2:] for name in ("SPEC", "Y_SPEC"))


def test_ragged_shapes_compile_without_spills():
    x = torch.empty(129, 300, dtype=torch.bfloat16)
    with testing.captured_launches() as launches:
        quantize.quantize(x, BLOCKWISE, True, True)
        quantize.quantize(x, SQUARES, True, True)
    assert [testing.resources(testing.compile_launch(launch)).spills for launch in launches] == [0, 0]


def test_configurations_cover_their_tiles():
    """R x C elements a thread, 32 lanes and all warps make up a tile, and a quantization tile holds whole threads."""
    configs = [
        (name, c) for name, cs in quantize_configs.CONFIGS.items() for c in cs if isinstance(c, quantize_configs.Config)
    ]
    assert len(configs) > 20
    for name, c in configs:
        elements = c.r * c.c * 32 * c.num_warps
        assert c.block_m * c.block_k % elements == 0, name
        assert c.block_k // c.c <= 32 or c.block_m == 1, name
        if c.r > 1:
            assert c.r in (2, 4, 8), name


@pytest.mark.parametrize("way", quantize_configs.CONFIGS["norm rows"], ids=str)
@pytest.mark.parametrize("hidden", [64, 712, 2048, 4096, 7168, 8192, 65536])
def test_norm_configuration_by_hidden_size(hidden, way):
    config = way.config(hidden)
    assert config.block_k in (32 * config.num_warps * c for c in (8, 16))
    assert hidden <= 32 * config.num_warps * way.elements or config.num_warps == 16
    assert not config.held or config.block_m * hidden <= 32 * config.num_warps * 256
