#!/usr/bin/env bash
# A small mixture of experts on real text, in BF16 and in FP8: one dense layer, then layers of 8 experts and a shared one,
# routed as in DeepSeek-V3 (sigmoid scores, a bias that balances the load, a small loss over each sequence beside it).
#
#   bash examples/train_moe.sh [DIR]         DIR defaults to runs/moe; run it from an activated environment
#
# Fails when FP8's validation loss is more than 0.5% from BF16's. Finished steps are not repeated. ITERATIONS=20 in the
# environment makes it a try-out.
set -euo pipefail
cd "$(dirname "$0")/.."
. examples/lib/run_directory.sh
run=$(run_directory "examples/train_moe.sh [DIR]" runs/moe "${1:-}")
iterations=${ITERATIONS:-150}
text=examples/data/tinyshakespeare.txt
mkdir -p "$run"

say() { printf '\n== %s\n' "$*"; }

say "1/4 tokenizer and data: $run/data_text_document"
if [ ! -f "$run/data_text_document.idx" ]; then
    python tools/train_tokenizer.py --input "$text" --vocab-size 512 --output-prefix "$run/tokenizer"
    python tools/preprocess_data.py --input "$text" --output-prefix "$run/data" --workers 2 --append-eod --split-text blank-lines \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$run/tokenizer.model"
fi

MODEL=(
    --num-layers 3 --hidden-size 128 --ffn-hidden-size 384
    --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --seq-length 128 --max-position-embeddings 128
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)
EXPERTS=(
    --num-experts 8 --moe-layer-freq "[0]+[1]*2" --moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 128
    --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 1.5
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-2
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-per-layer-logging
)
TRAINING=(
    --micro-batch-size 8 --global-batch-size 8 --train-iters "$iterations" --bf16 --seed 1234
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.15
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval "$iterations" --eval-iters 30 --log-interval 20 --save-interval "$iterations"
)
DATA=(
    --data-path "$run/data_text_document" --split 90,10,0 --num-workers 0
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$run/tokenizer.model"
)
FP8=(--fp8-format e4m3 --fp8-recipe blockwise)

train() { # train DIR FLAG...: unless its last checkpoint is there
    local dir=$1
    shift
    if [ -f "$dir/checkpoints/$(printf 'iter_%07d' "$iterations")/index.json" ]; then
        echo "already trained: $dir"
        return
    fi
    python pretrain_gpt.py "${MODEL[@]}" "${EXPERTS[@]}" "${TRAINING[@]}" "${DATA[@]}" \
        --log-dir "$dir" --save "$dir/checkpoints" --load "$dir/checkpoints" "$@"
}

say "2/4 BF16, the base"
train "$run/bf16"
say "3/4 FP8: ${FP8[*]}"
train "$run/fp8" "${FP8[@]}"

say "4/4 both curves"
python tools/compare_runs.py "$run/bf16" "$run/fp8" --labels BF16 "FP8 blockwise" --output "$run/loss.png" --max-gap 0.005
python tools/generate_text.py --load "$run/fp8/checkpoints" --prompt "ROMEO:" --num-tokens 100 --temperature 0.8 \
    --seed 1 --output "$run/sample.txt"
echo "Done: $run/{bf16,fp8}/metrics.jsonl (expert_load: tokens of each expert, by layer), loss.png, sample.txt"
