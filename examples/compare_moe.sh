#!/usr/bin/env bash
# FP8 against BF16 in a mixture of experts at GPU size: 50 million tokens each of BF16 with two seeds and of FP8.
#
#   bash examples/compare_moe.sh [DIR] [SOURCES...]   DIR defaults to runs/compare_moe; SOURCES: directories of text files
#
# 157 million parameters, 54 million of them active for a token: 16 experts and a shared one, two a token, routed as in
# DeepSeek-V3. Without SOURCES it trains on what examples/regression_corpus.py finds: real text, there on every machine.
# Learning rate, warm-up and balance are such that the load doesn't collapse at the start: there runs part (docs/moe.md).
# Fails when FP8's training or validation loss is further from BF16's with its seed than the other seed is, plus 0.25%.
#
#   EXTRA="--train-iters 20 ..."   overrides flags
#   FP8_SEEDS="1 2"                FP8 with both seeds (default: 1), each judged against BF16 with the same one
#   AT_ONCE=1                      all runs at once, over as many GPUs as there are; on one they fill each other's gaps
#   MIB=200, VOCAB=8192            text, and vocabulary
#   STEP=data                      stops after the data
set -euo pipefail
cd "$(dirname "$0")/.."
. examples/lib/run_directory.sh
run=$(run_directory "examples/compare_moe.sh [DIR] [SOURCES...]" runs/compare_moe "${1:-}")
shift || true
read -ra extra <<< "${EXTRA:-}"
case ${FP8_SEEDS:-1} in
1 | 2 | "1 2") ;;
*)
    echo "compare_moe.sh: FP8_SEEDS=$FP8_SEEDS: give 1, 2 or \"1 2\"" >&2
    exit 2
    ;;
esac
mkdir -p "$run"

say() { printf '\n== %s\n' "$*"; }

say "1/3 data: $run/data_text_document"
if [ ! -f "$run/data_text_document.idx" ]; then
    python examples/regression_corpus.py --output "$run/corpus.jsonl" --max-mib "${MIB:-200}" ${1+--roots "$@"} \
        --tokenizer "$run/tokenizer.json" --vocab-size "${VOCAB:-8192}"
    python tools/preprocess_data.py --input "$run/corpus.jsonl" --output-prefix "$run/data" --append-eod \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$run/tokenizer.json"
fi
[ "${STEP:-}" != data ] || exit 0

FLAGS=(
    --num-layers 6 --hidden-size 768 --ffn-hidden-size 2048 --num-attention-heads 12
    --seq-length 1024 --max-position-embeddings 1024
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --num-experts 16 --moe-layer-freq "[0]+[1]*5" --moe-ffn-hidden-size 640 --moe-shared-expert-intermediate-size 640
    --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 1.5
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2
    --micro-batch-size 64 --global-batch-size 128 --train-iters 384 --bf16
    --lr 8e-4 --min-lr 8e-5 --lr-decay-style cosine --lr-warmup-fraction 0.2
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 100000 --eval-iters 20 --log-interval 20
    --data-path "$run/data_text_document" --split 95,5,0 --num-workers 2
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$run/tokenizer.json"
)

train() { # train NAME FLAG...: unless it is done
    local dir=$run/$1
    shift
    if grep -qs valid_loss "$dir/metrics.jsonl"; then
        echo "already trained: $dir"
        return
    fi
    rm -rf "$dir"
    python pretrain_gpt.py "${FLAGS[@]}" --log-dir "$dir" "$@" ${extra[@]+"${extra[@]}"}
}

start() { # start NAME FLAG...: train, or with AT_ONCE=1 begin to
    if [ -z "${AT_ONCE:-}" ]; then
        train "$@"
    else
        CUDA_VISIBLE_DEVICES=${gpus[${#running[@]} % ${#gpus[@]}]} train "$@" > "$run/$1.log" 2>&1 &
        running+=("$1:$!")
    fi
}

say "2/3 runs"
read -ra seeds <<< "${FP8_SEEDS:-1}"
[ -z "${AT_ONCE:-}" ] || export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((($(nproc) + 2) / (2 + ${#seeds[@]})))} # they share the cores, too
gpus=${CUDA_VISIBLE_DEVICES:-$(nvidia-smi --query-gpu=index --format=csv,noheader 2> /dev/null || true)}
read -ra gpus <<< "$(tr '\n,' '  ' <<< "$gpus")"
running=() gpus=("${gpus[@]:-}") # without a GPU: none to see
start bf16_1 --seed 1
start bf16_2 --seed 2
for seed in "${seeds[@]}"; do
    start "fp8_$seed" --seed "$seed" --fp8-format e4m3 --fp8-recipe blockwise --fp8-small-linears fp8
done
failed=0
for one in ${running[@]+"${running[@]}"}; do
    wait "${one#*:}" || failed=1
    echo "-- $run/${one%%:*}.log"
    tail -n 8 "$run/${one%%:*}.log"
done
[ "$failed" = 0 ] || exit 1

say "3/3 comparison"
for seed in "${seeds[@]}"; do
    other=$((3 - seed))
    python tools/compare_runs.py "$run"/{bf16_$seed,bf16_$other,fp8_$seed} \
        --labels "BF16, seed $seed" "BF16, seed $other" "FP8, seed $seed" --noise "BF16, seed $other" \
        --budgets "FP8, seed $seed=0.0025" --output "$run/loss_$seed.png" || failed=1
done
exit "$failed"
