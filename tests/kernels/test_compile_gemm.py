"""Every GEMM kernel and configuration, compiled without a GPU: tensor-core instructions, no spills, shared memory fits.

Gluon kernels compile for Hopper only (wgmma), the plain Triton twin for Hopper and for Blackwell; MXFP8's goes through
block-scaled tensor cores on Blackwell, and decodes operands on Hopper.
"""

import pytest
import torch
from megafp8.kernels import gemm_launch, gemm_regroup, gemm_scaled
from megafp8.kernels.gemm_hopper_problem import (
    BLOCK_1D1D,
    BLOCK_1D2D,
    DENSE,
    GROUPED_K,
    GROUPED_M,
    TENSORWISE,
)
from megafp8.kernels.gemm_launch import ADDING, FAST, LARGE, SMALL, Problem
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from tests.cases import quick
from tests.kernels import testing

E4M3, E5M2, BF16, FP32 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32
BLACKWELL = GPUTarget("cuda", 100, 32)
GROUPS = 3


def problem(kind: int, scaling: int, out_dtype=BF16, accumulate=False, fast=False, bias=False, a_dtype=E4M3,
            size=512) -> Problem:  # fmt: skip
    """An M = N = K problem on the CPU."""
    groups = 1 if kind == DENSE else GROUPS
    b_shape = (groups, size, size) if kind == GROUPED_M else (size, size)
    a, b = torch.zeros(size, size, dtype=a_dtype), torch.zeros(b_shape, dtype=E4M3)
    tiles = size // 128 + (groups if kind == GROUPED_K else 0)
    scale_a = scale_b = torch.ones(groups)
    if scaling != TENSORWISE:
        scale_a = torch.ones(tiles, size).t()
    if scaling == BLOCK_1D2D:
        scale_b = torch.ones(*([groups] if groups > 1 else []), size // 128, tiles)
    elif scaling == BLOCK_1D1D:
        scale_b = torch.ones(tiles, size).t()
    shape = (groups, size, size) if kind == GROUPED_K else (size, size)
    return Problem(
        kind=kind, scaling=scaling, a=a, b=b, scale_a=scale_a, scale_b=scale_b, accumulate=accumulate, fast=fast,
        out=torch.zeros(shape, dtype=out_dtype), ends=None if kind == DENSE else torch.zeros(GROUPS, dtype=torch.int32),
        bias=torch.zeros(size) if bias else None,
    )  # fmt: skip


def captured(launched: Problem, backend: str) -> testing.Launch:
    with testing.captured_launches() as launches:
        gemm_launch.launch(launched, backend)
    return launches[-1]


GLUON = {
    "tensorwise": (LARGE, (DENSE, TENSORWISE)),
    "tensorwise small": (SMALL, (DENSE, TENSORWISE)),
    "tensorwise wgrad of E5M2": (LARGE, (DENSE, TENSORWISE, FP32, True), {"a_dtype": E5M2}),
    "tensorwise wgrad of E5M2 small": (SMALL, (DENSE, TENSORWISE, FP32, True), {"a_dtype": E5M2}),
    "tensorwise fast": (FAST, (DENSE, TENSORWISE), {"fast": True}),
    "1D2D": (LARGE, (DENSE, BLOCK_1D2D)),
    "1D2D small": (SMALL, (DENSE, BLOCK_1D2D)),
    "1D2D bias": (LARGE, (DENSE, BLOCK_1D2D), {"bias": True}),
    "1D1D": (SMALL, (DENSE, BLOCK_1D1D, FP32)),
    "1D1D bias": (SMALL, (DENSE, BLOCK_1D1D), {"bias": True}),
    "1D1D accumulate": (SMALL, (DENSE, BLOCK_1D1D, FP32, True)),
    "1D1D accumulate large": (LARGE, (DENSE, BLOCK_1D1D, FP32, True)),
    "1D1D adding": (ADDING, (DENSE, BLOCK_1D1D, FP32, True)),
    "1D1D written by TMA": (ADDING, (DENSE, BLOCK_1D1D, FP32)),
    "tensorwise adding": (ADDING, (DENSE, TENSORWISE, FP32, True), {"a_dtype": E5M2}),
    "1D1D accumulate in BF16": (SMALL, (DENSE, BLOCK_1D1D, BF16, True)),
    "grouped tensorwise": (LARGE, (GROUPED_M, TENSORWISE)),
    "grouped 1D2D": (LARGE, (GROUPED_M, BLOCK_1D2D)),
    "grouped 1D2D small": (SMALL, (GROUPED_M, BLOCK_1D2D)),
    "grouped wgrad": (SMALL, (GROUPED_K, BLOCK_1D1D, FP32)),
    "grouped wgrad accumulate": (SMALL, (GROUPED_K, BLOCK_1D1D, FP32, True)),
    "grouped wgrad adding": (ADDING, (GROUPED_K, BLOCK_1D1D, FP32, True)),
    "grouped wgrad tensorwise adding": (ADDING, (GROUPED_K, TENSORWISE, FP32, True), {"a_dtype": E5M2}),
    "grouped wgrad tensorwise": (SMALL, (GROUPED_K, TENSORWISE, FP32, True), {"a_dtype": E5M2}),
    "grouped wgrad fast": (FAST, (GROUPED_K, TENSORWISE, FP32, True), {"fast": True}),
}


# The thread's index, stored before the K loop and loaded after it.
OUTSIDE_OF_LOOPS = {"1D1D": 2, "grouped wgrad adding": 2}


# Each kernel and scaling, both tile sizes, bias, accumulation, E5M2, fast sums, experts' rows and experts' weights.
QUICK = {
    "tensorwise wgrad of E5M2",
    "tensorwise fast",
    "1D2D bias",
    "1D1D accumulate",
    "1D1D adding",
    "grouped 1D2D small",
    "grouped wgrad accumulate",
}


@pytest.mark.parametrize("name", quick(GLUON, QUICK))
def test_gluon_kernel_for_hopper(name, monkeypatch):
    config, arguments, *options = GLUON[name]
    monkeypatch.setattr(gemm_launch, "hopper_config", lambda problem, programs: config)
    launch = captured(problem(*arguments, **(options[0] if options else {})), "gluon")
    used = testing.resources(testing.compile_launch(launch))
    products = sum(n for op, n in used.instructions.items() if op.startswith("QGMMA.64"))
    assert products >= 16
    assert used.spills <= OUTSIDE_OF_LOOPS.get(name, 0)
    assert used.shared <= testing.SHARED_MEMORY
    # ptxas serializes products that it can't prove safe in flight: an arrive for each, not one for four
    assert used.instructions["WARPGROUP.ARRIVE"] * 4 <= products
    assert any(op.startswith("UTMALDG") for op in used.instructions)


TL = {
    "tensorwise": (DENSE, TENSORWISE),
    "1D2D": (DENSE, BLOCK_1D2D),
    "1D1D accumulate": (DENSE, BLOCK_1D1D, FP32, True),
    "grouped 1D2D": (GROUPED_M, BLOCK_1D2D),
    "grouped wgrad accumulate": (GROUPED_K, BLOCK_1D1D, FP32, True),
    "grouped wgrad tensorwise": (GROUPED_K, TENSORWISE, FP32, True),
}


PRODUCTS = {"sm_90a": (testing.HOPPER, "QGMMA"), "sm_100a": (BLACKWELL, "UTCQMMA")}
QUICK_TWINS = {
    ("1D2D", "sm_90a"),
    ("grouped wgrad tensorwise", "sm_90a"),
    ("1D1D accumulate", "sm_100a"),
    ("grouped 1D2D", "sm_100a"),
}


@pytest.mark.parametrize(("name", "architecture"), quick([(n, a) for n in TL for a in PRODUCTS], QUICK_TWINS))
def test_plain_triton_twin(name, architecture):
    target, product = PRODUCTS[architecture]
    used = testing.resources(testing.compile_launch(captured(problem(*TL[name]), "tl"), target))
    assert any(op.startswith(product) for op in used.instructions)
    assert used.spills == 0
    assert used.shared <= testing.SHARED_MEMORY


def scaled(name: str, *, native: bool, size: int = 512) -> testing.Launch:
    """A launch of the MXFP8 kernel: inputs by weights, and wgrads that are added to FP32."""

    def codes(*shape: int) -> torch.Tensor:
        return torch.full(shape, 127, dtype=torch.uint8)

    a, b = torch.zeros(size, size, dtype=E4M3), torch.zeros(3, size, size, dtype=E4M3)
    grads = torch.zeros(3, size, size)
    rows, squares, ends = codes(size, size // 32), codes(3, size // 32, size // 32), torch.zeros(3, dtype=torch.int32)
    with testing.captured_launches() as launches:
        if name == "dense":
            gemm_scaled.gemm_mxfp8(a, b[0], rows, squares[0], native=native)
        elif name == "dense wgrad":
            gemm_scaled.gemm_mxfp8(a, a, rows, rows, out=grads[0], accumulate=True, native=native)
        elif name == "grouped":
            gemm_scaled.grouped_gemm_mxfp8(a, b, rows, squares, ends, native=native)
        else:
            gemm_scaled.grouped_wgrad_mxfp8(a, a, rows, rows, ends, out=grads, accumulate=True, padding=32,
                                            native=native)  # fmt: skip
    return launches[-1]


@pytest.mark.parametrize(
    ("name", "native"),
    [("dense", True), ("grouped wgrad", False),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         ("dense wgrad", True), ("grouped", True), ("grouped wgrad", True), ("grouped", False)))],
)  # fmt: skip
def test_mxfp8(name, native):
    """Block-scaled products on Blackwell, whose codes wait in tensor memory; decoded to BF16 on Hopper."""
    compiled = testing.compile_launch(scaled(name, native=native), BLACKWELL if native else testing.HOPPER)
    used = testing.resources(compiled)
    assert ("kind::mxf8f6f4.block_scale" in compiled.asm["ptx"]) == native
    assert any(op.startswith("UTCQMMA" if native else "HGMMA") for op in used.instructions)
    assert any(op.startswith("UTMALDG") for op in used.instructions)
    assert used.spills == 0
    assert used.shared <= testing.SHARED_MEMORY


