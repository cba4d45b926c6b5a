"""Stages of a pipeline: the whole model, each layer once, or a line that says what doesn't fit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafp8.config.model import ModelConfig
from megafp8.config.parallel import ParallelConfig
from megafp8.config.pipeline import LAYOUT, pipeline_stages, stages_of_rank

FIRST, LAST = "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"
ENDS = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}


def counts(layers: int, size: int, *, mtp: int = 0, **flags) -> list[int]:
    stages = pipeline_stages(
        ModelConfig(num_layers=layers, mtp_num_layers=mtp), ParallelConfig(pipeline_model_parallel_size=size, **flags)
    )
    assert [n for stage in stages for n in stage.layers] == list(range(layers))
    assert [stage.embedding for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.loss for stage in stages] == [False] * (len(stages) - 1) + [True]
    return [len(stage.layers) for stage in stages]


@pytest.mark.parametrize(
    ("layers", "size", "flags", "expected"),
    [
        (8, 1, {}, [8]),
        (8, 4, {}, [2, 2, 2, 2]),
        (7, 2, {FIRST: 3}, [3, 4]),
        (7, 2, {LAST: 3}, [4, 3]),
        (9, 4, {FIRST: 1, LAST: 2}, [1, 3, 3, 2]),
        (2, 2, {FIRST: 0}, [0, 2]),
        (6, 4, ENDS, [1, 2, 2, 1]),
        (7, 4, {"account_for_loss_in_pipeline_split": True}, [2, 2, 2, 1]),
        (8, 2, {"num_layers_per_virtual_pipeline_stage": 2}, [2, 2, 2, 2]),
        (8, 2, {"num_virtual_stages_per_pipeline_rank": 4}, [1] * 8),
        (10, 2, {"num_virtual_stages_per_pipeline_rank": 2, FIRST: 4}, [2, 3, 2, 3]),
        (5, 2, {"pipeline_model_parallel_layout": "Ett|tttL"}, [2, 3]),
        (5, 2, {"pipeline_model_parallel_layout": "E|(tt|)*2tL"}, [0, 2, 2, 1]),
        (61, 16, {"pipeline_model_parallel_layout": "Et*3|(tt|)*29|mL", "mtp": 1}, [3] + [2] * 29 + [0, 0]),
        (7, 4, {"pipeline_model_parallel_layout": "Et, t | ((t)*2|)*2 tL"}, [2, 2, 2, 1]),
    ],
)
def test_layers_of_each_stage(layers, size, flags, expected):
    assert counts(layers, size, **flags) == expected


def test_chunks_of_a_rank():
    stages = pipeline_stages(
        ModelConfig(num_layers=8),
        ParallelConfig(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2),
    )
    assert [stage.layers for stage in stages_of_rank(stages, 2, 1)] == [(2, 3), (6, 7)]


@pytest.mark.parametrize(
    ("layers", "size", "flags", "words"),
    [
        (7, 2, {}, ["--num-layers 7", "--pipeline-model-parallel-size 2", LAYOUT]),
        (7, 3, {FIRST: 2}, ["--decoder-first-pipeline-num-layers 2", "5 layers"]),
        (4, 2, {FIRST: 3, LAST: 3}, ["--decoder-last-pipeline-num-layers 3", "-2 layers"]),
        (4, 2, {FIRST: 1, LAST: 2}, ["1 layers", "0 rank"]),
        (8, 4, ENDS, ["--account-for-embedding-in-pipeline-split", "10 layers"]),
        (8, 2, {"num_virtual_stages_per_pipeline_rank": 3}, ["--num-virtual-stages-per-pipeline-rank 3", "4 layers"]),
        (8, 2, {"num_layers_per_virtual_pipeline_stage": 3}, ["--num-layers-per-virtual-pipeline-stage 3", "4, 4"]),
        (
            6,
            2,
            {"num_layers_per_virtual_pipeline_stage": 2, FIRST: 2},
            ["2, 4 layers", "--num-virtual-stages-per-pipeline-rank"],
        ),
        (
            8,
            2,
            {"num_layers_per_virtual_pipeline_stage": 2, "num_virtual_stages_per_pipeline_rank": 2},
            ["leave one out"],
        ),
        (5, 2, {"pipeline_model_parallel_layout": "Ett|ttL"}, ["has 4 layers", "--num-layers is 5"]),
        (4, 2, {"pipeline_model_parallel_layout": "tt|ttL"}, ["give E first"]),
        (4, 2, {"pipeline_model_parallel_layout": "Ett|tt|L"}, ["3 stages", "--pipeline-model-parallel-size 2"]),
        (4, 2, {"pipeline_model_parallel_layout": "|Ett|tt|L"}, ["must start with E"]),
        (4, 2, {"pipeline_model_parallel_layout": "Ettt|t|t|L"}, ["has 5 layers"]),
        (4, 3, {"pipeline_model_parallel_layout": "Ettt||tL"}, ["pipeline rank 1 nothing"]),
        (4, 2, {"pipeline_model_parallel_layout": "Ettxtt|L"}, ["'x'"]),
        (4, 2, {"pipeline_model_parallel_layout": "E(tt|ttL"}, ["brackets"]),
        (4, 2, {"pipeline_model_parallel_layout": "Et*999999|L"}, ["100,000"]),
        (4, 2, {"pipeline_model_parallel_layout": "Ett|ttm|L", "mtp": 1}, ["every m"]),
    ],
)
def test_what_does_not_fit_names_flags_and_mend(layers, size, flags, words):
    with pytest.raises(ValueError) as error:
        counts(layers, size, **flags)
    for word in words:
        assert word in str(error.value), str(error.value)
    assert "\n" not in str(error.value)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 24), st.integers(1, 6), st.none() | st.integers(0, 9), st.none() | st.integers(0, 9),
    st.booleans(), st.booleans(), st.none() | st.integers(1, 4), st.none() | st.integers(1, 4),
)  # fmt: skip
def test_never_a_shortened_model(layers, size, first, last, embedding, loss, per_chunk, chunks):
    """Whatever the flags: every layer once, or an error."""
    flags = {
        FIRST: first,
        LAST: last,
        "account_for_embedding_in_pipeline_split": embedding,
        "account_for_loss_in_pipeline_split": loss,
        "num_layers_per_virtual_pipeline_stage": per_chunk,
        "num_virtual_stages_per_pipeline_rank": chunks,
    }
    try:
        found = counts(layers, size, **flags)
    except ValueError as error:
        assert "--" in str(error)  # noqa: PT017
    else:
        assert sum(found) == layers
        assert len(found) % size == 0


# flags -> what the message must say, in a job of two stages
CROSS_CHECKS = {
    "--num-layers 3": ["--num-layers 3", "--pipeline-model-parallel-size 2"],
    "--pipeline-model-parallel-layout Et|tL --account-for-loss-in-pipeline-split": ["contradicts", "drop one"],
    "--microbatch-group-size-per-virtual-pipeline-stage 1": ["less than --pipeline-model-parallel-size 2"],
    "--wgrad-queue-mib 3": ["needs --pipeline-schedule zero-bubble"],
}


@pytest.mark.parametrize("flags", CROSS_CHECKS)
def test_cross_checks(parse, flags):
    with pytest.raises(ValueError) as error:
        parse(f"--pipeline-model-parallel-size 2 {flags}", env={"WORLD_SIZE": "2"})
    for text in CROSS_CHECKS[flags]:
        assert text in str(error.value), str(error.value)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        ("--pipeline-schedule gpipe", "needs --pipeline-model-parallel-size 2 or more"),
        ("--num-virtual-stages-per-pipeline-rank 2", "needs --pipeline-model-parallel-size 2 or more"),
        ("--pipeline-model-parallel-layout Et|tL", "give --pipeline-model-parallel-size"),
        ("--pipeline-model-parallel-layout EtL", "has 1 layers"),
    ],
)
def test_one_stage(parse, flags, text):
    with pytest.raises(ValueError) as error:
        parse(flags)
    assert text in str(error.value), str(error.value)


def test_flags_of_scripts_without_effect_are_noted(parse):
    config = parse("--decoder-first-pipeline-num-layers 1 --cp-comm-type p2p")
    assert any(note.startswith("--decoder-first-pipeline-num-layers: no effect") for note in config.notes)
    assert any(note.startswith("--cp-comm-type: no effect") for note in config.notes)
