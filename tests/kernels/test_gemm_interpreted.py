"""The plain Triton GEMMs in Triton's interpreter, for machines without a GPU: control flow, indexing, masks.

A kernel is interpreted or compiled from the moment its module is imported: these tests run in a process of their own.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the same tests compiled")
@pytest.mark.parametrize(("file", "least"), [("test_gemm.py", 20), ("test_gemm_grouped.py", 18)])
def test_in_the_interpreter(file, least):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", f"tests/gpu/{file}"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed
    assert int(passed.group(1)) >= least, result.stdout[-500:]
