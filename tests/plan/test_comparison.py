"""`tools/plan.py memory`: bytes a parameter in other precisions, from the formulas that --dry-run uses."""

import pytest

from megafp8.plan.comparison import comparison_lines, variants
from megafp8.plan.measured import MeasuredMemory, owner_lines, rows
from megafp8.plan.measured import table as measured_table
from megafp8.plan.memory import plan_memory


def table(lines):
    return {line[:36].strip(): [float(word) for word in line[36:].split()] for line in lines[1:]}


def test_bytes_a_parameter(make):
    config = make("llama", bf16=True, num_layers=2, hidden_size=256, ffn_hidden_size=512)
    found = table(comparison_lines(config))
    weights, copies, grads, optimizer, total, ratio = found["bf16, BF16 weights"]
    assert (weights, copies, ratio) == (2, 0, 1)
    assert grads == pytest.approx(4, rel=1e-3)
    assert optimizer == pytest.approx(12, rel=1e-3)
    assert total == pytest.approx(18, rel=1e-3)
    assert found["blockwise, FP8 primary"][4] <= 18 * 1.005
    assert found["mxfp8 1x32, FP8 primary"][4] > 18, "1D tiles differ by direction: both are stored"
    assert found["bf16, remainders, fp8 moments"][3] == pytest.approx(2 + 2 * (1 + 5 / 64), rel=0.01)


def test_variants_do_not_depend_on_the_configurations_own_precision(make):
    plain = make("llama", bf16=True)
    other = make("llama", bf16=True, fp8_format="e4m3", fp8_weight_tile="1d", use_precision_aware_optimizer=True,
                 exp_avg_dtype="bf16")  # fmt: skip
    for name, config in variants(plain).items():
        assert plan_memory(config).static == plan_memory(variants(other)[name]).static, name


def test_each_variant_leaves_out_what_its_own_recipe_would_slow_down(make):
    sizes = {"hidden_size": 1024, "ffn_hidden_size": 3584, "num_attention_heads": 8, "num_query_groups": 2}
    found = variants(make("llama", bf16=True, fp8_format="e4m3", seq_length=1024, **sizes))
    attention = ("attention.qkv", "attention.proj")
    small = {name.split()[0]: config.fp8.small_linears_in_bf16 for name, config in found.items()}
    assert small["blockwise,"] == attention
    assert small["tensorwise,"] == attention
    assert small["mxfp8"] == small["bf16,"] == ()


def test_the_forecast_stands_beside_what_was_measured():
    lines = measured_table({"activations": (3 << 20, 2 << 20)})
    assert lines[1].split() == ["activations", "3.0", "2.0", "50.0%"]


def test_a_plan_is_compared_as_a_whole_and_above_what_stays(make):
    plan = plan_memory(make("llama", bf16=True))
    found = rows(plan, MeasuredMemory(static=plan.static, held=plan.held, peak=plan.static + 1000))
    assert all(planned == measured for planned, measured in list(found.values())[:2])
    assert found["peak"] == (plan.total, plan.static + 1000)
    assert found["peak above what stays"] == (plan.total - plan.static, 1000)


def test_what_a_planned_peak_is_made_of(make):
    plan = plan_memory(make("llama", bf16=True, hidden_size=1024, seq_length=1024))
    title, *lines = owner_lines(plan)
    place = next(n for n, line in enumerate(lines) if line.startswith("planned of one microbatch"))
    sizes = [float(line.split()[0].replace(",", "")) for line in lines[:place]]
    assert plan.extra.what in title
    assert sum(sizes) == pytest.approx(plan.total / 2**20, abs=0.05 * len(sizes))
    assert sum(float(line.split()[0].replace(",", "")) for line in lines[place + 1 :]) == pytest.approx(
        plan.held / 2**20, abs=0.05 * len(lines)
    )
