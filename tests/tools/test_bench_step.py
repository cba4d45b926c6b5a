"""tools/bench_step.py and what it stands on, at a tiny size on the CPU."""

import json

import bench_host
import bench_step
import bench_step_all
import bench_timing
import pytest
import torch
from bench_clocks import Clocks
from bench_timing import Call, Kernel
from kernel_names import kernel_class, short
from step_report import breakdown, gaps, starved, table, where_time_goes

from megafp8.core.moe.experts import Experts
from megafp8.fp8.weight_stack import stacked

CPU = torch.device("cpu")


def test_both_scopes_from_end_to_end(tmp_path, capsys):
    json_path, png = tmp_path / "step.json", tmp_path / "step.png"
    argv = ["--preset", "tiny", "--device", "cpu", "--no-compile", "--rounds", "1", "--warmup", "1"]
    argv += ["--recipes", "blockwise", "--microbatches", "2", "--output", str(json_path), "--png", str(png)]
    assert bench_step.main([*argv, "--profiled", "1", "--host-profile", "30"]) == 0
    results = json.loads(json_path.read_text())
    assert list(results["scopes"]) == ["layers", "step, 2 microbatches"]
    for scope, rows in results["scopes"].items():
        assert list(rows) == ["bf16", "blockwise"]
        for row in rows.values():
            assert row["ms"] > 0
            tokens = 64 * (1 if scope == "layers" else 2)
            assert row["tokens_per_second"] == pytest.approx(1e3 * tokens / row["ms"])
            assert {"gemm", "attention", "idle"} <= set(row["breakdown"])
            assert row["breakdown"]["gemm"]["launches"] > 0
            assert scope == "layers" or row["data_wait_ms"] > 0
    losses = [row["losses"] for row in results["scopes"]["step, 2 microbatches"].values()]
    assert losses[0][0] == pytest.approx(losses[1][0], abs=0.005)  # of the same weights
    assert losses[0][0] == pytest.approx(5.6, abs=0.3)  # the logarithm of 256
    assert png.stat().st_size > 1000
    out = capsys.readouterr().out
    assert "  blockwise: " in out
    assert " ms = gemm " in out
    seen = {name for name, _, _ in results["scopes"]["layers"]["blockwise"]["host_profile"]}
    assert len(seen) == 30
    assert any("backward" in name for name in seen)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("--flags", "--recompute-modules nonsense"), "--recompute-modules nonsense"),
        (("--rounds", "0"), "--rounds 0: give 1 or more"),
        (("--host-profile", "-3"), "--host-profile -3: give 0 or more"),
        (("--seq-lengths", "2048", "0"), "--seq-lengths 0: give 1 or more"),
        (("--png", "/dev/null/x.png"), "--png /dev/null/x.png: can't write there; give another file"),
    ],
)
def test_mistakes_are_one_line(argv, line, capsys):
    assert bench_step.main(["--preset", "tiny", "--device", "cpu", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench_step.py: error: ")
    assert line in error
    assert error.count("\n") == 1


def test_a_large_model_is_not_begun_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setattr(bench_step, "pick_device", lambda name: torch.device("cpu"))
    assert bench_step.main([]) == 2
    told = capsys.readouterr().err
    assert told == (
        "bench_step.py: error: --preset llama3-8b: there is no GPU; give --preset tiny, or --device cpu for hours\n"
    )


@pytest.mark.parametrize("preset", bench_step.PRESETS)
def test_presets_are_configurations(preset, capsys):
    assert bench_step.main(["--preset", preset, "--device", "cpu", "--ledger", "blockwise"]) == 0
    assert "| layers.*.mlp.fc2 input | backward |" in capsys.readouterr().out or "moe" in preset or "qwen" in preset


def timeline():
    """A call of 14 ms in which kernels run for 11 of them; attention and quantize run beside each other for one."""
    kernels = [
        Kernel("nvjet_sm90_qqtst_128x256", 1.0, 4.0),
        Kernel("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 5.0, 2.0),
        Kernel("quantize_1d_kernel", 6.0, 2.0),
        Kernel("norm_both_kernel", 9.5, 1.0),
        Kernel("ncclDevKernel_AllReduce", 10.0, 3.0),
    ]
    return Call(kernels, 0.5, 14.5)


def test_classes_and_idle_add_up_to_the_span():
    found = breakdown([timeline(), timeline()])
    assert {kind: entry["ms"] for kind, entry in found.items()} == {
        "gemm": 4.0, "attention": 2.0, "quantize": 1.0, "norm": 1.0, "communication": 2.5, "idle": 3.5,
    }  # fmt: skip
    assert all(entry["launches"] == 1 for kind, entry in found.items() if kind != "idle")
    more = where_time_goes([timeline()])
    assert more["span_ms"] == sum(entry["ms"] for entry in more["breakdown"].values()) == 14
    assert (more["idle_percent"], more["standalone_percent"]) == (25, pytest.approx(100 / 14))
    assert gaps([timeline()], 2) == [(1.5, 1, "quantize_1d_kernel", "norm_both_kernel"),
                                     (1.5, 1, "ncclDevKernel_AllReduce", "-")]  # fmt: skip


def test_calls_lie_between_markers():
    marker = "at::cuda::(anonymous namespace)::spin_kernel(long)"
    kernels = [Kernel(marker, 0, 1), Kernel("a", 2, 1), Kernel(marker, 4, 1), Kernel(marker, 6, 1), Kernel("b", 9, 1)]
    first, second = bench_timing.between_markers(kernels)
    assert ([k.name for k in first.kernels], first.start, first.end) == (["a"], 1, 4)
    assert (second.kernels, second.span, list(second.gaps())) == ([], 1, [(1, "", "")])


def test_kernels_belong_to_the_candidate_that_launched_them(monkeypatch):
    """A queue of our own: a kernel a millisecond."""
    queue = []

    def launch(name):
        queue.append(Kernel(name, float(len(queue)), 1.0))

    def listed(run, device):
        run()
        return queue

    monkeypatch.setattr(
        torch.cuda, "_sleep", lambda cycles: launch("at::cuda::(anonymous namespace)::spin_kernel(long)")
    )
    monkeypatch.setattr(bench_timing, "kernels", listed)
    runs = {"a": lambda: launch("of a"), "b": lambda: [launch("of b"), launch("of b")]}
    found = bench_timing.calls_in_turn(runs, torch.device("cuda"), 2)
    names = {name: [[kernel.name for kernel in call.kernels] for call in calls] for name, calls in found.items()}
    assert names == {"a": [["of a"]] * 2, "b": [["of b"] * 2] * 2}
    assert [call.span for calls in found.values() for call in calls] == [1, 1, 2, 2]
    assert queue[1].name == "of b"  # fills the queue, and is nobody's
    assert found["a"][0].start < found["b"][0].start
    monkeypatch.setattr(bench_timing, "MARKER", "another name")
    with pytest.raises(RuntimeError, match="0 calls lie between kernels named another name, where 5 were made"):
        bench_timing.calls_in_turn(runs, torch.device("cuda"), 2)


def test_a_host_that_is_the_limit_is_named():
    row = {"span_ms": 10.0, "idle_percent": 20.0, "host_ms": 9.0}
    assert starved(row)
    assert not starved(row | {"host_ms": 7.0})  # something else leaves the device idle
    assert not starved(row | {"idle_percent": 1.0, "host_ms": 11.0})  # it waits for a full queue
    row |= {"ms": 10.1, "tokens": 64, "tokens_per_second": 6.4, "tflops": 1.0, "peak_gib": 1.0, "ratio": 1.0}
    row |= {"standalone_percent": 2.0, "breakdown": {"idle": {"ms": 2.0, "launches": 0.0}}, "syncs": ["step.py:9"] * 4}
    row |= {"gaps": [(1.9, 3, "a", "b")], "clocks": {"sm_mhz": 1500.0, "watts": 700.0, "samples": 9}}
    row |= {"unlisted": {"passes": {"FillFunctor<float>": [10, 2.01]}, "small": [30, 0.05]}}
    lines = table({"preset": "tiny", "gradients": "fp32", "scopes": {"step": {"bf16": row}}})
    assert lines[2].split()[-5:] == ["1.00", "20.0", "2.0", "9.00", "4"]
    assert [line.removeprefix("  bf16: ") for line in lines[3:-1]] == [
        "10.00 ms = idle 2.00 (0)",
        "no kernel for 1.90 ms in 3 places between a and b",
        "the host is the limit: it queues no faster than the device works",
        "SM clock 1500 MHz, 700 W, medians of 9 looks",
        "waits for the device at step.py:9, 4 times a call",
        "not in the ledger: FillFunctor<float>, 10 launches, 2.01 ms",
        "30 other small launches, 0.05 ms",
    ]


NATIVE = "void at::native::"
ITERATED = f"{NATIVE}elementwise_kernel<128, 2, at::native::gpu_kernel_impl_nocast<at::native::"
COPY = f"{NATIVE}unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)"
COPY += "::{lambda()#3}::operator()() const::{lambda(float)#1}, at::native::memory::LoadWithCast<1> >(int)"
FILL = f"{NATIVE}vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, std::array<char*, 1ul> >(int)"
MULTIPLY = f"{ITERATED}BinaryFunctor<c10::BFloat16, c10::BFloat16, c10::BFloat16, "
MULTIPLY += "at::native::binary_internal::MulFunctor<float> > >(at::TensorIteratorBase&)"
WHERE = f"{ITERATED}(anonymous namespace)::where_kernel_impl(at::TensorIterator&)::{{lambda()#1}}::operator()() const::"
WHERE += "{lambda(bool, long, long)#1}>(int)"
SUM = f"{NATIVE}reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::func_wrapper_t<float, "
SUM += "at::native::sum_functor<float, float, float>::op> > >(int)"
INDEX = f"{NATIVE}index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_kernel_impl"
INDEX += "<at::native::OpaqueType<2> >(at::TensorIteratorBase&)::{lambda(char*, char const*, long)#1}>(int)"
GROUPED = "_ZN7cutlass13device_kernelIN2at4cuda6detail25enable_3x_kernel_for_sm9xINS_4gemm6kernel13GemmUniversalI"
DQ = "void cudnn::fusion::convert_dq_to_16bits<true>(void const*)"


@pytest.mark.parametrize(
    ("name", "known_as", "kind"),
    [
        ("swiglu_grad_kernel", "swiglu_grad_kernel", "activation"),
        ("adamw_tiles_kernel", "adamw_tiles_kernel", "optimizer"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD", "copies"),
        ("triton_poi_fused__to_copy_add_3", "triton_poi_fused__to_copy_add_3", "elementwise"),
        (DQ, "cudnn::fusion::convert_dq_to_16bits", "attention"),
        (COPY, "direct_copy_kernel_cuda(float) with cast", "cast"),
        (COPY.replace("LoadWithCast", "LoadWithoutCast"), "direct_copy_kernel_cuda(float)", "copies"),
        (FILL, "FillFunctor<float>", "copies"),
        (MULTIPLY, "MulFunctor<BFloat16>", "elementwise"),
        (WHERE, "where_kernel_impl(bool, long, long)", "elementwise"),
        (INDEX, "index_kernel_impl(char*, char const*, long)", "elementwise"),
        (GROUPED, "cutlass::device_kernel", "gemm"),
        ("norm_heads_grad_kernel", "norm_heads_grad_kernel", "heads"),
        (SUM, "reduce_kernel sum_functor", "elementwise"),
    ],
)
def test_names_of_kernels(name, known_as, kind):
    assert (short(name), kernel_class(name)) == (known_as, kind)


def test_clocks_are_medians_and_nobody_has_to_answer(monkeypatch, tmp_path):
    script = tmp_path / "nvidia-smi"
    script.write_text("#!/bin/sh\necho 1500, 690.5\n")
    script.chmod(0o755)
    monkeypatch.setattr("bench_clocks.INTERVAL_S", 0.01)
    for command, found in (([str(script)], (1500, 690.5)), (["false"], None), ([], None)):
        monkeypatch.setattr("bench_clocks._command", lambda device, command=command: command)
        with Clocks(CPU) as clocks:
            while command[:1] == [str(script)] and not clocks._samples:
                pass
        assert found == (clocks.found and (clocks.found["sm_mhz"], clocks.found["watts"]))
    monkeypatch.undo()
    assert not Clocks(CPU)._command


def test_sizes_are_scopes_of_their_own():
    args = bench_step.arguments().parse_args(["--preset", "tiny"])
    args.device = "cpu"
    base = bench_step.config_of(args, "bf16")
    assert (base.train.micro_batch_size, base.data.seq_length, base.train.global_batch_size) == (2, 32, 2)
    for length, samples in ((16, 4), (64, 1), (128, 1)):
        size = bench_step.Size(3, length)
        config = bench_step.config_of(args, "bf16", size)
        sizes = config.train.micro_batch_size, config.data.seq_length, config.train.global_batch_size
        assert sizes == (samples, length, 3 * samples)
        assert size.label == f", sequences of {length}, 3 microbatches"


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


@pytest.mark.slow
def test_compiled_layers_are_one_graph_and_give_the_same_gradients():
    args = bench_step.arguments().parse_args(["--preset", "tiny", "--device", "cpu"])
    config = bench_step.config_of(args, "bf16")
    torch.manual_seed(0)
    plain = bench_step.Layers(config, CPU, "fp32")
    torch.manual_seed(0)
    compiled = bench_step.Compiled(config, CPU, "fp32")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layers in (plain, compiled):
        layers()
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    found, expected = ((x.x.grad, *x.arguments[1].grads.buffers.values()) for x in (compiled, plain))
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()
    assert sum(bool(one.norm() > 0) for one in found) == 5  # of the input and four linears; norms' go another way


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
    argv = ["--launches", "--recipes", "blockwise", "--repeats", "1", "--output", str(tmp_path / "launches")]
    assert bench_host.main(argv) == 0
    assert json.loads((tmp_path / "launches").read_text())["blockwise"]["calls"] < 2700
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


@pytest.mark.parametrize("text", ["[]", '{"cpu": []}', '{"cpu": {"blockwise": 1}}', "not JSON", None])
def test_a_file_that_is_no_table_of_sizes_is_left_alone(text, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(bench_step.bench_crossover, "run", lambda *args: pytest.fail("it measures"))
    path = tmp_path / "file"
    path.mkdir() if text is None else path.write_text(text)
    assert bench_step.main(["--device", "cpu", "--crossover", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"bench_step.py: error: --crossover {path}: ")
    assert error.endswith("; give another file\n")
    assert text is None or path.read_text() == text


def test_recipes_of_the_table_of_sizes_are_its_own(tmp_path, capsys):
    argv = ["--device", "cpu", "--crossover", str(tmp_path / "x.json"), "--recipes", "bf16", "blockwise"]
    assert bench_step.main(argv) == 2
    told = "--recipes bf16 blockwise with --crossover: it measures blockwise and tensorwise; leave it out\n"
    assert capsys.readouterr().err == f"bench_step.py: error: {told}"


def test_all_runs_go_on_after_a_failure(tmp_path, monkeypatch, capsys):
    seen = []

    def fake(argv):
        seen.append(argv)
        print(f"table {len(seen)}")
        if len(seen) == 1:
            raise RuntimeError("no such kernel")
        return 0

    monkeypatch.setattr(bench_step, "main", fake)
    monkeypatch.setattr(bench_step_all, "pick_device", torch.device)
    names = ["qwen3-30b-a3b", "crossover"]
    assert bench_step_all.main([str(tmp_path), "--only", *names]) == 1
    out = capsys.readouterr().out
    assert "Traceback" in out
    assert "RuntimeError: no such kernel" in out
    assert [(tmp_path / f"{name}.txt").read_text() for name in names] == ["table 1\n", "table 2\n"]
    assert seen[1][-2:] == ["--crossover", str(tmp_path / "crossover.json")]
    assert bench_step_all.main([str(tmp_path), "--only", "step"]) == 0


@pytest.mark.parametrize("name", bench_step_all.RUNS)
def test_all_runs_are_configurations(name, tmp_path):
    args = bench_step.arguments().parse_args(bench_step_all.arguments_of(name, tmp_path, rehearse=True))
    args.device = "cpu"
    for recipe in args.recipes:
        for count in args.microbatches:
            for length in args.seq_lengths:
                bench_step.config_of(args, recipe, bench_step.Size(count, length))
    assert args.rounds == (3 if name == "crossover" else 1)
