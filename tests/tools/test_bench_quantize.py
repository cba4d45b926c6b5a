"""tools/bench_quantize.py: its answer without a GPU, and PyTorch's versions against the reference."""

import bench_quantize
import pytest
import torch

from megafp8.fp8 import reference


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
def test_without_a_gpu_it_says_so_and_exits_with_2(capsys):
    assert bench_quantize.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_the_compiled_rivals_compute_the_same_function():
    x = torch.randn(128, 256).bfloat16()
    row, col = bench_quantize.torch_blockwise_both(x)
    want_row, want_col = reference.quantize(x, bench_quantize.BLOCKWISE, True, True)
    assert torch.equal(row[0].view(torch.uint8), want_row[0].view(torch.uint8))
    assert torch.equal(col[0].view(torch.uint8), want_col[0].view(torch.uint8))
    data, _ = bench_quantize.torch_tensorwise(x)
    want = reference.quantize(x, bench_quantize.TENSORWISE)[0][0]
    differing = (data.view(torch.uint8) != want.view(torch.uint8)).float().mean()
    assert differing < 0.01  # its scale is a reciprocal and a product


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_every_case_and_configuration_runs(monkeypatch):
    shape = (1024, 1024)
    monkeypatch.setitem(bench_quantize.SHAPES, "tiny", dict.fromkeys(bench_quantize.ROLES, [shape]))
    args = bench_quantize.arguments().parse_args(["--candidates"])
    results = list(bench_quantize.bench("tiny", *shape, args, float("inf")))
    assert {r["kernel"] for r in results} == {case.name for case in bench_quantize.cases(*shape)}
    assert all(0 < r["percent_of_copy"] < 1000 for r in results)
    assert not list(bench_quantize.bench("tiny", *shape, args, 0.0))
