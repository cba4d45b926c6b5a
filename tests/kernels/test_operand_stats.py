"""The monitor's kernels against their twin: in Triton's interpreter, and compiled for Hopper and emulated."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from megafp8.kernels import operand_stats as kernels

from megafp8.fp8 import operand_stats
from megafp8.fp8.operand_stats import OperandStats
from megafp8.fp8.quantizer import Quantizer
from tests.cases import quick
from tests.gpu import test_operand_stats as on_gpu
from tests.gpu.quantize_cases import SPECS
from tests.kernels import testing

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same tests compiled")
@pytest.mark.parametrize(
    ("chosen", "count"), [("not slow", 21), pytest.param("slow or not slow", 44, marks=pytest.mark.slow)]
)
def test_in_the_interpreter(chosen, count):
    """A process of its own: a kernel is interpreted or compiled from the moment its module is imported."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command += ["-m", chosen, "tests/gpu/test_operand_stats.py"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    assert int(re.search(r"(\d+) passed", result.stdout).group(1)) == count


EMULATED = {
    "blockwise": lambda: on_gpu.test_every_kind_of_operand("blockwise", "rowwise"),
    "mxfp8 columns": lambda: on_gpu.test_every_kind_of_operand("mxfp8", "colwise"),
    "squares, E5M2": lambda: on_gpu.test_every_kind_of_operand("blockwise_2d_fp32", "colwise"),
    "tensorwise, saturated": lambda: on_gpu.test_saturated_elements_and_scales_alone("tensorwise_e5m2"),
    "strides": lambda: on_gpu.test_values_of_any_strides(torch.float16),
    "masters": lambda: on_gpu.test_pieces_of_a_primary_weights_masters("mxfp8_2d"),
    "bins": on_gpu.test_bins_begin_where_the_numbers_do,
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same tests on the GPU that is here")
@pytest.mark.parametrize("name", quick(EMULATED, ["mxfp8 columns", "bins"]))
def test_compiled_code_gives_the_twins_numbers(name):
    with testing.emulated_launches():
        EMULATED[name]()


def captured(name, dtype=torch.bfloat16):
    """The launches of an operand with values, without, and of masters."""
    x = torch.ones(256, 1024, dtype=dtype)
    quantized, stats = Quantizer(SPECS[name]).quantize(x), OperandStats.empty(1)
    with (
        testing.captured_launches() as launches,
        mock.patch.object(operand_stats, "_kernels_for", return_value=kernels),
    ):
        stats.add(0, x, quantized)
        stats.add(0, None, quantized)
        stats.add_errors(0, x.view(-1), quantized.rowwise, 0)
    return launches


@pytest.mark.parametrize("name", quick(["blockwise", "mxfp8_2d", "tensorwise_e5m2"], ["mxfp8_2d"]))
def test_compiles_for_hopper(name):
    """Two launches an operand; nothing spills, two programs fit on a multiprocessor, loads are of 16 bytes."""
    launches = captured(name)
    assert [launch.kernel.__name__ for launch in launches] == [
        *("look_kernel", "finish_kernel", "look_kernel", "finish_kernel", "errors_kernel", "finish_kernel")
    ]
    for launch in launches[0], launches[1], launches[4]:
        used = testing.resources(testing.compile_launch(launch))
        assert used.spills == 0
        if launch is launches[0]:
            assert used.registers * 32 * launch.kwargs["num_warps"] * 2 <= 65536
            loads = kernels.ELEMENTS * 2 // 16 // (32 * launch.kwargs["num_warps"])
            assert used.instructions["LDG.E.128"] >= loads
