"""What tests of kernels need on machines without a GPU: compiling launches ahead of time, and running them.

`captured_launches` records what host functions would launch on CPU tensors; `compile_launch` compiles such a launch
for a GPU that need not be there, `resources` reads registers, spills and instructions from the result, and `emulate`
runs it on the CPU (`emulated_launches`: every launch inside). For kernels in plain Triton there is also its interpreter
(`TRITON_INTERPRET=1`), which casts to FP8 and BF16 wrongly without an error: `fix_interpreter` mends that.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, create_function_from_signature

from tests.kernels.ptx_emulator import FIRST_ADDRESS, Programs

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024  # bytes one program may use on Hopper
NOT_ASSEMBLED = "not assembled"  # among the compiler's options, which name a kernel in its cache


def interpreting() -> bool:
    """Whether kernels of this process run in Triton's interpreter."""
    return triton.knobs.runtime.interpret


def test_device() -> torch.device | None:
    """Where kernels can run: a GPU, the CPU under the interpreter, or nowhere (None)."""
    if interpreting():
        return torch.device("cpu")
    return torch.device("cuda") if torch.cuda.is_available() else None


test_device.__test__ = False  # not a test, whatever its name


class Launch(NamedTuple):
    """One kernel launch: the jitted function, its arguments, and the grid."""

    kernel: JITFunction
    args: tuple
    kwargs: dict[str, Any]
    grid: tuple[int, ...]


@contextmanager
def captured_launches() -> Iterator[list[Launch]]:
    """Inside, launches are recorded instead of run. Tensors may be on the CPU; results hold garbage."""
    launches: list[Launch] = []
    run = JITFunction.run

    def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch(kernel, args, kwargs, grid))

    JITFunction.run = record
    try:
        yield launches
    finally:
        JITFunction.run = run


def compile_launch(launch: Launch, target: GPUTarget = HOPPER, **more: Any) -> triton.compiler.CompiledKernel:
    """Compiles what `launch` would run on `target`, specialized to its arguments as at run time, ptxas included.

    more: options of the compiler.
    """
    backend = make_backend(target)
    kernel, kwargs = launch.kernel, {**launch.kwargs, "debug": False, "instrumentation_mode": ""}
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = binder(*launch.args, **kwargs)
    options, signature, constexprs, attrs = kernel._pack_args(backend, kwargs, bound, specialization, options)
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_type(kernel, signature, constexprs, attrs)
    return triton.compile(source, target=target, options=options.__dict__ | more)


def compile_to_ptx(launch: Launch) -> triton.compiler.CompiledKernel:
    """The same for Hopper without ptxas: its machine code is empty."""
    with mock.patch.object(type(make_backend(HOPPER)), "make_cubin", return_value=b""):
        return compile_launch(launch, ptx_options=NOT_ASSEMBLED)


class Resources(NamedTuple):
    """registers a thread; local loads and stores (spills); shared memory in bytes; instructions by SASS name."""

    registers: int
    spills: int
    shared: int
    instructions: Counter


