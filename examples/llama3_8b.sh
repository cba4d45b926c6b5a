#!/usr/bin/env bash
#SBATCH --job-name=llama3-8b
#SBATCH --nodes=1
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#
# Llama-3-8B at 8192 tokens, on 8 GPUs of 80 GB, or a multiple of 8 whose replicas divide the batch.
#
#   sbatch examples/llama3_8b.sh [FLAG...]         Slurm, 1 node of 8 GPUs; --nodes N makes it another number
#   bash examples/llama3_8b.sh [FLAG...]           one node of as many as NNODES, NODE_RANK and MASTER_ADDR say
#   DRY_RUN=1 bash examples/llama3_8b.sh           what it would run, without a GPU; docs/launching.md has the variables
set -euo pipefail
lib=$(dirname "${BASH_SOURCE[0]}")/lib
[ -d "$lib" ] || lib=$SLURM_SUBMIT_DIR/examples/lib # sbatch runs a copy of this file
# shellcheck source=lib/launch.sh
. "$lib/launch.sh"
job llama3_8b 1 8
data 128256

MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm --norm-epsilon 1e-5 --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
LAYOUT=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 128 --train-iters 100000 --seed 1234
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 20 --log-interval 10 --log-throughput --save-interval 500 --async-save
)

launch "${MODEL[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${DATA[@]}" "${PRECISION_FLAGS[@]}" "${RUN[@]}" "$@"