def test_mxfp8_token_counts_do_not_recompile():
    assert specialization(scaled("dense", native=True)) == specialization(scaled("dense", native=True, size=640))


@pytest.mark.parametrize(
    ("expected", "kind", "scaling", "options", "shape"),
    [
        (LARGE, DENSE, BLOCK_1D2D, {}, (4096, 4096)),
        (SMALL, DENSE, BLOCK_1D2D, {}, (512, 512)),
        (SMALL, DENSE, BLOCK_1D2D, {}, (4096, 1536)),  # three rounds of small tiles, two of large ones
        (FAST, DENSE, TENSORWISE, {"fast": True}, (512, 512)),
        (ADDING, DENSE, BLOCK_1D1D, {"accumulate": True}, (8192, 8192, 8192)),
        (ADDING, DENSE, BLOCK_1D1D, {}, (8192, 8192)),
        (SMALL, DENSE, BLOCK_1D1D, {"accumulate": True}, (8192, 8192)),  # a short contraction
        # seven rounds of small ones, four of large ones
        (SMALL, DENSE, BLOCK_1D1D, {"accumulate": True}, (7168, 2048, 4096)),
        (SMALL, DENSE, TENSORWISE, {"accumulate": True}, (8192, 8192, 8192)),
        (LARGE, GROUPED_M, BLOCK_1D2D, {}, (3 * 4096, 4096)),
        (SMALL, GROUPED_M, BLOCK_1D2D, {}, (3 * 128, 4096)),
        (ADDING, GROUPED_K, BLOCK_1D1D, {"accumulate": True}, (4096, 4096, 3 * 4096)),
        (SMALL, GROUPED_K, BLOCK_1D1D, {"accumulate": True}, (4096, 4096, 3 * 1024)),
        (ADDING, GROUPED_K, BLOCK_1D1D, {}, (4096, 4096, 3 * 1024)),
    ],
)
def test_configuration_by_problem(expected, kind, scaling, options, shape):
    with torch.device("meta"):
        ends = None if kind == DENSE else torch.zeros(GROUPS, dtype=torch.int32)
        depth = shape[2] if len(shape) > 2 else 256
        a, b = torch.zeros(shape[0], depth), torch.zeros(shape[1], depth)
        made = Problem(kind=kind, scaling=scaling, a=a, b=b, scale_a=a, scale_b=b, out=a, ends=ends, **options)
    assert gemm_launch.hopper_config(made, 132) is expected


