"""`--fake-process-group`: one rank of a job that isn't there takes its real step."""

import pytest
import torch

import pretrain_gpt
from megafp8.config import build_config
from megafp8.lone import lone_parallel
from megafp8.meter import Meter
from tests.plan.traffic_cases import BASE, EP, MOE, PP, SP

FLAGS = (
    "--fake-process-group --num-layers 4 --hidden-size 64 --num-attention-heads 4 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights --seq-length 64 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 5 --lr 1e-3 --bf16 --fp8-format e4m3 --num-experts 8 "
    "--moe-ffn-hidden-size 64 --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 "
    "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --use-distributed-optimizer --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 511 --device cpu"
)


def study(monkeypatch, rank: str, *more: str, world: str = "16") -> int:
    monkeypatch.setenv("WORLD_SIZE", world)
    monkeypatch.setenv("RANK", rank)
    return pretrain_gpt.main([*FLAGS.split(), *more])


@pytest.mark.parametrize(
    ("rank", "place"),
    [
        ("5", "rank 5 of 16: tensor 1 of 2, data 2 of 4, pipeline 0 of 2, expert 1 of 2; holds embedding, layers 0-1"),
        ("14", "rank 14 of 16: tensor 0 of 2, data 3 of 4, pipeline 1 of 2, expert 0 of 2; holds layers 2-3, loss"),
    ],
)
def test_a_rank_alone_reports_memory_time_and_traffic(monkeypatch, capsys, rank, place):
    assert study(monkeypatch, rank) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == place
    assert any(line.startswith("peak ") for line in lines)
    assert any(line.startswith("its own work ") for line in lines)
    assert "not finite" not in "".join(lines)
    traffic = [line.split() for line in lines if " over " in line]
    assert {line[2] for line in traffic} == {"ep", "dp", "edp", "tp", "world", "pp"}
    assert all(line[4] == line[5] and line[6] == line[7] for line in traffic), "planned is counted"


def test_the_last_stage_of_other_experts_shares_the_embedding(monkeypatch, capsys):
    """Its parameters are known by name, those of its experts too."""
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("RANK", "13")
    tied = [flag for flag in FLAGS.split() if flag != "--untie-embeddings-and-output-weights"]
    assert pretrain_gpt.main(tied) == 0
    traffic = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("send over pp")]
    assert [line[4] == line[5] and line[6] == line[7] for line in traffic] == [True]


@pytest.mark.parametrize(
    ("rank", "more", "words"),
    [
        ("16", (), "RANK='16' in the environment is no rank of a job of WORLD_SIZE=16; set RANK from 0 to 15"),
        ("x", (), "RANK='x' in the environment"),
        ("0", ("--load", "x"), "--load x with --fake-process-group: one rank alone starts from random weights"),
        ("0", ("--log-dir", "x"), "--log-dir x with --fake-process-group"),
    ],
)
def test_mistakes_are_one_line(monkeypatch, capsys, rank, more, words):
    assert study(monkeypatch, rank, *more) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_experts_get_as_many_tokens_as_others():
    flags = BASE | MOE | EP | {"moe_router_force_load_balancing": False, "fake_process_group": True}
    assert build_config(env={"WORLD_SIZE": "2"}, **flags).model.moe_router_force_load_balancing


@pytest.fixture
def alone():
    config = build_config(env={"WORLD_SIZE": "8"}, **BASE | SP | PP)
    with lone_parallel(config, 5, meter=Meter()) as parallel:
        yield parallel


def test_collectives_answer_as_if_all_ranks_were_alike(alone):
    """Rank 5 of 8: tensor 1, data 0, pipeline 1."""
    x = torch.tensor([[1.0], [2.0]])
    assert alone.tp.gather(x).flatten().tolist() == [1, 2, 1, 2]
    assert alone.tp.scatter_sum(x).tolist() == [[2.0]]
    assert alone.tp.sum_(x.clone()).equal(x)
    assert alone.everyone.max_(x.clone()).equal(x)
    amaxes, flags = torch.tensor([0.5, 0.0, 2.0, 0.0]), torch.tensor([3.0, 0.0], dtype=torch.float64)
    assert alone.everyone.max_(amaxes).tolist() == [0.5, 2, 2, 2], "others' tiles have weights of a like size"
    assert alone.everyone.max_(flags).tolist() == [3, 0]
    inside = torch.tensor([0.0, 0.0, 3.0, 4.0])
    alone.tp.post_gather_into(inside, inside[2:]).wait()
    assert inside.tolist() == [3, 4, 3, 4]
    assert alone.meter.messages == {
        ("gather", "tp"): 2,
        ("scatter_sum", "tp"): 1,
        ("sum", "tp"): 1,
        ("max", "world"): 3,
    }
    assert alone.meter.bytes["gather", "tp"] == 16


def test_dealt_rows_are_those_that_it_gives_itself(alone):
    x = torch.arange(5.0)[:, None]
    out, _ = alone.tp.post_deal(x, sent=[2, 3], received=[4, 3])
    assert out.flatten().tolist() == [2, 3, 4, 2, 2, 3, 4]
    out, _ = alone.tp.post_deal(x, sent=[2, 3], received=[3, 3])
    assert out.flatten().tolist() == [2, 3, 4, 2, 3, 4]
    out, _ = alone.tp.post_deal(x, sent=[5, 0], received=[1, 0])
    assert out.flatten().tolist() == [0]


def test_messages_of_other_stages_are_made_up_and_the_same_again(alone):
    first, second = (torch.full((64, 8), torch.nan) for _ in range(2))
    for x in (first, second):
        alone.pp.post_receive(x, 1, None, tag=3).wait()
    assert first.isfinite().all()
    assert first.equal(second)


def test_bytes_of_fp8_stay_bytes_of_fp8(alone):
    x = torch.randn(4, 8).to(torch.float8_e4m3fn)
    whole = alone.tp.gather(x)
    assert whole.dtype == x.dtype
    assert whole.view(torch.uint8).equal(x.view(torch.uint8).repeat(2, 1))
