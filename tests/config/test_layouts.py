"""Checks of layouts: what ranks share evenly, and what needs what."""

import pytest

from megafp8.config import validate

FP8 = "--bf16 --fp8-format e4m3"
MLA = "--multi-latent-attention --position-embedding-type rope"
MOE = "--num-experts 8 --disable-bias-linear"
EP4 = "--expert-model-parallel-size 4"
GRAPHS = "--cuda-graph-impl local --hidden-dropout 0 --attention-dropout 0"
UNEVEN = {
    f"--context-parallel-size 4 {GRAPHS}": ["--context-parallel-size 4 with --cuda-graph-impl local", "use 1"],
    f"--pipeline-model-parallel-size 2 {GRAPHS}": ["--pipeline-model-parallel-size 2 with --cuda-graph", "use 1"],
    "--context-parallel-size 4 --seq-length 36": ["--seq-length 36", "2 x --context-parallel-size 4"],
    f"--context-parallel-size 4 {MOE} --moe-router-load-balancing-type sinkhorn": [
        "sinkhorn",
        "--context-parallel-size 4",
    ],
    f"--context-parallel-size 4 {MOE} --moe-expert-capacity-factor 1": [
        "--moe-expert-capacity-factor 1.0",
        "--context-parallel-size 4",
    ],
    "--context-parallel-size 4 --cp-comm-type p2p all_gather": ["--cp-comm-type p2p all_gather"],
    "--context-parallel-size 4 --cp-comm-type p2p": ["--attention-dropout 0.1", "--cp-comm-type p2p"],
    "--pipeline-model-parallel-size 4": ["--num-layers 2", "--pipeline-model-parallel-size 4"],
    "--tensor-model-parallel-size 4 --num-attention-heads 6 --kv-channels 8": ["--num-attention-heads 6"],
    "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2": ["--num-query-groups 2"],
    "--tensor-model-parallel-size 4 --ffn-hidden-size 90": ["--ffn-hidden-size 90"],
    f"--tensor-model-parallel-size 4 {MOE} --moe-ffn-hidden-size 90": ["--moe-ffn-hidden-size 90"],
    f"--tensor-model-parallel-size 4 {MOE} --moe-shared-expert-intermediate-size 90": [
        "--moe-shared-expert-intermediate-size 90"
    ],
    f"--tensor-model-parallel-size 4 {MOE} --expert-tensor-parallel-size 1": ["--expert-tensor-parallel-size 1"],
    f"{EP4} {MOE} --num-experts 6": ["--num-experts 6", EP4],
    EP4: [EP4, "needs --num-experts"],
    f"{EP4} {MOE} --moe-token-dispatcher-type flex": ["--moe-token-dispatcher-type flex", "add --bf16"],
    f"{EP4} {MOE} --bf16 --moe-token-dispatcher-type flex --moe-shared-expert-overlap": ["--moe-shared-expert-overlap"],
    f"{EP4} {MOE} {FP8} --moe-token-dispatcher-type flex --moe-fp8-dispatch --fp8-recipe mxfp8": ["128"],
    f"--expert-model-parallel-size 2 {MOE} --expert-tensor-parallel-size 2 --moe-token-dispatcher-type flex": [
        *("--expert-tensor-parallel-size 2", "alltoall"),
    ],
    f"{MOE} {FP8} --moe-fp8-dispatch": ["--moe-fp8-dispatch", "--expert-model-parallel-size 1"],
    f"{EP4} {MOE} --moe-fp8-dispatch": ["--moe-fp8-dispatch", "add --fp8-format e4m3"],
    f"{EP4} {MOE} --moe-fp8-combine-grad": ["--moe-fp8-combine-grad", "--moe-fp8-dispatch"],
    f"{EP4} {MOE} {FP8} --moe-fp8-dispatch --fp8-recipe tensorwise": ["--fp8-recipe tensorwise", "blockwise or mxfp8"],
    f"{EP4} {MOE} {FP8} --moe-fp8-dispatch --no-fp8-power-of-two-scales": ["--no-fp8-power-of-two-scales", "a second"],
    f"{EP4} {MOE} {FP8} --moe-fp8-dispatch --fp8-input-tile 2d --fp8-weight-tile 1d": ["--fp8-input-tile 2d", "use 1d"],
    f"{EP4} {MOE} {FP8} --moe-fp8-dispatch --moe-fp8-combine-grad --moe-token-dispatcher-type allgather": [
        "use alltoall"
    ],
    f"{EP4} {MOE} {FP8} --moe-fp8-dispatch --moe-fp8-combine-grad --fp8-grad-tile 2d --fp8-weight-tile 1d": [
        *("--fp8-grad-tile 2d", "use 1d"),
    ],
    "--tensor-model-parallel-size 4 --seq-length 30 --sequence-parallel": ["--seq-length 30", "--sequence-parallel"],
}


@pytest.mark.parametrize("flags", UNEVEN)
def test_ranks_share_evenly(parse, flags):
    with pytest.raises(ValueError) as error:
        parse(flags, env={"WORLD_SIZE": "4"})
    for text in UNEVEN[flags]:
        assert text in str(error.value), str(error.value)


def test_several_processes_are_data_parallel_ranks(parse):
    config = parse("--tensor-model-parallel-size 2 --sequence-parallel", env={"WORLD_SIZE": "8"})
    assert config.parallel.data_parallel_size == 4
    assert config.train.global_batch_size == 4 * config.train.micro_batch_size


def test_layout_messages_name_sizes(parse):
    config = parse().replace(world_size=6, tensor_model_parallel_size=4)
    with pytest.raises(
        ValueError, match="world size 6 = tp 4 x .*--tensor-model-parallel-size 4 .* = 4; start a multiple"
    ):
        validate.check(config)


def test_param_gather_needs_the_sharded_optimizer(parse):
    """CASES 74."""
    config = parse("--bf16 --fp8-format e4m3").replace(fp8_param_gather=True)
    with pytest.raises(ValueError, match="--fp8-param-gather needs --use-distributed-optimizer; add it"):
        validate.check(config)


def test_overlapped_gather_needs_its_partners(parse):
    with pytest.raises(ValueError, match="--overlap-param-gather needs --use-distributed-optimizer"):
        parse("--overlap-param-gather --overlap-grad-reduce")
    with pytest.raises(ValueError, match="--overlap-param-gather needs --overlap-grad-reduce"):
        parse("--overlap-param-gather --use-distributed-optimizer")
