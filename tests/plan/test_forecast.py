"""Time of a step: measured layers, links by hand, the schedule; and what is wrong with a cluster's file."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from megafp8.core.pipeline.schedules import Costs, build_schedule, simulate
from megafp8.fp8 import gemm_speed
from megafp8.plan.cluster import read_cluster
from megafp8.plan.flops import training_flops_per_token
from megafp8.plan.forecast import forecast
from megafp8.plan.links import Links
from megafp8.plan.memory import plan_stages
from megafp8.plan.shapes import LayerShape
from megafp8.plan.speed import BF16_TFLOPS, SUSTAINED, gemm_seconds, memory_seconds
from megafp8.plan.stage_time import LayerTimes, StageClock
from megafp8.plan.traffic import Traffic

ROOT = Path(__file__).resolve().parents[2]
CLUSTERS = sorted((ROOT / "examples" / "clusters").iterdir())
LLAMA_8B = {
    "num_layers": 4, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32, "num_query_groups": 8,
    "micro_batch_size": 2, "seq_length": 4096, "bf16": True,
}  # fmt: skip


@pytest.fixture
def h200():
    return read_cluster(ROOT / "examples" / "clusters" / "h200.toml")


def measured_layers() -> dict[str, float]:
    """Flags -> milliseconds that docs/layer_memory.md says a layer of Llama-3-8B took on one H200."""
    text = (ROOT / "docs" / "layer_memory.md").read_text()
    rows = re.findall(r"^\| `(--bf16|--fp8-format \w+)` \|(.*)\|$", text, re.MULTILINE)
    return {flags: float(rest.split("|")[3]) for flags, rest in rows}


def test_a_layers_time_is_near_the_measured_one(make, h200):
    """Within 10%, no constant fitted to it: GEMMs by the table of their own measurements, the rest by bytes."""
    found = measured_layers()
    assert len(found) == 3
    for flags, milliseconds in found.items():
        fp8 = {} if flags == "--bf16" else {"fp8_format": flags.split()[1]}
        clock = StageClock(make("llama", **LLAMA_8B | fp8), h200)
        assert clock.layer(LayerShape("layers.1", False)).total * 1e3 == pytest.approx(milliseconds, rel=0.1), flags


def test_experts_are_as_much_faster_in_fp8_as_measured(make, h200):
    """docs/moe.md: eight of DeepSeek-V3's experts with 32768 rows, 14.76 ms in BF16 and 9.71 in FP8: within 15%."""
    sizes = {"hidden_size": 7168, "moe_ffn_hidden_size": 2048, "moe_router_topk": 8, "num_attention_heads": 32,
             "seq_length": 4096, "micro_batch_size": 1, "bf16": True, "num_query_groups": 32}  # fmt: skip
    for fp8, milliseconds in (({}, 14.76), ({"fp8_format": "e4m3"}, 9.71)):
        clock = StageClock(make("experts", **sizes | fp8), h200)
        parts = LayerTimes(h200, clock.kinds(LayerShape("layers.1", True)), 4096).parts()
        assert parts["experts"].total * 1e3 == pytest.approx(milliseconds, rel=0.15)


def test_the_loss_moves_ten_bytes_a_logit(make, h200):
    """BF16 logits: kernels read them twice and write the gradient, backward reads and writes it; in chunks all of
    forward runs again."""
    wide = {"hidden_size": 4096, "num_attention_heads": 32, "seq_length": 4096, "micro_batch_size": 1, "bf16": True}
    config = make("llama", **wide)
    clock, columns = StageClock(config, h200), config.model.padded_vocab_size
    gemms = sum(gemm_seconds(h200, role, None, 4096, columns, 4096) for role in ("fprop", "dgrad", "wgrad"))
    head = clock.head()
    assert head.total - gemms == pytest.approx(memory_seconds(h200, 10 * 4096 * columns), rel=1e-6)
    chunked = StageClock(make("llama", cross_entropy_chunks=4, **wide), h200).head()
    assert chunked.total == pytest.approx(head.total + head.forward)


