#!/usr/bin/env bash
# What optimizer state below FP32 does to the loss: a small GPT on real text, in BF16, with every precision of masters and
# moments, and with another seed (the noise to compare with). On two CPU cores it takes about 15 minutes.
#
#   bash examples/precision_tiers.sh [DIR]         DIR defaults to runs/precision_tiers; from an activated environment
#
# Finished runs are not repeated. ITERATIONS=20 in the environment makes it a try-out. beta2 is 0.999: the second moment
# moves by a thousandth a step, which is what low precision finds hardest.
set -euo pipefail
cd "$(dirname "$0")/.."
. examples/lib/run_directory.sh
run=$(run_directory "examples/precision_tiers.sh [DIR]" runs/precision_tiers "${1:-}")
iterations=${ITERATIONS:-400}
text=examples/data/tinyshakespeare.txt
mkdir -p "$run"

if [ ! -f "$run/data_text_document.idx" ]; then
    python tools/train_tokenizer.py --input "$text" --vocab-size 512 --output-prefix "$run/tokenizer"
    python tools/preprocess_data.py --input "$text" --output-prefix "$run/data" --append-eod --split-text blank-lines \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$run/tokenizer.model"
fi

TRAINING=(
    --num-layers 4 --hidden-size 192 --ffn-hidden-size 512 --num-attention-heads 4 --seq-length 128
    --max-position-embeddings 128 --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 16 --global-batch-size 16 --train-iters "$iterations" --bf16
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1
    --weight-decay 0.1 --adam-beta2 0.999 --clip-grad 1.0
    --eval-interval "$iterations" --eval-iters 12 --log-interval 20
    --data-path "$run/data_text_document" --split 90,10,0 --num-workers 0
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$run/tokenizer.model"
)
AWARE="--use-precision-aware-optimizer"

train() { # train NAME FLAG...: unless it is done
    local name=$1
    shift
    if [ -f "$run/$name/done" ]; then
        echo "already trained: $name"
        return
    fi
    rm -rf "${run:?}/$name"
    python pretrain_gpt.py "${TRAINING[@]}" --log-dir "$run/$name" "$@"
    touch "$run/$name/done"
}

train fp32
train seed2 --seed 4321
train remainders $AWARE --store-param-remainders
train bf16-moments $AWARE --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16
train fp8-moments $AWARE --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8
train smallest $AWARE --store-param-remainders --exp-avg-dtype fp8 --exp-avg-sq-dtype fp8

python tools/compare_runs.py "$run"/{fp32,seed2,remainders,bf16-moments,fp8-moments,smallest} --noise seed2 \
    --labels fp32 seed2 remainders bf16-moments fp8-moments smallest --output "$run/tiers.png"
