"""The self-test's part speed: what is measured, and what is judged by it. Nothing is measured here."""

from __future__ import annotations

from pathlib import Path

import pytest
import selftest_nccl
import selftest_runs
import selftest_speed
import selftest_steps
import torch

from megafp8.lone import fake_parallel
from megafp8.parallel import ParallelContext
from megafp8.training import trainer
from megafp8.training.build import build_parts

ROOT = Path(__file__).resolve().parents[2]
FASTER = {"ms": [9.0, 10.0, 99.0], "gather_mib": 50.0}
OFF = {"ms": [10.0, 10.0, 10.0], "gather_mib": 100.0}


def test_a_switch_is_judged_by_rounds_in_which_both_ran():
    """One bad round of either decides nothing; bytes are a step's."""
    found = selftest_speed.on_the_wire(("--fp8-param-gather",), OFF, FASTER)
    assert found == {"bytes_to_off": 0.5, "speed_to_off": 1.0, "passed": True}
    slower = FASTER | {"ms": [12.0, 10.0, 11.0]}
    assert not selftest_speed.on_the_wire(("--fp8-param-gather",), OFF, slower)["passed"]
    assert not selftest_speed.on_the_wire(("--fp8-param-gather",), OFF, FASTER | {"gather_mib": 56.0})["passed"]


def measured(monkeypatch, runner: selftest_runs.Runner) -> list[dict[str, selftest_runs.Flags]]:
    """What `selftest_speed` measures from now on, without measuring it."""
    calls = []

    def measure(runner, runs, plan):
        calls.append(runs)
        return {
            name: FASTER | {"tokens_per_second": 2.0, "traffic": {("gather", "dp"): 2**20, ("deal", "ep"): 2**21}}
            for name in runs
        }

    monkeypatch.setattr(selftest_speed, "measure", measure)
    return calls


def test_cases_can_be_chosen_and_a_switch_takes_turns_with_itself_off(tmp_path, monkeypatch):
    runner = selftest_runs.Runner(tmp_path, "cuda", "0")
    calls = measured(monkeypatch, runner)
    monkeypatch.setattr(selftest_speed, "smallest_memory", lambda n: 140 << 30)
    every = list(selftest_speed.Speed(runner, 2).checks(["bf16", "blockwise"]))
    assert {name.split(", ")[1][:3] for name, _ in every} == {"DP2", "EP2", "TP2"}
    chosen = list(selftest_speed.Speed(runner, 2, ("EP",)).checks(["bf16", "blockwise"]))
    switches = [
        "bf16",
        "blockwise",
        "blockwise --moe-fp8-dispatch",
        "blockwise --moe-fp8-dispatch --moe-fp8-combine-grad",
    ]
    assert [name.partition("EP2 ")[2] for name, _ in chosen] == switches
    rows = [check() for _, check in chosen]
    assert [list(runs) for runs in calls] == [["on"], ["on"], ["off", "on"], ["off", "on"]]
    assert set(calls[2]["on"]) - set(calls[2]["off"]) == {"--moe-fp8-dispatch"}
    assert set(calls[3]["on"]) - set(calls[3]["off"]) == {"--moe-fp8-dispatch", "--moe-fp8-combine-grad"}
    assert "--deterministic-mode" not in calls[0]["on"]
    assert rows[2] == {
        **FASTER, "tokens_per_second": 2.0, "gather_mib": 1.0, "deal_mib": 2.0, "to_bf16": 1.0, "bytes_to_off": 1.0,
        "speed_to_off": 1.0, "passed": False, "off": rows[2]["off"],
    }  # fmt: skip


WHOLE = ("WHOLE",)
THREE = ["bf16", "blockwise", "tensorwise"]


