"""The plain Triton GEMMs in Triton's interpreter, for machines without a GPU: control flow, indexing, masks.

A kernel is interpreted or compiled from the moment its module is imported: these tests run in a process of their own.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same tests compiled")
@pytest.mark.parametrize(
    ("chosen", "counts"),
    [
        ("not sizes0 and not same_bits", (18, 9, 15)),  # the smaller experts
        pytest.param("", (20, 18, 19), marks=pytest.mark.slow),
    ],
    ids=["small", "all"],
)
def test_in_the_interpreter(chosen, counts):
    """counts: the least number of tests that pass of each file."""
    files = dict(zip(("test_gemm.py", "test_gemm_grouped.py", "test_gemm_scaled.py"), counts, strict=True))
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-W", "ignore"]
    command += ["-k", chosen, *(f"tests/gpu/{file}" for file in files)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    passed = Counter(re.findall(r"tests/gpu/(\w+\.py)::.* PASSED", result.stdout))
    assert all(passed[file] >= least for file, least in files.items()), passed
