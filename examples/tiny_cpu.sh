#!/usr/bin/env bash
# A tiny Llama-like GPT on two CPU processes: seconds, to try a change or these scripts.
#
#   bash examples/tiny_cpu.sh [FLAG...]           DRY_RUN=1 shows what it would run; docs/launching.md has the variables
set -euo pipefail
lib=$(dirname "${BASH_SOURCE[0]}")/lib
[ -d "$lib" ] || lib=$SLURM_SUBMIT_DIR/examples/lib # sbatch runs a copy of this file
# shellcheck source=lib/launch.sh
. "$lib/launch.sh"
job tiny_cpu 1 2
data 512

MODEL=(
    --num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --seq-length 64 --max-position-embeddings 64
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
)
LAYOUT=(--device cpu --use-distributed-optimizer)
TRAINING=(
    --micro-batch-size 2 --global-batch-size 8 --train-iters 20 --seed 1234
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 4
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 10 --eval-iters 2 --log-interval 5 --save-interval 10 --num-workers 0
)

launch "${MODEL[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${DATA[@]}" "${PRECISION_FLAGS[@]}" "${RUN[@]}" "$@"
