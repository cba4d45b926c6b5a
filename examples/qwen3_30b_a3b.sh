#!/usr/bin/env bash
#SBATCH --job-name=qwen3-30b-a3b
#SBATCH --nodes=4
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#
# Qwen3-30B-A3B at 4096 tokens, on 32 GPUs of 80 GB, or another multiple of 16 whose replicas divide the batch.
#
#   sbatch examples/qwen3_30b_a3b.sh [FLAG...]         Slurm, 4 nodes of 8 GPUs; --nodes N makes it another number
#   bash examples/qwen3_30b_a3b.sh [FLAG...]           one node of as many as NNODES, NODE_RANK and MASTER_ADDR say
#   DRY_RUN=1 bash examples/qwen3_30b_a3b.sh           what it would run, without a GPU; docs/launching.md has the variables
set -euo pipefail
lib=$(dirname "${BASH_SOURCE[0]}")/lib
[ -d "$lib" ] || lib=$SLURM_SUBMIT_DIR/examples/lib # sbatch runs a copy of this file
# shellcheck source=lib/launch.sh
. "$lib/launch.sh"
job qwen3_30b_a3b 4 8
data 151936

MODEL=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
    --num-attention-heads 32 --group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm
    --seq-length 4096 --max-position-embeddings 40960
    --num-experts 128 --moe-ffn-hidden-size 768 --moe-router-topk 8
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3
    --position-embedding-type rope --rotary-base 1000000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
LAYOUT=( # 16 experts of each layer on a GPU; two stages of 24 layers
    --expert-model-parallel-size 8 --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --pipeline-model-parallel-size 2
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 256 --train-iters 100000 --seed 1234
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 20 --log-interval 10 --log-throughput --save-interval 500 --async-save
    --distributed-timeout-minutes 30
)
if [ "${PRECISION:-fp8}" = fp8 ]; then
    PRECISION_FLAGS+=(--moe-fp8-dispatch) # the same bits; the way to the experts takes half the bytes
fi

launch "${MODEL[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${DATA[@]}" "${PRECISION_FLAGS[@]}" "${RUN[@]}" "$@"
