"""Every cross-check: the message names the flag, the value and the mend (CASES 74)."""

import pytest

from megafp8.config import validate
from tests.config.test_layouts import UNEVEN

ALL_CHECKS = validate.CHECKS
FP8 = "--bf16 --fp8-format e4m3"
MLA = "--multi-latent-attention --position-embedding-type rope"
MOE = "--num-experts 8 --disable-bias-linear"
GRAPHS = "--cuda-graph-impl local --hidden-dropout 0 --attention-dropout 0"

# flags beside the small command line -> what the message must say. `-flag` takes a flag of that line away.
CASES = {
    # logs
    "--wandb-project p --log-dir d": ["--wandb-project p", "add --wandb-exp-name"],
    "--wandb-project p --wandb-exp-name e": ["--wandb-project p", "add --log-dir"],
    "--memory-snapshot-path memory/": ["--memory-snapshot-path memory/", "give a file"],
    "--profile --profile-step-start 5 --profile-step-end 5": ["--profile-step-end 5", "--profile-step-start 5"],
    # batches
    "--rampup-batch-size 3 2 9 --global-batch-size 8": ["--rampup-batch-size 3 2 9", "--global-batch-size 8"],
    "--step-batch-size-schedule 0:3 99:8": ["--step-batch-size-schedule", "3 is not divisible by", "multiple of 2"],
    # optimizer state
    "--main-params-dtype fp16": ["--main-params-dtype fp16", "use --store-param-remainders"],
    "--main-grads-dtype bf16": ["--main-grads-dtype bf16", "use --grad-reduce-in-bf16"],
    "--exp-avg-dtype fp16": ["--exp-avg-dtype fp16", "use bf16"],
    "--exp-avg-sq-dtype fp8": ["--exp-avg-sq-dtype fp8", "needs --use-precision-aware-optimizer"],
    "--store-param-remainders --bf16": ["--store-param-remainders", "needs --use-precision-aware-optimizer"],
    "--use-precision-aware-optimizer --store-param-remainders": ["--store-param-remainders", "needs --bf16"],
    f"{FP8} --use-precision-aware-optimizer --store-param-remainders --use-distributed-optimizer --fp8-param-gather": [
        *("--store-param-remainders", "contradicts --fp8-param-gather"),
    ],
    "--keep-optimizer-state-in-fp32 a.*": ["--keep-optimizer-state-in-fp32 a.*", "all state is FP32"],
    "--lr-multipliers a=b": ["--lr-multipliers a=b", "PATTERN=FACTOR"],
    "--weight-decay-multipliers a=-1": ["--weight-decay-multipliers a=-1", "PATTERN=FACTOR"],
    # model
    "--num-attention-heads 3": ["--hidden-size 64", "--num-attention-heads 3", "--kv-channels"],
    "--group-query-attention --num-query-groups 3": ["--num-attention-heads 4", "--num-query-groups 3"],
    "--num-query-groups 2": ["--num-query-groups 2", "needs --group-query-attention"],
    "--max-position-embeddings 16": ["--seq-length 32", "--max-position-embeddings 16", "raise"],
    "--use-rotary-position-embeddings --position-embedding-type learned_absolute": [
        "--use-rotary-position-embeddings",
        "--position-embedding-type learned_absolute",
    ],
    "--use-rope-scaling": ["--use-rope-scaling", "needs --position-embedding-type rope"],
    "--rotary-interleaved": ["--rotary-interleaved", "needs --position-embedding-type rope"],
    "--position-embedding-type rope --kv-channels 7": ["--kv-channels 7", "even"],
    "--position-embedding-type rope --rotary-percent 0.1": ["--rotary-percent 0.1", "at least 2"],
    "--swiglu --squared-relu": ["--swiglu", "--squared-relu", "leave one out"],
    # latent attention, positions, windows
    "--multi-latent-attention": ["--multi-latent-attention", "needs --position-embedding-type rope"],
    f"{MLA} --group-query-attention": ["--multi-latent-attention", "--group-query-attention", "drop one"],
    f"{MLA} --disable-bias-linear --add-qkv-bias": ["--add-qkv-bias", "leave it out"],
    f"{MLA} --qk-pos-emb-head-dim 7": ["--qk-pos-emb-head-dim 7", "even"],
    f"{MLA} --rotary-scaling-factor 4 --use-rope-scaling": ["--use-rope-scaling", "--rotary-scaling-factor"],
    f"{MLA} --rotary-seq-len-interpolation-factor 2 --use-rope-scaling": [
        *("--rotary-seq-len-interpolation-factor", "--use-rope-scaling", "leave one out"),
    ],
    f"{MLA} --beta-fast 1": ["--beta-fast 1.0", "--beta-slow 1.0"],
    "--window-size 8": ["--window-size 8", "4095,0"],
    "--window-size (8,8)": ["--window-size (8,8)", "causal"],
    # experts
    "--num-experts 8": ["--num-experts 8", "add --disable-bias-linear"],
    "--moe-router-no-norm-topk-prob": ["--moe-router-no-norm-topk-prob", "needs --num-experts"],
    f"{MOE} --moe-layer-freq [0,1,1]": ["--moe-layer-freq [0,1,1]", "--num-layers 2"],
    f"{MOE} --moe-layer-freq [0]+[2]": ["--moe-layer-freq [0]+[2]", "zeros and ones"],
    f"{MOE} --moe-layer-freq 0": ["--moe-layer-freq 0", "1 or more"],
    f"{MOE} --moe-layer-freq print(1)": ["--moe-layer-freq print(1)", "[0]*3+[1]*58"],
    f"{MOE} --moe-layer-freq [1]*9999999999999999": ["--moe-layer-freq [1]*9", "[0]*3+[1]*58"],
    f"{MOE} --moe-shared-expert-gate": ["--moe-shared-expert-gate", "--moe-shared-expert-intermediate-size"],
    f"{MOE} --moe-router-topk 9": ["--moe-router-topk 9", "--num-experts 8"],
    f"{MOE} --moe-router-topk 1": ["--moe-router-topk 1", "add --moe-router-pre-softmax"],
    f"{MOE} --moe-router-enable-expert-bias": ["--moe-router-enable-expert-bias", "sigmoid"],
    f"{MOE} --moe-router-no-norm-topk-prob": ["--moe-router-no-norm-topk-prob", "sigmoid"],
    f"{MOE} --moe-router-num-groups 4": ["--moe-router-num-groups", "--moe-router-group-topk"],
    f"{MOE} --moe-router-num-groups 3 --moe-router-group-topk 1": ["--num-experts 8", "--moe-router-num-groups 3"],
    f"{MOE} --moe-router-num-groups 8 --moe-router-group-topk 1": ["--moe-router-group-topk 1", "--moe-router-topk 2"],
    f"{MOE} --moe-router-num-groups 4 --moe-router-group-topk 1 --moe-router-group-scores 3": [
        "--moe-router-group-scores 3",
        "2 experts",
    ],
    f"{MOE} --moe-router-group-scores 2": ["--moe-router-group-scores 2", "--moe-router-num-groups"],
    f"{MOE} --moe-router-load-balancing-type sinkhorn aux_loss": ["sinkhorn aux_loss", "stand alone"],
    f"{MOE} --moe-router-load-balancing-type aux_loss aux_loss": ["aux_loss aux_loss", "twice"],
    f"{MOE} --moe-router-load-balancing-type sinkhorn --moe-aux-loss-coeff 0.1": ["sinkhorn", "--moe-aux-loss-coeff"],
    f"{MOE} --moe-router-load-balancing-type sinkhorn --moe-expert-capacity-factor 1": [
        "sinkhorn",
        "--moe-expert-capacity-factor",
    ],
    f"{MOE} --moe-pad-expert-input-to-capacity": [
        "--moe-pad-expert-input-to-capacity",
        "needs --moe-expert-capacity-factor",
    ],
    f"{MOE} --moe-expert-capacity-factor 0": ["--moe-expert-capacity-factor 0", "more than 0"],
    f"{MOE} --moe-router-load-balancing-type even": ["--moe-router-load-balancing-type even", "use aux_loss"],
    f"{MOE} --moe-aux-loss-coeff 0.1 0.2": ["--moe-aux-loss-coeff 0.1 0.2", "one coefficient"],
    # FP8
    "--fp8-recipe blockwise": ["--fp8-recipe blockwise", "needs --fp8-format"],
    "--fp8-margin 1": ["--fp8-margin 1", "needs --fp8-format"],
    "--fp8-weight-tile 1d": ["--fp8-weight-tile 1d", "needs --fp8-format"],
    "--fp8-gemm-backend reference": ["--fp8-gemm-backend reference", "needs --fp8-format"],
    "--no-fp8-power-of-two-scales": ["--fp8-power-of-two-scales", "needs --fp8-format"],
    "--first-last-layers-bf16": ["--first-last-layers-bf16", "needs --fp8-format"],
    "--keep-modules-in-bf16 a b": ["--keep-modules-in-bf16 a b", "needs --fp8-format"],
    "--fp8-format e4m3": ["--fp8-format e4m3", "needs --bf16"],
    f"{FP8} --fp8-recipe rowwise": ["--fp8-recipe rowwise", "tensorwise, blockwise, mxfp8, delayed"],
    f"{FP8} --fp8-recipe custom": ["--fp8-recipe custom", "use one of"],
    "--bf16 --fp8-format hybrid --fp8-recipe mxfp8": ["--fp8-recipe mxfp8", "--fp8-format hybrid", "use"],
    f"{FP8} --fp8-amax-history-len 16": ["--fp8-amax-history-len 16", "--fp8-recipe delayed", "not blockwise"],
    f"{FP8} --fp8-amax-compute-algo max": ["--fp8-amax-compute-algo max", "--fp8-recipe delayed"],
    f"{FP8} --fp8-margin 0": ["--fp8-margin 0", "--fp8-recipe delayed"],
    f"{FP8} --fp8-recipe tensorwise --fp8-weight-tile 1d": ["--fp8-weight-tile 1d", "tensorwise", "blockwise"],
    f"{FP8} --fp8-recipe mxfp8 --no-fp8-power-of-two-scales": ["fp8-power-of-two-scales", "mxfp8", "leave it out"],
    f"{FP8} --fp8-recipe mxfp8 --fp8-amax-epsilon 1e-3": ["--fp8-amax-epsilon 0.001", "mxfp8", "leave it out"],
    f"{FP8} --fp8-input-tile 2d": ["--fp8-input-tile 2d", "--fp8-weight-tile 2d", "1d"],
    f"{FP8} --fp8-weight-tile 1d --fp8-input-tile 2d --fp8-grad-tile 2d": ["--fp8-input-tile 2d", "--fp8-grad-tile 2d"],
    f"{FP8} --fp8-recipe mxfp8 --fp8-grad-format e5m2": ["--fp8-grad-format e5m2", "mxfp8", "e4m3 only"],
    f"{FP8} --fp8-input-format e5m2 --fp8-weight-format e5m2": [
        *("--fp8-input-format e5m2", "--fp8-weight-format e5m2", "e4m3"),
    ],
    "--bf16 --fp8-format hybrid --fp8-input-format e5m2": ["--fp8-input-format e5m2", "--fp8-grad-format e5m2"],
    f"{FP8} --num-layers-at-start-in-bf16 1": ["--num-layers-at-start-in-bf16 1", "needs --first-last-layers-bf16"],
    f"{FP8} --first-last-layers-bf16 --num-layers-at-end-in-bf16 2": [
        *("--num-layers-at-start-in-bf16 1", "--num-layers-at-end-in-bf16 2", "--num-layers 2"),
    ],
    f"{FP8} --keep-modules-in-bf16 ''": ["--keep-modules-in-bf16", "empty"],
    "--fp8-module-recipes *=bf16": ["--fp8-module-recipes *=bf16", "needs --fp8-format"],
    "--fp8-small-linears fp8": ["--fp8-small-linears fp8", "needs --fp8-format"],
    "--fp8-small-linears bf16": ["--fp8-small-linears bf16", "needs --fp8-format"],
    f"{FP8} --fp8-small-linears fp32": ["--fp8-small-linears", "'fp32'", "'bf16', 'fp8'"],
    f"{FP8} --fp8-module-recipes layers.*": ["--fp8-module-recipes 'layers.*'", "PATTERN=RECIPE"],
    f"{FP8} --fp8-module-recipes *=int8": ["--fp8-module-recipes '*=int8'", "'int8'", "tensorwise, blockwise"],
    f"{FP8} --fp8-module-recipes *=blockwise:e5m2": ["--fp8-module-recipes", "'e5m2'", "e4m3 or hybrid"],
    f"{FP8} --fp8-module-recipes *=mxfp8:hybrid": ["--fp8-module-recipes '*=mxfp8:hybrid'", "e4m3 only"],
    f"{FP8} --fp8-module-recipes @nowhere.txt": ["--fp8-module-recipes @nowhere.txt", "can't be read"],
    f"{FP8} --device cpu --fp8-gemm-backend cublaslt": ["--fp8-gemm-backend cublaslt", "--device cpu", "use"],
    f"{FP8} --device cpu --fp8-gemm-backend triton": ["--fp8-gemm-backend triton", "--device cpu", "use"],
    "--bf16 --fp8-fast-accumulation": ["--fp8-fast-accumulation", "needs --fp8-format"],
    f"{FP8} --fp8-fast-accumulation": ["--fp8-fast-accumulation", "--fp8-recipe blockwise", "tensorwise or delayed"],
    f"{FP8} --fp8-recipe delayed --fp8-fast-accumulation --device cpu": ["--fp8-fast-accumulation", "--device cpu"],
    f"{FP8} --fp8-recipe tensorwise --fp8-fast-accumulation --fp8-gemm-backend reference": [
        *("--fp8-fast-accumulation", "--fp8-gemm-backend reference", "leave one out"),
    ],
    # batches, length, recomputation
    "--global-batch-size 5": ["--global-batch-size 5", "--micro-batch-size 2", "multiple of 2"],
    "--train-samples 10": ["--train-iters 5", "--train-samples 10", "leave one out"],
    "-train-iters": ["--train-iters or --train-samples is required"],
    "-train-iters --train-samples 3 --global-batch-size 4": ["--train-samples 3", "--global-batch-size 4"],
    "--recompute-method block": ["--recompute-method block", "needs --recompute-granularity full"],
    "--recompute-num-layers 1": ["--recompute-num-layers 1", "needs --recompute-granularity full"],
    "--recompute-modules mlp": ["--recompute-modules mlp", "needs --recompute-granularity selective"],
    "--recompute-granularity selective --recompute-method uniform": ["--recompute-method uniform", "full"],
    "--recompute-granularity selective --recompute-modules moe": ["--recompute-modules moe", "needs --num-experts"],
    "--recompute-granularity selective --recompute-modules moe_act": ["--recompute-modules moe_act", "--num-experts"],
    "--recompute-granularity selective --recompute-modules mla_up_proj": ["mla_up_proj", "--multi-latent-attention"],
    "--recompute-granularity selective --recompute-modules all": ["--recompute-modules all", "no such", "mlp"],
    "--recompute-granularity full --recompute-num-layers 3": ["--recompute-num-layers 3", "--num-layers 2"],
    "--skip-train": ["--skip-train", "--load"],
    # optimizer and schedule
    "--optimizer sgd": ["--optimizer sgd", "use --optimizer adam"],
    "--min-lr 1": ["--min-lr 1.0", "--lr 0.001", "lower it"],
    "--lr-warmup-init 1": ["--lr-warmup-init 1.0", "--lr 0.001"],
    "--decoupled-lr 0.1 --decoupled-min-lr 0.2": ["--decoupled-min-lr 0.2", "--decoupled-lr 0.1"],
    "--decoupled-min-lr 0.2": ["--decoupled-min-lr 0.2", "needs --decoupled-lr"],
    "--override-opt_param-scheduler --use-checkpoint-opt_param-scheduler": [
        *("--override-opt_param-scheduler", "--use-checkpoint-opt_param-scheduler", "leave one out"),
    ],
    "--start-weight-decay 0.1": ["--start-weight-decay 0.1", "--end-weight-decay 0.01", "--weight-decay-incr-style"],
    "--lr-decay-samples 8": ["--lr-decay-samples 8", "--train-iters", "--lr-decay-iters"],
    "--lr-warmup-samples 8": ["--lr-warmup-samples 8", "--lr-warmup-iters"],
    "-train-iters --train-samples 8 --lr-decay-iters 8": ["--lr-decay-iters 8", "--train-samples"],
    "-train-iters --train-samples 8 --lr-warmup-iters 1": ["--lr-warmup-iters 1", "--lr-warmup-samples"],
    "--lr-warmup-fraction 0.1 --lr-warmup-iters 1": ["--lr-warmup-fraction 0.1", "--lr-warmup-iters 1"],
    "--lr-warmup-iters 5": ["--lr-warmup-iters 5", "--lr-decay-iters 5", "lower it"],
    "--lr-decay-iters 3 --lr-warmup-iters 4": ["--lr-warmup-iters 4", "--lr-decay-iters 3"],
    "--lr-decay-style WSD": ["--lr-decay-style WSD", "--lr-wsd-decay-iters"],
    "--lr-decay-style WSD --lr-wsd-decay-iters 6": ["--lr-wsd-decay-iters 6", "--lr-decay-iters 5"],
    # data
    "-mock-data": ["--data-path is required"],
    "--data-path x": ["--data-path x", "--mock-data", "leave one out"],
    "-mock-data --data-path x --valid-data-path y": ["--valid-data-path", "--data-path x"],
    "-mock-data --train-data-path x --split 1,1,1": ["--split 1,1,1", "--train-data-path"],
    "-mock-data --valid-data-path y": ["--data-path is required"],
    "-mock-data --data-path 1 x y": ["--data-path 1 x y", "pairs"],
    "-mock-data --data-path 1 x y z": ["--data-path 1 x y z", "pairs"],
    "-mock-data --data-path -1 x 2 y": ["--data-path -1 x 2 y", "0 or more"],
    "-mock-data --data-path 0 x 0 y": ["--data-path 0 x 0 y", "one above 0"],
    "-mock-data --data-path x --split 0,50,50": ["--split 0,50,50", "nothing to train on"],
    "-mock-data --data-path x --split 1,2,3,4": ["--split 1,2,3,4", "969,30,1"],
    "-mock-data --data-path x --split 90,-1,1": ["--split 90,-1,1", "969,30,1"],
    "-mock-data --data-path x --split most": ["--split most", "969,30,1"],
    "-mock-data --data-path x --multiple-validation-sets": ["--multiple-validation-sets", "--valid-data-path"],
    "-mock-data --train-data-path x --valid-data-path 1 y --multiple-validation-sets": ["weights", "1 y"],
    "-mock-data --train-data-path x --valid-data-path y --validation-set-names a": [
        *("--validation-set-names a", "needs --multiple-validation-sets"),
    ],
    "-mock-data --train-data-path x --valid-data-path y z --multiple-validation-sets --validation-set-names a": [
        *("1 names", "2 sets"),
    ],
    "--dataloader-type cyclic": ["--dataloader-type cyclic", "single"],
    "--tokenizer-type Llama2Tokenizer": ["--tokenizer-type Llama2Tokenizer", "use SentencePieceTokenizer"],
    "--tokenizer-type BertWordPieceCase": ["--tokenizer-type BertWordPieceCase", "ByteTokenizer"],
    "--tokenizer-type NullTokenizer": ["--vocab-size", "NullTokenizer"],
    "--tokenizer-type SentencePieceTokenizer": ["--tokenizer-model", "SentencePieceTokenizer"],
    "--tokenizer-type GPT2BPETokenizer --vocab-file v": ["--merge-file", "GPT2BPETokenizer"],
    "-tokenizer-type": ["--vocab-file", "GPT2BPETokenizer", "the default"],
    # layout
    "--tensor-model-parallel-size 2": [
        "world size 1 = tp 2 x",
        "--tensor-model-parallel-size 2",
        "start a multiple of 2",
    ],
    # watching
    "--bf16 --fp8-format e4m3 --fp8-monitor-interval 5": ["--fp8-monitor-interval 5", "--log-dir"],
    "--bf16 --fp8-format e4m3 --fp8-fallback-sqnr 20": ["--fp8-fallback-sqnr 20", "--fp8-monitor-interval"],
    "--bf16 --fp8-format e4m3 --fp8-fallback-for 9": ["--fp8-fallback-for 9", "--fp8-fallback-after"],
    "--bf16 --fp8-format e4m3 --fp8-forget-fallbacks": ["--fp8-forget-fallbacks", "--load"],
    "--iterations-to-skip 5:3": ["--iterations-to-skip 5:3", "a range goes up"],
    "--iterations-to-skip 0:3": ["--iterations-to-skip 0:3", "1 or more"],
    "--iterations-to-skip 5:": ["--iterations-to-skip '5:'", "100:110"],
    # one rank alone
    "--fake-process-group": ["--fake-process-group with one process", "WORLD_SIZE"],
    "--fake-process-group --save x": ["--save x with --fake-process-group", "leave it out"],
    "--fake-process-group --timing-log-level 1": ["--timing-log-level 1 with --fake-process-group"],
    # CUDA graphs
    "--cuda-graph-impl transformer_engine": ["--cuda-graph-impl transformer_engine", "use --cuda-graph-impl local"],
    f"{GRAPHS} --cuda-graph-scope attn mlp": ["--cuda-graph-modules attn mlp", "use full, or leave it out"],
    f"{GRAPHS} --hidden-dropout 0.1": ["--hidden-dropout 0.1", "--cuda-graph-impl local", "use 0"],
    f"{GRAPHS} --attention-dropout 0.1": ["--attention-dropout 0.1", "use 0"],
    f"{GRAPHS} --reset-attention-mask": ["--reset-attention-mask with --cuda-graph-impl local", "drop it"],
    f"{GRAPHS} --recompute-activations": ["--recompute-granularity selective", "drop it"],
    f"{GRAPHS} --mtp-num-layers 1 --position-embedding-type rope": [
        "--mtp-num-layers 1",
        "drop it, or leave --cuda-graph-impl out",
    ],
    f"{GRAPHS} --fake-process-group": ["--fake-process-group with --cuda-graph-impl", "leave --cuda-graph-impl out"],
    f"{GRAPHS} {MOE}": ["--num-experts 8", "leave --cuda-graph-impl out"],
    f"{GRAPHS} --cuda-graph-warmup-steps 0": ["--cuda-graph-warmup-steps 0", "1"],
    # checkpoints
    "--save x --save-interval 10 --save-retain-interval 15": ["--save-retain-interval 15", "--save-interval 10"],
}


