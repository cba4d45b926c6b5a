"""`tools/plan.py search`, its layouts and its pages: what is found is the best there is, and fits."""

import dataclasses
import re
from pathlib import Path

import plan
import pytest

from megafp8.config.pipeline import pipeline_stages
from megafp8.plan.cluster import read_cluster
from megafp8.plan.forecast import forecast
from megafp8.plan.search import AXES, Search, balanced_layout, precisions, written_layout
from megafp8.plan.search_report import nothing_lines

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = ROOT / "examples" / "clusters" / "h100_80gb.toml"
GIVEN = {
    "num_layers": 12, "hidden_size": 2048, "num_attention_heads": 16, "seq_length": 2048, "lr": 1e-3, "train_iters": 5,
    "tokenizer_type": "NullTokenizer", "vocab_size": 32767, "mock_data": True, "hidden_dropout": 0.0, "bf16": True,
    "attention_dropout": 0.0, "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
    "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True, "global_batch_size": 64,
}  # fmt: skip


SMALL = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "32", "--lr", "1e-3"),
    *("--train-iters", "5", "--mock-data", "--tokenizer-type", "ByteTokenizer"),
]


def search_of(memory_gib: float, **given) -> Search:
    cluster = dataclasses.replace(read_cluster(CLUSTER), memory_gib=memory_gib, reserved_gib=1.0)
    return Search.of(GIVEN | given, cluster, 8, keep=3)


def test_what_is_found_is_the_best_of_all():
    """Against a forecast of every combination, each with the first recomputation that fits; the best of each sizes."""
    job = search_of(5.0, micro_batch_size=1)
    fp8 = precisions(job.given)["FP8"]
    found = job.run(fp8)
    every: dict[tuple, float] = {}
    for values in job.structures():
        for _, flags in job._recomputations():
            config = job._checked(values | fp8 | flags)
            if config is not None and job._memory(config) is not None:
                axes, step = tuple(values.get(name, 1) for name in AXES), forecast(config, job.cluster, quick=True).step
                every[axes] = min(step, every.get(axes, step))
                break
    assert len(every) > 3
    best = [forecast(f.config, job.cluster, quick=True).step for f in found]
    assert sorted(best) == pytest.approx(sorted(every.values())[:3])
    assert job.too_large > 0
    assert job.refused > 0
    assert all(f.peak <= job.cluster.usable_bytes for f in found)
    for f in found:  # 5440 / 2 features are no multiple of tiles of 128: no primary weights there
        assert f.config.fp8.fp8_param_gather == (f.config.parallel.tensor_model_parallel_size == 1)


def test_no_layout_beats_its_bound():
    """Neither where shared experts hide messages."""
    moe = {"num_experts": 8, "moe_ffn_hidden_size": 1024, "moe_router_topk": 2, "num_layers": 2, "seq_length": 8192,
           "moe_shared_expert_intermediate_size": 4096, "global_batch_size": 512, "micro_batch_size": 1,
           "pipeline_model_parallel_size": 1}  # fmt: skip
    for overlap in (False, True):
        job = search_of(80.0, moe_shared_expert_overlap=overlap, **moe)
        bounds = list(job._bounded({}))
        assert len(bounds) > 4
        for bound, values in bounds:
            assert bound <= forecast(job.config(values), job.cluster, quick=True).step, values


def test_flags_that_are_given_stay():
    job = search_of(80.0, tensor_model_parallel_size=2, micro_batch_size=2, recompute_granularity="full",
                    recompute_method="uniform", recompute_num_layers=1)  # fmt: skip
    for found in job.run({}):
        assert found.config.parallel.tensor_model_parallel_size == 2
        assert found.config.train.micro_batch_size == 2
        assert found.recompute == "as given"
        assert not found.config.fp8.enabled


