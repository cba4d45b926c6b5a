"""Triton without a GPU: inside `no_driver`, launches do all that the host does for them, up to the driver's own call.

Kernels are not compiled and compute nothing. What a launch costs the driver is not in it, nor the look at each pointer
that Triton's launcher takes there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from megafp8.kernels import gemm_launch, launch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)
_BEFORE_ARGUMENTS = 9  # function, two flags, two scratch spaces, metadata of the kernel and of the launch, two hooks
_DESCRIPTOR = {"swizzle": 3, "elem_size": 1, "elem_type": 0, "block_size": [64, 128], "fp4_padded": False}


class Launched(NamedTuple):
    """What reached the driver. stream: of (device, number). arguments: all of the kernel's, in its order; in place of
    each tensor descriptor what it was encoded from, its sizes and strides."""

    kernel: JITFunction
    grid: tuple[int, int, int]
    stream: tuple[int, int]
    signature: tuple
    arguments: tuple


class _Launcher(CudaLauncher):
    """Triton's launcher; instead of its compiled part a function that notes what it was given."""

    def __init__(self, source: Any, launches: list[Launched] | None) -> None:
        described = sum(str(kind).startswith("tensordesc") for kind in source.signature.values())
        kinds = tuple(source.signature.values())

        def launch(x: int, y: int, z: int, stream: tuple[int, int], *more: Any) -> None:
            if launches is not None:
                launches.append(Launched(source.fn, (x, y, z), stream, kinds, more[_BEFORE_ARGUMENTS:]))

        self.launch = wrap_handle_tensordesc(launch, source.signature, [_DESCRIPTOR] * described)
        self.num_ctas, self.launch_cooperative_grid, self.launch_pdl = 1, False, False
        self.global_scratch_size = self.profile_scratch_size = 0
        self.global_scratch_align = self.profile_scratch_align = 1


class _Uncompiled(CompiledKernel):
    def __init__(self, source: Any, launches: list[Launched] | None) -> None:
        self.src, self.hash, self.name, self.packed_metadata = source, "", source.fn.__name__, (4, 1, 0)
        self.module = self.function = 0
        self._run = _Launcher(source, launches)


@contextmanager
def no_driver(*, notes: bool = True) -> Iterator[list[Launched]]:
    """Inside, kernels are launched on nothing, as if on a Hopper GPU that is device 0. Gives the list of launches; it
    stays empty without `notes`."""
    launches: list[Launched] = []
    compiled: list[JITFunction] = []

    def compile_nothing(kernel, key, signature, device, constexprs, options, attrs, warmup):  # noqa: ANN001, ANN202
        made = _Uncompiled(kernel.ASTSource(kernel, signature, constexprs, attrs), launches if notes else None)
        kernel.device_caches[device][0][key] = made
        compiled.append(kernel)
        return made

    fake = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: (max(device, 0), 0),
        get_current_target=lambda: HOPPER,
        utils=SimpleNamespace(fill_tma_descriptor=lambda *arguments: arguments),
    )
    before = driver._active
    driver.set_active(fake)
    caches = launch.known, launch.older, gemm_launch.repeats, gemm_launch.older, gemm_launch._compiled
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(JITFunction, "_do_compile", compile_nothing))
            for cache in caches:
                stack.enter_context(mock.patch.dict(cache, clear=True))
            yield launches
    finally:
        driver._active = before
        for kernel in compiled:
            kernel.device_caches.clear()
