"""tools/bench_layer_memory.py: the counts that a GPU isn't needed for, and its record on a GPU."""

import json

import bench_layer_memory
import pytest
import torch


def counts(tmp_path, *argv):
    path = tmp_path / "layer.json"
    assert bench_layer_memory.main(["--device", "cpu", "--output", str(path), *argv]) == 0
    return {r["option"]: r["counted_bytes"] for r in json.loads(path.read_text())["records"]}


def test_a_llama_layer_holds_what_the_design_says(tmp_path, capsys):
    """At 2 x 4096 tokens: three quarters of BF16's bytes, little more than half with fc1's output in FP8."""
    held = counts(tmp_path)
    assert held["bf16"] / 2**20 == pytest.approx(1088, abs=2)
    assert held["blockwise"] <= 0.75 * held["bf16"]
    assert held["tensorwise"] <= 0.75 * held["bf16"]
    assert held["blockwise, fc1 in FP8"] <= 0.55 * held["bf16"]
    assert held["tensorwise, fc1 in FP8"] <= 0.55 * held["bf16"]
    assert "mlp.activation: FP8 output of fc1" in capsys.readouterr().out


def test_flags_are_those_of_training(tmp_path, capsys):
    again = "--recompute-granularity selective --recompute-modules mlp layernorm"
    held = counts(tmp_path, "--options", "bf16", "blockwise", "--flags", again)
    assert held["blockwise"] / 2**20 == pytest.approx(64 + 96 + 64 + 1 + 64, abs=1)
    assert bench_layer_memory.main(["--device", "cpu", "--flags", "--recompute-modules nonsense"]) == 2
    assert "recompute-modules" in capsys.readouterr().err


def test_kernels_are_classed_by_name():
    names = {
        "attention": "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16",
        "gemm": "nvjet_sm90_qqtst_128x256_128x6_2x1_v_bz_TNT",
        "quantize": "swiglu_grad_kernel",
        "norm": "void at::native::GammaBetaBackwardCUDAKernelTemplate",
        "elementwise": "void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add>",
    }
    assert {name: bench_layer_memory.kernel_class(name) for name in names.values()} == {v: k for k, v in names.items()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_allocator_and_count_agree(tmp_path):
    path = tmp_path / "layer.json"
    argv = ["--model", "tiny", "--seq-length", "512", "--no-rival", "--repeats", "2", "--breakdown", "--output"]
    assert bench_layer_memory.main([*argv, str(path), "--options", *bench_layer_memory.OPTIONS]) == 0
    for record in json.loads(path.read_text())["records"]:
        assert record["allocated_bytes"] == pytest.approx(record["counted_bytes"], rel=0.02), record["option"]
        assert record["ms"] > 0
        assert record["kernels"]["gemm"]["launches"] >= 12