def test_nothing_fits():
    job = search_of(1.1)
    assert job.run({}) == []
    assert job.too_large > 0
    assert sum(job.reasons.values()) == job.refused
    first, *refused = nothing_lines(job)
    needed = float(
        re.fullmatch(r"nothing fits; of those found too large the smallest needs ([\d.]+) GiB or more", first)[1]
    )
    assert needed > 0.1  # what a GPU has
    assert [int(line.split()[0]) for line in refused] == [n for _, n in job.reasons.most_common(3)]


@pytest.mark.parametrize(("layers", "stages", "depths", "head"), [(126, 16, 0, 1), (61, 32, 1, 3), (94, 8, 0, 2)])
def test_balanced_layouts_are_the_model(layers, stages, depths, head):
    text = balanced_layout(layers, stages, depths, head)
    model = Search.of(GIVEN | {"num_layers": layers, "mtp_num_layers": depths or None}, read_cluster(CLUSTER), 1)
    config = model.config({"micro_batch_size": 1, "num_layers": layers})
    parallel = dataclasses.replace(
        config.parallel, pipeline_model_parallel_size=stages, pipeline_model_parallel_layout=text
    )
    held = [len(stage.layers) for stage in pipeline_stages(config.model, parallel)]
    assert sum(held) == layers
    assert held[-1] < max(held)
    assert max(held[:-1]) - min(held[:-1]) <= 1
    assert written_layout(held, depths) == text


def run(capsys, *argv: str) -> str:
    assert plan.main(list(argv)) == 0
    return capsys.readouterr().out


COMMANDS = re.findall(r"^python tools/plan.py (?:.*\\\n)*.*$", (ROOT / "docs" / "planner.md").read_text(), re.MULTILINE)
FAST = [command for command in COMMANDS if "search" in command and "--tensor-model-parallel-size" in command]


def words_of(command: str) -> list[str]:
    import shlex

    return shlex.split(command.replace("\\\n", " "))[2:]


@pytest.mark.parametrize("command", FAST)
def test_the_pages_short_searches_give_the_pages_lines(capsys, monkeypatch, command):
    """Those whose sizes are given take seconds; their best layouts are lines of docs/planner.md."""
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "planner.md").read_text()
    out = run(capsys, *words_of(command))
    rows = [line for line in out.splitlines() if re.match(r" *\d+ +\d+\.\d+ +\d", line)]
    assert rows
    for line in out.splitlines():
        if line.startswith(("FP8's layout", "BF16 at its best")) or line in rows:
            assert line in page, line


def test_a_forecast_of_a_shipped_model(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.png"
    flags = (
        "--gpus 1120 --global-batch-size 140 --tensor-model-parallel-size 8 --sequence-parallel --micro-batch-size 1 "
    )
    flags += "--pipeline-model-parallel-size 14 --fp8-format e4m3 --fp8-param-gather --use-distributed-optimizer"
    model = str(ROOT / "examples/models/llama3_405b.json")
    out = run(
        capsys, "forecast", "--cluster", str(CLUSTER), "--config", model, *flags.split(), "--output", str(picture)
    )
    assert "1,120 GPUs" in out
    assert re.search(r"MFU \d+\.\d%", out)
    assert "attention.qkv input" in out
    assert len([line for line in out.splitlines() if re.match(r" +\d+ +\d+\.\d\d ", line)]) == 14
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["search", "--gpus", "0", "--cluster", str(CLUSTER)], "--gpus 0: give 1 or more"),
        (["search", "--gpus", "8", "--cluster", str(CLUSTER)], "--num-layers"),
        (["forecast", "--gpus", "0", "--cluster", str(CLUSTER)], "--gpus 0: give 1 or more"),
        (["forecast", "--gpus", "8", "--cluster", "nowhere.toml"], "--cluster nowhere.toml"),
        (["search", "--gpus", "8", "--cluster", str(CLUSTER), "--num-layerz", "3"], "--num-layers"),
        (["search", "--gpus", "8", "--cluster", str(CLUSTER), *SMALL], "give --global-batch-size"),
    ],
)
def test_mistakes(capsys, argv, words):
    assert plan.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("plan.py: error: ")
    assert words in err
    assert err.count("\n") == 1
