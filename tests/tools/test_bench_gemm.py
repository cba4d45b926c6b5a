"""tools/bench_gemm.py: its answer without a GPU, its shapes, and its calls, which fake tensors check without one."""

import json

import bench_gemm
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megafp8.fp8 import gemm_speed
from tests.kernels import testing


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2(capsys):
    assert bench_gemm.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_shapes_are_those_of_the_models():
    everything = dict(bench_gemm.shapes("all"))
    assert everything["llama3-8b fc1"] == (8192, 28672, 4096)
    assert everything["llama3-70b fc2"] == (8192, 8192, 28672)
    assert everything["square 8192"] == (8192, 8192, 8192)
    assert all(M >= 4096 for M, _, _ in everything.values())
    assert dict(bench_gemm.shapes("deepseek-v3")).items() <= everything.items()


def cases():
    yield from bench_gemm.dense_cases("dense", 512, 384, 256)
    yield from bench_gemm.grouped_cases(4, 128, "grouped", 256, 384)


def test_every_backend_takes_its_operands():
    """Contracts of rivals by fake tensors, of the project's kernels by recording their launches."""
    called = []
    with FakeTensorMode(), testing.captured_launches():
        for case in cases():
            for backend, run in case.runs.items():
                if backend not in bench_gemm.OWN:
                    run()
                called.append((case.kind, backend))
    assert len(called) >= 20
    assert {"cublaslt", "cublaslt+add", "bf16", "gluon", "tl"} == {backend for _, backend in called}


def test_operations_and_bytes_are_counted():
    with FakeTensorMode():
        by_kind = {case.kind: case for case in cases()}
    assert by_kind["tensorwise"].flops == 2 * 512 * 384 * 256
    assert by_kind["tensorwise"].nbytes == 512 * 256 + 384 * 256 + 2 * 512 * 384
    assert by_kind["tensorwise +="].nbytes == (384 + 256) * 512 + 2 * 4 * 384 * 256
    wgrad = by_kind["1D1D +="]
    assert wgrad.shape == (384, 256, 512)
    scales = 4 * (384 + 256) * 512 // 128
    assert wgrad.nbytes == (384 + 256) * 512 + scales + 2 * 4 * 384 * 256


def test_a_line_names_speed_and_ratios():
    result = {"name": "x", "kind": "1D2D", "shape": [1, 2, 3], "best": "tl", "tflops": {"gluon": 1.0, "tl": 2.0},
              "gb_per_s": 12.0, "ratio_to_bf16": 1.5, "ratio_to_cublaslt": 0.95}  # fmt: skip
    line = bench_gemm.line(result)
    assert "1x2x3" in line
    assert "12 GB/s" in line
    assert line.endswith("1.50x bf16  0.95x cublaslt")
    assert bench_gemm.line(result | {"auto": "cublaslt", "auto_ratio": 0.99}).endswith("auto cublaslt 0.99")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_every_case_runs():
    flush = torch.empty(1 << 20, dtype=torch.int8, device="cuda")
    for case in cases():
        result = bench_gemm.bench(case, flush, 2)
        assert all(value > 0 for value in result["tflops"].values())


def test_the_table_is_what_auto_reads(tmp_path, monkeypatch):
    results = [
        {"kind": "1D2D", "shape": [4096, 512, 256], "tflops": {"gluon": 9.4, "cublaslt": 8.0, "bf16": 5.0}},
        {"kind": "1D1D +=", "shape": [512, 256, 4096], "tflops": {"gluon": 6.0, "cublaslt": 8.0, "cublaslt+add": 7.0}},
        {"kind": "grouped 1D2D", "shape": [1, 2, 3], "tflops": {"gluon": 6.0, "bf16": 8.0}},
    ]
    path = tmp_path / "table.json"
    path.write_text('{"other": {"1d2d": []}, "H": {"1d2d": [], "tensorwise": []}}')
    bench_gemm.write_table(results, "H", path)
    assert json.loads(path.read_text()) == {
        "other": {"1d2d": []},
        "H": {
            "1d2d": [[4096, 512, 256, {"cublaslt": 8, "triton": 9}]],
            "tensorwise": [],
            "1d1d+=": [[512, 256, 4096, {"cublaslt": 7, "triton": 6}]],
        },
    }
    monkeypatch.setattr(gemm_speed, "table", lambda: json.loads(path.read_text()))
    gemm_speed.fastest.cache_clear()
    backends = ("cublaslt", "triton")
    assert gemm_speed.fastest("H", "1d2d", (512, 256), backends) == "triton"
    assert gemm_speed.fastest("H", "1d1d+=", (512, 256), backends) == "cublaslt"
    gemm_speed.fastest.cache_clear()