def test_recomputation_costs_what_it_runs_again(make, h200):
    """The experts', with the router and the rows that come and go; norms; an activation only where it is kept."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "num_query_groups": 8, "seq_length": 1024, "bf16": True}
    layer = LayerShape("layers.1", True)

    def clock(**flags):
        return StageClock(make("experts", **sizes | flags), h200)

    def more(modules: str, **flags) -> float:
        selective = {"recompute_granularity": "selective", "recompute_modules": (modules,)}
        return clock(**flags | selective).layer(layer).total - clock(**flags).layer(layer).total

    for flags in ({}, {"fp8_format": "e4m3"}):
        parts = LayerTimes(h200, clock(**flags).kinds(layer), 1024).parts()
        assert more("moe", **flags) == pytest.approx(parts["experts"].forward + parts["rows"].forward)
        norm = 2 * 2 * 1024 * 1024 * (2 + (1 if flags else 2))  # of two, over two sequences
        assert more("layernorm", **flags) == pytest.approx(memory_seconds(h200, norm))
    inner = 2 * 2 * 1024 * 2 * 96  # rows of two choices, [gate; up] of 96
    assert more("moe_act") == pytest.approx(memory_seconds(h200, inner * 2 * 1.5))
    assert more("moe_act", fp8_format="e4m3") == 0


def test_projs_input_is_quantized_in_fp8_only(make, h200):
    """Of 2048 tokens and 1024 channels: BF16 read and a byte written, in forward and in backward."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 8, "num_query_groups": 8, "seq_length": 1024, "bf16": True,
             "fp8_small_linears": "fp8"}  # fmt: skip
    layer, parts = LayerShape("layers.1", False), []
    for keep in ((), ("layers.*.attention.proj",)):
        clock = StageClock(make("llama", fp8_format="e4m3", keep_modules_in_bf16=keep, **sizes), h200)
        parts.append(LayerTimes(h200, clock.kinds(layer), 1024).parts()["around"])
    in_fp8, in_bf16 = parts
    once = memory_seconds(h200, 2048 * 1024 * 3)
    assert in_fp8.forward - in_bf16.forward == pytest.approx(once)
    assert in_fp8.input - in_bf16.input == pytest.approx(once)


def test_gemms_take_the_measured_speed_and_few_tiles_less(h200, make):
    recipe = (
        StageClock(make("llama", bf16=True, fp8_format="e4m3"), h200).kinds(LayerShape("layers.0", False)).recipes[0][1]
    )
    flops = 2 * 8192 * 6144 * 4096
    rested = next(row[3] for row in next(iter(gemm_speed.table().values()))["1d2d"] if row[:3] == [8192, 6144, 4096])
    sustained = SUSTAINED * max(rested.values())
    assert flops / gemm_seconds(h200, "fprop", recipe, 8192, 6144, 4096) / 1e12 == pytest.approx(sustained)
    assert flops / gemm_seconds(h200, "fprop", None, 8192, 6144, 4096) / 1e12 == pytest.approx(BF16_TFLOPS)
    few = 2 * 128 * 4096 * 14336 / gemm_seconds(h200, "fprop", recipe, 128, 4096, 14336) / 1e12
    assert few < 0.3 * 1301, "32 tiles on 132 multiprocessors"


def test_links_by_hand(make, h200):
    """A ring in a node, one across nodes that uses their adapters together, an all-to-all, a message."""
    config = make("experts", world_size=64, global_batch_size=64, tensor_model_parallel_size=4, sequence_parallel=True,
                  expert_model_parallel_size=8, expert_tensor_parallel_size=1, num_query_groups=4)  # fmt: skip
    links, nvlink, network = Links.of(config, h200), 450e9 * 0.8, 50e9 * 0.8
    inside = Traffic("sum", "tp", "", 1 << 30, 1, 4)
    assert links.seconds(inside) == pytest.approx((1 << 30) * 2 * 3 / 4 / nvlink + 2 * 5e-6)
    across = Traffic("scatter_sum", "dp", "", 1 << 30, 1, 16)  # two ranks of each node of 8
    assert links.seconds(across) == pytest.approx((1 << 30) * 15 / 16 / (2 * network) + 4 * 10e-6)
    near = Traffic("deal", "ep", "", 1 << 30, 1, 8)
    assert links.seconds(near) == pytest.approx((1 << 30) * 7 / 8 / nvlink + 3 * 5e-6)
    far = dataclasses.replace(near, size=16)
    assert links.seconds(far) == pytest.approx((1 << 30) * 15 / 16 * 8 / 15 / network + 4 * 10e-6)


PIPELINE = {"num_layers": 8, "pipeline_model_parallel_size": 4, "world_size": 8, "global_batch_size": 64}


