#!/usr/bin/env bash
#SBATCH --job-name=gpt-350m
#SBATCH --nodes=1
#SBATCH --gpus-per-node=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#
# GPT-3 Medium (350M: 24 layers, h 1024, 16 heads of 64), the GPT-2 vocabulary, on one GPU.
#
#   bash examples/gpt_350m.sh [FLAG...]           one node
#   sbatch examples/gpt_350m.sh [FLAG...]         Slurm
#   DRY_RUN=1 bash examples/gpt_350m.sh           what it would run, without a GPU; docs/launching.md has the variables
set -euo pipefail
lib=$(dirname "${BASH_SOURCE[0]}")/lib
[ -d "$lib" ] || lib=$SLURM_SUBMIT_DIR/examples/lib # sbatch runs a copy of this file
# shellcheck source=lib/launch.sh
. "$lib/launch.sh"
job gpt_350m 1 1
data 50257 # TOKENIZER_TYPE=GPT2BPETokenizer needs --vocab-file and --merge-file among the flags

MODEL=(
    --num-layers 24 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16
    --seq-length 2048 --max-position-embeddings 2048 --position-embedding-type learned_absolute
    --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
LAYOUT=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather) # for more GPUs than one
TRAINING=( # GPT-3's batch of half a million tokens and its learning rate
    --micro-batch-size 8 --global-batch-size 256 --train-iters 100000 --seed 1234
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 715
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 20 --log-interval 10 --log-throughput --save-interval 1000 --async-save
)

launch "${MODEL[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${DATA[@]}" "${PRECISION_FLAGS[@]}" "${RUN[@]}" "$@"