def resources(compiled: triton.compiler.CompiledKernel) -> Resources:
    """Reads a compiled kernel's machine code with the disassembler that Triton ships."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(compiled.asm["cubin"])
    try:
        command = [str(tools / "cuobjdump"), "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True)
    finally:
        os.unlink(file.name)
    names = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)", text.stdout)
    counts = Counter(names)
    spills = sum(count for name, count in counts.items() if name.startswith(("LDL", "STL")))
    registers = int(re.search(r"REG:(\d+)", text.stdout + text.stderr).group(1))
    return Resources(registers, spills, compiled.metadata.shared, counts)


def emulate(launch: Launch, ptx: str | None = None) -> None:
    """Runs a captured launch on its CPU tensors. ptx: instead of what the launch compiles to."""
    compiled = compile_to_ptx(launch)
    kernel, names = launch.kernel, list(launch.kernel.signature.parameters)
    bound = dict(zip(names, launch.args, strict=False)) | {n: v for n, v in launch.kwargs.items() if n in names}
    binder = create_function_from_signature(kernel.signature, kernel.params, make_backend(HOPPER))
    _, specialization, _ = binder(*launch.args, **launch.kwargs, debug=False, instrumentation_mode="")
    storages: dict[int, tuple[torch.UntypedStorage, int]] = {}
    end = FIRST_ADDRESS
    for value in bound.values():
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in storages:
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage(), end
            end += (value.untyped_storage().nbytes() + 511) // 256 * 256  # a gap, so that overruns are noticed
    memory = np.zeros(end, np.uint8)
    for storage, start in storages.values():
        memory[start : start + storage.nbytes()] = _bytes_of(storage)
    arguments: list[Any] = []
    for name, (kind, _) in zip(names, specialization, strict=True):
        value = bound[name]
        if isinstance(value, torch.Tensor):
            start = storages[value.untyped_storage().data_ptr()][1]
            arguments.append(start + value.storage_offset() * value.element_size())
        elif kind != "constexpr":
            arguments.append(value)
    programs = Programs(ptx or compiled.asm["ptx"], memory, max(compiled.metadata.shared, 16))
    arguments += [0] * (len(programs.parameters) - len(arguments))  # Triton's scratch pointers
    programs.run(launch.grid[0], arguments)
    for storage, start in storages.values():
        _bytes_of(storage)[:] = memory[start : start + storage.nbytes()]


def _bytes_of(storage: torch.UntypedStorage) -> np.ndarray:
    buffer = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    return np.frombuffer(buffer, np.uint8)


@contextmanager
def emulated_launches() -> Iterator[None]:
    """Inside, kernels launched on CPU tensors are compiled for Hopper and run here."""
    run = JITFunction.run

    def emulate_launch(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        emulate(Launch(kernel, args, kwargs, grid))

    JITFunction.run = emulate_launch
    try:
        yield
    finally:
        JITFunction.run = run


def fix_interpreter() -> None:
    """Makes the interpreter of this process convert floats as the GPU does, through `ml_dtypes`.

    FP32 to FP8 saturates and turns NaN into 0x7F, as `cvt.rn.satfinite` does; BF16 rounds to nearest even; the maximum
    of NaN and a number is the number.
    """
    import ml_dtypes
    import triton.language as tl
    from triton.runtime import interpreter

    numpy_types = {
        tl.bfloat16: ml_dtypes.bfloat16,
        tl.float8e4nv: ml_dtypes.float8_e4m3fn,
        tl.float8e5: ml_dtypes.float8_e5m2,
        tl.float16: np.float16,
        tl.float32: np.float32,
        tl.float64: np.float64,
    }
    largest = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}

    def convert(data, source, target, rounding_mode):
        values = np.ascontiguousarray(data).view(numpy_types[source]).astype(np.float32)
        if target in largest:
            with np.errstate(invalid="ignore"):
                values = np.clip(values, -largest[target], largest[target])
        out = values.astype(numpy_types[target])
        bits = out.view(f"u{out.dtype.itemsize}")
        if target in largest:
            bits = np.where(np.isnan(values), np.uint8(0x7F), bits)
        return bits.reshape(data.shape)

    def fused_multiply_add(self, x, y, z):
        with np.errstate(invalid="ignore", over="ignore"):
            return interpreter.TensorHandle(x.data * y.data + z.data, z.dtype.scalar)

    def maximum_of_numbers(self, x, y):
        return interpreter.TensorHandle(np.fmax(x.data, y.data), x.dtype.scalar)

    formats = {"E4M3": tl.float8e4nv, "E5M2": tl.float8e5}

    def dot_scaled(self, a, codes_a, format_a, b, codes_b, format_b, fast_math, a_k_pack, b_k_pack, acc):
        def decoded(operand, codes, fmt):  # [rows, K], a code for each 32
            values = convert(operand, formats[fmt.name], tl.float32, None).view(np.float32)
            bits = np.where(codes == 255, 0x7FC00000, np.where(codes == 0, 0x00400000, codes.astype(np.int32) << 23))
            return values * np.repeat(bits.astype(np.int32).view(np.float32), 32, 1)

        with np.errstate(invalid="ignore", over="ignore"):
            product = decoded(a.data, codes_a.data, format_a) @ decoded(b.data.T, codes_b.data, format_b).T
            return interpreter.TensorHandle(acc.data + product, tl.float32)

    def dot(self, a, b, acc, input_precision, max_num_imprecise_acc):
        x, y = (convert(t.data, t.dtype.scalar, tl.float32, None).view(np.float32) for t in (a, b))
        with np.errstate(invalid="ignore", over="ignore"):
            return interpreter.TensorHandle(x @ y + acc.data, acc.dtype.scalar)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_maxnumf = maximum_of_numbers
    interpreter.InterpreterBuilder.create_dot = dot  # its own takes BF16's bits for numbers
    interpreter.InterpreterBuilder.create_dot_scaled = dot_scaled  # Triton 3.8's own needs a newer one than GPUs have
    interpreter.InterpreterBuilder.create_fma = fused_multiply_add
