"""tools/bench_step.py and what it stands on, at a tiny size on the CPU."""

import json

import bench_host
import bench_step
import bench_timing
import pytest
import torch
from bench_timing import Kernel
from step_report import breakdown, kernel_class

from megafp8.core.moe.experts import Experts
from megafp8.fp8.weight_stack import stacked

CPU = torch.device("cpu")


def test_both_scopes_from_end_to_end(tmp_path, capsys):
    json_path, png = tmp_path / "step.json", tmp_path / "step.png"
    argv = ["--preset", "tiny", "--device", "cpu", "--no-compile", "--rounds", "1", "--warmup", "1"]
    argv += ["--recipes", "blockwise", "--microbatches", "2", "--output", str(json_path), "--png", str(png)]
    assert bench_step.main(argv) == 0
    results = json.loads(json_path.read_text())
    assert list(results["scopes"]) == ["layers", "step"]
    for scope, rows in results["scopes"].items():
        assert list(rows) == ["bf16", "blockwise"]
        for row in rows.values():
            assert row["ms"] > 0
            tokens = 64 * (2 if scope == "step" else 1)
            assert row["tokens_per_second"] == pytest.approx(1e3 * tokens / row["ms"])
            assert {"gemm", "attention", "idle"} <= set(row["breakdown"])
            assert row["breakdown"]["gemm"]["launches"] > 0
            assert scope == "layers" or row["data_wait_ms"] > 0
    losses = [row["losses"] for row in results["scopes"]["step"].values()]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=0.005)  # of the same weights
    assert losses[0][0] == pytest.approx(5.6, abs=0.3)  # the logarithm of 256
    assert png.stat().st_size > 1000
    out = capsys.readouterr().out
    assert "blockwise: gemm " in out
    assert bench_step.main(["--preset", "tiny", "--device", "cpu", "--flags", "--recompute-modules nonsense"]) == 2
    assert "recompute-modules" in capsys.readouterr().err


@pytest.mark.parametrize("preset", bench_step.PRESETS)
def test_presets_are_configurations(preset, capsys):
    assert bench_step.main(["--preset", preset, "--device", "cpu", "--ledger", "blockwise"]) == 0
    assert "| layers.*.mlp.fc2 input | backward |" in capsys.readouterr().out or "moe" in preset or "qwen" in preset


def test_time_goes_to_classes_and_what_is_left_is_idle():
    kernels = [
        Kernel("nvjet_sm90_qqtst_128x256", 0.0, 4.0),
        Kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 4.0, 2.0),
        Kernel("quantize_1d_kernel", 5.0, 2.0),  # beside attention, for a while
        Kernel("norm_both_kernel", 9.0, 1.0),
        Kernel("ncclDevKernel_AllReduce", 9.5, 2.5),
    ]
    assert bench_timing.busy(kernels) == (12.0, 10.0)
    found = breakdown(kernels, 2, 6.5)
    assert {kind: entry["ms"] for kind, entry in found.items()} == {
        "gemm": 2.0, "attention": 1.0, "quantize": 1.0, "norm": 0.5, "communication": 1.25, "idle": 1.5,
    }  # fmt: skip
    assert kernel_class("void at::native::vectorized_elementwise_kernel<8, CUDAFunctor_add>") == "elementwise"
    assert kernel_class("swiglu_grad_kernel") == "activation"
    assert kernel_class("Memcpy HtoD (Pageable -> Device)") == "copies"
    assert kernel_class("adamw_tiles_kernel") == "optimizer"


@pytest.mark.parametrize("gradients", ["fp32", "bf16"])
def test_experts_lie_where_the_optimizer_keeps_them(gradients):
    """Else every call would copy their weights together."""
    args = bench_step.arguments().parse_args(["--preset", "tiny-moe", "--device", "cpu"])
    layers = bench_step.Layers(bench_step.config_of(args, "blockwise"), CPU, gradients)
    found = [module for module in layers.block.modules() if isinstance(module, Experts)]
    sink = layers.arguments[1].grads
    assert len(found) == 2
    for grouped in (grouped for experts in found for grouped in experts._grouped):
        assert stacked(grouped.stack.params) is not None
        assert sink is None or stacked([sink.buffer(param) for param in grouped.stack.params]) is not None


def test_candidates_take_turns():
    seen = []
    runs = {name: lambda name=name: seen.append(name) for name in "ab"}
    times = bench_timing.in_turn(runs, CPU, 2, calls=2, before=lambda: seen.append("-"))
    assert seen == ["-", "a", "a", "-", "b", "b"] * 2
    assert {name: len(found) for name, found in times.items()} == {"a": 2, "b": 2}
    assert bench_timing.milliseconds(lambda: seen.append("c"), CPU, 3, calls=2, warmup=1) >= 0
    assert seen.count("c") == 7


def test_the_hosts_part_of_a_layer(tmp_path):
    """What FP8 adds to it is a few hundred calls; kernels are restored afterwards."""
    before = torch.nn.functional.scaled_dot_product_attention, bench_host.gemm.capability
    assert (
        bench_host.main(["--recipes", "blockwise", "delayed", "--repeats", "1", "--output", str(tmp_path / "h")]) == 0
    )
    found = json.loads((tmp_path / "h").read_text())
    assert found["blockwise"]["calls"] < 1000
    assert found["delayed"]["calls"] < 1120
    assert (torch.nn.functional.scaled_dot_product_attention, bench_host.gemm.capability) == before


def test_a_table_of_sizes(tmp_path):
    path = tmp_path / "crossover.json"
    argv = ["--device", "cpu", "--rounds", "1", "--crossover-hidden", "128", "--crossover-tokens", "16", "32"]
    path.write_text('{"another": {}}')
    assert bench_step.main([*argv, "--crossover", str(path)]) == 0
    table = json.loads(path.read_text())
    assert table["another"] == {}
    assert [row[:3] for row in table["cpu"]["blockwise"][:4]] == [
        [16, 192, 128], [16, 128, 128], [16, 896, 128], [16, 128, 448],
    ]  # fmt: skip
    assert len(table["cpu"]["tensorwise"]) == 8
    assert all(row[3] > 0 for row in table["cpu"]["tensorwise"])