def test_the_step_is_the_schedules_length_and_its_ends(make, h200):
    config = make("llama", bf16=True, fp8_format="e4m3", use_distributed_optimizer=True, **PIPELINE)
    found = forecast(config, h200)
    costs = [Costs(s.chunks[0].forward, s.chunks[0].input, s.chunks[0].weight, s.message) for s in found.stages]
    assert not any(s.exposed for s in found.stages)
    assert found.schedule == pytest.approx(simulate(build_schedule("1f1b", 4, 1, 16), costs).length)
    assert sum(found.parts.values()) == pytest.approx(found.step)
    assert found.bubble > 0
    assert found.tokens_per_second == pytest.approx(64 * 32 / found.step)
    larger = {"hidden_size": 2048, "seq_length": 2048, "tensor_model_parallel_size": 2, "sequence_parallel": True}
    config = make("llama", bf16=True, **PIPELINE | larger)
    assert forecast(config, h200, quick=True).step == pytest.approx(forecast(config, h200).step, rel=0.05)


def test_overlap_hides_what_fits_behind_computation(make, h200):
    values = {"world_size": 8, "global_batch_size": 64, "use_distributed_optimizer": True, "bf16": True}
    large = {"hidden_size": 4096, "num_layers": 16, "seq_length": 1024}
    plain = forecast(make("llama", **values | large), h200).parts
    hidden = forecast(make("llama", overlap_grad_reduce=True, overlap_param_gather=True, **values | large), h200).parts
    assert 0 < hidden["gradient reduction"] < 0.2 * plain["gradient reduction"]
    assert 0 < hidden["weight gather"] < 0.2 * plain["weight gather"]
    assert hidden["compute"] == plain["compute"]


def test_shared_experts_hide_messages(make, h200):
    values = {"expert_model_parallel_size": 4, "world_size": 4, "global_batch_size": 16, "bf16": True,
              "seq_length": 1024, "hidden_size": 1024, "moe_shared_expert_intermediate_size": 256}  # fmt: skip
    name = "exposed: expert parallelism"
    plain, hidden = (
        forecast(make("experts", **values | {"moe_shared_expert_overlap": on}), h200).parts for on in (False, True)
    )
    assert 0 < hidden[name] < plain[name]
    assert hidden["compute"] == plain["compute"]


def test_utilization_counts_each_product_at_its_peak(make, h200):
    """CASES 75: model FLOPs, dense peaks; in BF16 it is the FLOPs over the time."""
    config = make("llama", bf16=True)
    found = forecast(config, h200)
    assert found.utilization == pytest.approx(training_flops_per_token(config) * found.per_gpu / 989e12)
    assert found.tflops == pytest.approx(training_flops_per_token(config) * found.per_gpu / 1e12)


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_shipped_clusters(path):
    cluster = read_cluster(path)
    assert cluster.gpus_per_node == 8
    assert 70 < cluster.usable_bytes / 2**30 < 140


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hbm_gb_per_s": None}, "hbm_gb_per_s is missing"),
        ({"hbm_gb_per_s": -1}, "hbm_gb_per_s = -1 must be a number above 0"),
        ({"hbm_gb_per_s": "fast"}, "must be a number"),
        ({"gpus_per_node": 7.5}, "must be a whole number"),
        ({"name": ["H100"]}, "name = ['H100'] must be text"),
        ({"wires": 3}, "unknown key wires"),
        ({"reserved_gib": 200}, "reserved_gib 200 is all of memory_gib"),
    ],
)
def test_mistakes_in_a_clusters_file(tmp_path, change, words):
    values = dataclasses.asdict(read_cluster(CLUSTERS[0])) | change
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        read_cluster(file)
    assert str(error.value).startswith(f"--cluster {file}: ")


@pytest.mark.parametrize("text", ["gpus_per_node = ", "[1]", None])
def test_a_file_that_is_none(tmp_path, text):
    file = tmp_path / "cluster.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match="--cluster"):
        read_cluster(file)


def test_a_forecast_needs_no_more_than_sizes(make, h200):
    """A model of any kind and layout has one: MoE with prediction in a pipeline of virtual stages, recomputed."""
    values = {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2, "world_size": 8, "num_layers": 4,
              "pipeline_model_parallel_layout": "Et|tt|t|mmL", "global_batch_size": 32, "bf16": True,
              "moe_layer_freq": "[0]+[1]*3", "recompute_granularity": "full"}  # fmt: skip
    config = make("deepseek", **values)
    found = forecast(config, h200)
    assert found.parts["exposed: expert parallelism"] > 0
    assert found.step > 0
    assert len(plan_stages(config)) == len(found.stages) == 2
