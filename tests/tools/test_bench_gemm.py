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
                if backend not in (*bench_gemm.OWN, "scaled"):
                    run()
                called.append((case.kind, backend))
    assert len(called) >= 20
    assert {"cublaslt", "cublaslt+add", "bf16", "gluon", "tl", "scaled"} == {backend for _, backend in called}


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
    auto = {"auto": "cublaslt", "auto_ratio": 0.99, "auto_ms": 2.0, "best_ms": 1.98, "fastest": "triton"}
    assert bench_gemm.line(result | auto).endswith("auto cublaslt 0.99 (2.000 ms; triton 1.980)")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of fake times: `bench_gemm.seconds` gives what is set here, milliseconds by kind and backend."""
    grouped = ("grouped 1D2D", "grouped 1D1D +=", "grouped MXFP8", "grouped MXFP8 +=")
    times = {kind: {"gluon": 1.0, "tl": 2.0, "cublaslt": 1.01, "cublaslt+add": 1.2, "bf16": 3.0, "scaled": 9.0}
             for kind in (*bench_gemm.KINDS, *grouped)}  # fmt: skip

    def bench(case, flush, repeats, skip=()):
        monkeypatch.setattr(bench_gemm, "seconds", lambda runs, *_: {n: times[case.kind][n] / 1e3 for n in runs})
        return measured(case, flush, repeats, skip)

    measured = bench_gemm.bench
    monkeypatch.setattr(bench_gemm, "bench", bench)
    monkeypatch.setattr(bench_gemm, "makers", lambda *_: [cases])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H")
    table = {"H": {kind: [[512, 384, 256, {"triton": 2, "cublaslt": 1}]] for kind in bench_gemm.KINDS.values()}}
    monkeypatch.setattr(gemm_speed, "table", lambda: table)
    gemm_speed.fastest.cache_clear()
    yield times
    gemm_speed.fastest.cache_clear()


def test_what_auto_picks_is_compared_with_the_best(gpu, tmp_path, capsys):
    """Dense and of experts, in the accumulation mode asked for; a pick that is slower by more than 2 % fails."""
    argv = ["--check-auto", "--json", str(tmp_path / "r.json"), "--write-table", str(tmp_path / "t.json"), "--quick"]
    gpu["tensorwise"]["cublaslt"] = 0.99  # 1 % faster than what the table says
    with FakeTensorMode():
        assert bench_gemm.main(argv) == 0
    said = "auto: pass, 7 GEMMs of 7 kinds, at most 1.0% behind the best (by the table before this run)"
    assert said in capsys.readouterr().out
    *lines, said = (json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines())
    assert len(lines) == 9
    assert said["passed"]
    by_kind = {line["kind"]: line for line in lines}
    assert not any("tl" in line["tflops"] for line in lines)
    assert by_kind["1D1D +="]["best_ms"] == 1.0
    assert (by_kind["tensorwise"]["auto"], by_kind["tensorwise"]["fastest"]) == ("triton", "cublaslt")
    assert set(json.loads((tmp_path / "t.json").read_text())["H"]) == set(bench_gemm.KINDS.values())

    gpu["1D1D +="]["cublaslt+add"] = gpu["grouped 1D2D"]["cublaslt"] = 0.9
    with FakeTensorMode():
        assert bench_gemm.main(argv[:3]) == 1
    said = capsys.readouterr().out
    assert "auto: FAIL, 7 GEMMs of 7 kinds, at most 10.0% behind the best; more than 2%: dense 1D1D +=, 4 x 128" in said
    with FakeTensorMode():
        assert bench_gemm.main(["--check-auto", "--only", "MXFP8"]) == 1  # nothing to judge by
    assert "no GEMM was measured" in capsys.readouterr().out


def test_quick_ends_in_time(gpu, monkeypatch, capsys):
    monkeypatch.setattr(bench_gemm, "QUICK_SECONDS", -1)
    with FakeTensorMode():
        assert bench_gemm.main(["--quick"]) == 0
    assert "--quick: 1 of 1 shapes left out" in capsys.readouterr().out


def test_quick_takes_every_kind_first():
    first = [maker.func for maker in bench_gemm.makers("all", quick=True)[:2]]
    assert first == [bench_gemm.dense_cases, bench_gemm.grouped_cases]
    assert len(bench_gemm.makers("all", quick=True)) == len(bench_gemm.makers("all"))


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
    kept, old = [4096, 512, 128, {"cublaslt": 1, "triton": 2}], [4096, 512, 256, {"cublaslt": 1, "triton": 2}]
    path.write_text(json.dumps({"other": {"1d2d": []}, "H": {"1d2d": [kept, old], "tensorwise": []}}))
    bench_gemm.write_table(results, "H", path)
    assert json.loads(path.read_text()) == {
        "other": {"1d2d": []},
        "H": {
            "1d2d": [kept, [4096, 512, 256, {"cublaslt": 8, "triton": 9}]],
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
