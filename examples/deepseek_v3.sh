#!/usr/bin/env bash
#SBATCH --job-name=deepseek-v3
#SBATCH --nodes=128
#SBATCH --gpus-per-node=8
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@600
#
# DeepSeek-V3 (671B) at 4096 tokens, on 1024 GPUs of 80 GB, or a multiple of that whose replicas divide the batch.
#
#   sbatch examples/deepseek_v3.sh [FLAG...]         Slurm, 128 nodes of 8 GPUs; --nodes N makes it another number
#   bash examples/deepseek_v3.sh [FLAG...]           one node of as many as NNODES, NODE_RANK and MASTER_ADDR say
#   DRY_RUN=1 bash examples/deepseek_v3.sh           what it would run, without a GPU; docs/launching.md has the variables
set -euo pipefail
lib=$(dirname "${BASH_SOURCE[0]}")/lib
[ -d "$lib" ] || lib=$SLURM_SUBMIT_DIR/examples/lib # sbatch runs a copy of this file
# shellcheck source=lib/launch.sh
. "$lib/launch.sh"
job deepseek_v3 128 8
data 129280

MODEL=(
    --num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128
    --seq-length 4096 --max-position-embeddings 4096
    --position-embedding-type rope --rotary-base 10000 --normalization RMSNorm --norm-epsilon 1e-6 --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --init-method-std 0.006
    --multi-latent-attention --qk-layernorm --q-lora-rank 1536 --kv-lora-rank 512
    --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128
    --num-experts 256 --moe-layer-freq "[0]*3+[1]*58" --moe-ffn-hidden-size 2048 --moe-router-topk 8
    --moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --mtp-num-layers 1 --mtp-loss-scaling-factor 0.3
)
LAYOUT=( # 16 stages, two virtual ones each: the dense layers, 29 pairs, an empty one, prediction and loss
    --pipeline-model-parallel-size 16 --pipeline-model-parallel-layout "Et*3|(tt|)*29|mL"
    --expert-model-parallel-size 64 --moe-token-dispatcher-type alltoall --moe-grouped-gemm
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity selective --recompute-modules mla_up_proj mlp moe
)
TRAINING=( # not yet in megafp8: --overlap-moe-expert-parallel-comm, so tokens travel in the open
    --micro-batch-size 1 --global-batch-size 15360 --train-iters 240000 --seed 1234
    --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 20 --log-interval 10 --log-throughput --save-interval 500 --async-save
    --distributed-timeout-minutes 60
)
if [ "${PRECISION:-fp8}" = fp8 ]; then
    PRECISION_FLAGS+=(--moe-fp8-dispatch) # the same bits; the way to the experts takes half the bytes
fi

launch "${MODEL[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${DATA[@]}" "${PRECISION_FLAGS[@]}" "${RUN[@]}" "$@"