def test_the_whole_model_is_the_script_s(tmp_path, monkeypatch):
    """Shape and layout of examples/llama3_8b.sh, each recipe by itself with FP8 weights, few steps."""
    monkeypatch.setattr(selftest_speed, "smallest_memory", lambda n: 140 << 30)
    runner = selftest_runs.Runner(tmp_path, "cuda", "0")
    script = (ROOT / "examples/llama3_8b.sh").read_text()
    blocks = [script.partition(f"{name}=(\n")[2].partition("\n)")[0].split() for name in ("MODEL", "LAYOUT")]
    given = [flag for block in blocks for flag in block] + ["--mock-data", "--vocab-size", "128256"]
    given += [
        "--tokenizer-type",
        "ByteTokenizer",
        "--bf16",
        "--micro-batch-size",
        "1",
        "--train-iters",
        "1",
        "--lr",
        "1e-4",
    ]
    speed, env = selftest_speed.Speed(runner, 4, WHOLE), {"WORLD_SIZE": "4"}
    ours = selftest_runs.parse_args(list(speed.flags("WHOLE", "bf16", ())), env=env, check_files=False)
    theirs = selftest_runs.parse_args(given, env=env)
    assert selftest_speed.with_vocabulary(ours).model == selftest_speed.with_vocabulary(theirs).model
    assert selftest_speed.with_vocabulary(ours).model.padded_vocab_size == 128256
    assert (ours.parallel, ours.optimizer.use_distributed_optimizer) == (theirs.parallel, True)
    assert (ours.data.seq_length, ours.train.global_batch_size) == (8192, 16)
    assert [name for name, _ in speed.checks(THREE)] == [
        "Llama-3-8B whole, TP2+SP DP2 bf16",
        "Llama-3-8B whole, TP2+SP DP2 blockwise --fp8-param-gather",
        "Llama-3-8B whole, TP2+SP DP2 tensorwise --fp8-param-gather",
    ]


def test_the_whole_model_is_left_out_where_it_does_not_fit(tmp_path, monkeypatch):
    """With a line that says why; what a rank needs is planned."""
    monkeypatch.setattr(selftest_speed, "smallest_memory", lambda n: 79 << 30)
    runner = selftest_runs.Runner(tmp_path, "cuda", "0")
    ((name, check),) = selftest_speed.Speed(runner, 2, WHOLE).checks(THREE)
    row = check()
    assert row == {
        "passed": True, "left_out": "needs 85.6 GiB of a GPU's memory; the smallest has 75.0 for it",
    }  # fmt: skip
    assert selftest_nccl.line({"name": name} | row).startswith("skip Llama-3-8B whole, TP2+SP ")
    assert len(list(selftest_speed.Speed(runner, 8, WHOLE).checks(THREE))) == 3
    (odd,) = selftest_speed.Speed(selftest_runs.Runner(tmp_path, "cpu", "0"), 3, WHOLE).checks(THREE)
    assert odd[1]() == {"passed": True, "left_out": "needs an even number of GPUs, not 3"}


@pytest.mark.parametrize(("fp8", "passed"), [((1.2, 1.3), True), ((1.3, 1.2), True), ((1.2, 1.2), False)])
def test_the_best_fp8_step_of_the_whole_model_has_to_be_faster(fp8, passed, tmp_path, monkeypatch):
    """The last row says so, whatever the number of GPUs; no row takes turns with itself."""
    runner, speeds, names = selftest_runs.Runner(tmp_path, "cuda", "0"), iter((1.0, *fp8)), []

    def measure(runner, runs, plan):
        names.extend((*runs, plan))
        return {name: {"tokens_per_second": next(speeds), "traffic": {}} for name in runs}

    monkeypatch.setattr(selftest_speed, "measure", measure)
    monkeypatch.setattr(selftest_speed, "smallest_memory", lambda n: 140 << 30)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 80 << 30)
    rows = [check() for _, check in selftest_speed.Speed(runner, 2, WHOLE).checks(THREE)]
    assert names == ["on", selftest_speed.WHOLE_PLAN] * 3
    assert [row["passed"] for row in rows] == [True, True, passed]
    assert rows[2]["best_to_bf16"] == max(fp8)
    assert "peak 80.0 GiB" in selftest_nccl.line({"name": "x"} | rows[0])


def test_the_bar_is_not_passed_without_a_bf16_step(tmp_path, monkeypatch):
    """A check that hung ends its job, and the rows of that job with it."""
    runner = selftest_runs.Runner(tmp_path, "cuda", "0")
    measured(monkeypatch, runner)
    monkeypatch.setattr(selftest_speed, "smallest_memory", lambda n: 140 << 30)
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 0)
    *_, (_, last) = selftest_speed.Speed(runner, 2, WHOLE).checks(THREE)
    row = last()
    assert (row["passed"], row["error"]) == (False, "BF16's step, which it is compared with, was lost")
    *_, (_, alone) = selftest_speed.Speed(runner, 2, WHOLE).checks(["blockwise"])
    assert alone()["passed"]