@pytest.mark.parametrize("backend", ["gluon", "tl", "scaled"])
def test_arguments_are_in_the_order_of_the_kernel(backend):
    """Later launches pass all of them by position."""
    launch = scaled("dense", native=True) if backend == "scaled" else captured(problem(DENSE, TENSORWISE), backend)
    constants = [name for name in launch.kwargs if name.isupper()]
    assert launch.kernel.arg_names[len(launch.args) :] == constants


def test_regroup_moves_whole_words():
    with testing.captured_launches() as launches:
        gemm_regroup.regroup(torch.zeros(64, 512, dtype=E4M3), torch.zeros(4, dtype=torch.int32), 1, 16)
    used = testing.resources(testing.compile_launch(launches[0]))
    assert used.spills == 0
    assert used.instructions["LDG.E"]
    assert not any(op.startswith(("LDG.E.U8", "STG.E.U8")) for op in used.instructions)


def specialization(launch: testing.Launch) -> list:
    """What Triton specializes a launch on: another value compiles another kernel."""
    kernel = launch.kernel
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(testing.HOPPER))
    return binder(*launch.args, **launch.kwargs, debug=False, instrumentation_mode="")[1]


@pytest.mark.parametrize("backend", ["gluon", "tl"])
@pytest.mark.parametrize("scaling", [TENSORWISE, BLOCK_1D2D, BLOCK_1D1D])
def test_token_counts_do_not_recompile(scaling, backend):
    """A new number of rows, or another K, must find the kernel compiled."""

    def launched(rows: int, depth: int) -> list:
        a, b = torch.zeros(rows, depth, dtype=E4M3), torch.zeros(16384, depth, dtype=E4M3)
        tiles = -(-depth // 128)
        scale_a = scale_b = torch.ones(1)
        if scaling != TENSORWISE:
            scale_a = torch.ones(tiles, -(-rows // 4) * 4)[:, :rows].t()
            scale_b = torch.ones(128, tiles) if scaling == BLOCK_1D2D else torch.ones(tiles, 16384).t()
        made = Problem(kind=DENSE, scaling=scaling, a=a, b=b, scale_a=scale_a, scale_b=scale_b,
                       out=torch.zeros(rows, 16384, dtype=BF16))  # fmt: skip
        return specialization(captured(made, backend))

    assert launched(4096, 512) == launched(4099, 640) == launched(1000, 304)