def parse_case(parse, flags):
    """Parses the small command line with a case's flags; a first word `-flag` takes `--flag` away from it."""
    first, *rest = flags.split()
    if first.startswith("-") and not first.startswith("--"):
        return parse(" ".join(rest), without=(f"-{first}",))
    return parse(flags)


@pytest.mark.parametrize("flags", CASES)
def test_contradictions_are_one_line_with_flag_value_and_mend(parse, flags):
    with pytest.raises(ValueError) as error:
        parse_case(parse, flags)
    assert "\n" not in str(error.value)
    for text in CASES[flags]:
        assert text in str(error.value), str(error.value)


def test_every_check_can_fail(parse, monkeypatch):
    """No rule is dead: the cases here trip each of them."""
    tripped = set()

    def recording(rule):
        def run(config):
            if message := rule(config):
                tripped.add(rule.__name__)
            return message

        return run

    monkeypatch.setattr(validate, "CHECKS", tuple(recording(rule) for rule in validate.CHECKS))
    for flags in CASES:
        with pytest.raises(ValueError):
            parse_case(parse, flags)
    for flags in UNEVEN:
        with pytest.raises(ValueError):
            parse(flags, env={"WORLD_SIZE": "4"})
    assert {rule.__name__ for rule in ALL_CHECKS} == tripped


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ("--rotary-base 500000", "--rotary-base"),
        ("--sequence-parallel", "--sequence-parallel"),
        ("--save-interval 3", "--save-interval"),
        ("--no-load-optim", "--no-load-optim"),
        ("--finetune", "--finetune"),
        ("--vocab-file v --merge-file m", "--merge-file"),
        ("--tokenizer-model t", "--tokenizer-model"),
        ("--lr-wsd-decay-iters 2", "--lr-wsd-decay-iters"),
        ("--device cpu --distributed-backend nccl", "--distributed-backend"),
        ("--moe-router-topk 4", "--moe-router-topk"),
        ("--kv-lora-rank 4", "--kv-lora-rank"),
        ("--mscale 0.7", "--mscale"),
        ("--rope-type rope", "--rope-type"),
        (f"{MLA} --kv-channels 16", "--kv-channels"),
        (f"{MOE} --moe-router-bias-update-rate 0.1", "--moe-router-bias-update-rate"),
        ("--mtp-loss-scaling-factor 0.3", "--mtp-loss-scaling-factor"),
        ("--cuda-graph-scope full", "--cuda-graph-modules"),
    ],
)
def test_idle_flags_leave_a_note(parse, flags, flag):
    assert any(note.startswith(f"{flag}: no effect") for note in parse(flags).notes)
    assert not any(note.startswith(flag) for note in parse().notes)