def test_graphs_take_turns_with_calls(tmp_path, monkeypatch):
    runner = selftest_runs.Runner(tmp_path, "cuda", "0")
    calls = measured(monkeypatch, runner)
    chosen = list(selftest_speed.Speed(runner, 2, ("GRAPHS",)).checks(["bf16", "blockwise"]))
    rows = [check() for _, check in chosen]
    assert len(rows) == 3
    for runs in calls:
        assert set(runs["on"]) - set(runs["off"]) == set(selftest_runs.GRAPHS)
    assert all(row["passed"] and row["speed_to_off"] == 1.0 for row in rows)
    slower = FASTER | {"ms": [12.0, 10.5, 11.0]}
    assert not selftest_speed.from_graphs(OFF, slower)["passed"]


def test_a_switch_that_fails_says_where_both_steps_went():
    row = {"name": "x", "passed": False, "step_ms": 10.0, "ms": [10.0, 11.0], "host_ms": 3.0, "speed_to_off": 0.9}
    busy = {"busy_ms": {"gemm": 5.0, "other": 1.0}, "idle_ms": 0.5, "exposed_ms": 0.25}
    text = selftest_nccl.line(row | busy | {"off": row}).splitlines()
    assert text[0].endswith("10.0 ms a step, host 3.0 ms, speed 0.900 of off, exposed 0.2 ms")
    assert text[1:] == [
        "         off: rounds 10.0 11.0 ms a step, host 3.0; profiled: nothing",
        "         on: rounds 10.0 11.0 ms a step, host 3.0; profiled: gemm 5.0, other 1.0, idle 0.5, exposed 0.2",
    ]
    assert len(selftest_nccl.line(row | busy | {"off": row, "passed": True}).splitlines()) == 1


def test_fp8_shrinks_the_trips_it_is_on():
    """Of a row's four trips one in FP8, scales beside it, leaves 7/8 and a little; two leave 3/4."""
    for switches, bytes_left in (((selftest_speed.DISPATCH,), 88.0), (tuple(selftest_speed.WIRES)[2], 76.6)):
        off, on = ({"ms": [10.0], "deal_mib": mib} for mib in (100.0, bytes_left))
        assert selftest_speed.on_the_wire(switches, off, on)["passed"]
        assert not selftest_speed.on_the_wire(switches, off, on | {"deal_mib": bytes_left + 2})["passed"]


@pytest.mark.parametrize("switch", [(), (selftest_speed.GATHER,)], ids=["bf16", "fp8"])
def test_bytes_are_those_of_a_step_alone(switch, tmp_path, monkeypatch):
    """Building FP8 weights gathers them once, which no step does."""
    flags = [flag for flag in selftest_runs.model_flags("cpu", tmp_path) if flag not in ("--data-path", "--split")]
    flags = [flag for flag in flags if flag not in (str(tmp_path / "data_text_document"), "100,0,0")]
    flags += ["--mock-data", *selftest_runs.MODELS["dense"], *selftest_runs.RECIPES["blockwise"]]
    flags += [*selftest_runs.ZERO1, *selftest_speed.OVERLAP, *switch]
    config = selftest_runs.parse_args(flags, env={"WORLD_SIZE": "2"})
    alone = trainer.build_watchdog(config, ParallelContext())
    monkeypatch.setattr(trainer, "build_watchdog", lambda *args: alone)
    with fake_parallel(config, meter=selftest_runs.Meter()) as parallel:
        runner = selftest_runs.Runner(tmp_path, "cpu", "0")
        monkeypatch.setattr(runner, "build", lambda flags: build_parts(config, parallel, torch.device("cpu")))
        steps = selftest_steps.Steps(runner, ())
        first = steps.traffic()
        steps.run(2)
        assert steps.traffic() == first
        layouts = steps._parts.optimizer.layouts
        assert first["gather", "dp"] == sum(layout.numel // 2 * layout.dtype.itemsize for layout in layouts)
        assert (parallel.meter.bytes["gather", "dp"] > 5 * first["gather", "dp"]) == bool(switch)
        assert steps.tokens == 4 * 16
        assert steps.profile(1) == {}
