#!/usr/bin/env bash
# From text to a GPT trained in FP8: tokenizer, data, one run in BF16, one in FP8, a plot of both, a sample.
#
#   bash examples/quickstart.sh [DIR]        DIR defaults to runs/quickstart; run it from an activated environment
#
# The FP8 run is the product: DIR holds its metrics.jsonl, checkpoint, plot and sample; DIR/bf16 holds the base.
# Finished steps are not repeated, so an interrupted quickstart goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
. examples/lib/run_directory.sh
run=$(run_directory "examples/quickstart.sh [DIR]" runs/quickstart "${1:-}")
text=examples/data/tinyshakespeare.txt
if ! python -c 'import importlib.util as i, sys; sys.exit(not (i.find_spec("megafp8") and i.find_spec("torch")))'; then
    echo "quickstart: this Python has no megafp8 or no torch; make venv, then source .venv/bin/activate" >&2
    exit 2
fi
mkdir -p "$run"

say() { printf '\n== %s\n' "$*"; }

say "1/5 tokenizer: 1024 SentencePiece tokens from $text"
if [ ! -f "$run/tokenizer.model" ]; then
    python tools/train_tokenizer.py --input "$text" --vocab-size 1024 --output-prefix "$run/tokenizer"
fi

say "2/5 data: text -> $run/data_text_document.bin/.idx (Megatron's format)"
if [ ! -f "$run/data_text_document.idx" ]; then
    python tools/preprocess_data.py --input "$text" --output-prefix "$run/data" --workers 2 --append-eod --split-text blank-lines \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$run/tokenizer.model"
fi

MODEL=( # an LM head of its own and a gentle learning rate: both precisions train without spikes
    --num-layers 4 --hidden-size 256 --ffn-hidden-size 768
    --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --seq-length 256 --max-position-embeddings 256
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
)
TRAINING=(
    --micro-batch-size 8 --global-batch-size 8 --train-iters 300 --bf16 --seed 1234
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 50
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 100 --eval-iters 20 --log-interval 20 --save-interval 300
)
DATA=(
    --data-path "$run/data_text_document" --split 90,10,0 --num-workers 0
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$run/tokenizer.model"
)
FP8=(--fp8-format e4m3 --fp8-recipe blockwise)

train() { # train DIR FLAG...: unless its last checkpoint is there
    local dir=$1
    shift
    if [ -f "$dir/checkpoints/iter_0000300/index.json" ]; then
        echo "already trained: $dir"
        return
    fi
    python pretrain_gpt.py "${MODEL[@]}" "${TRAINING[@]}" "${DATA[@]}" \
        --log-dir "$dir" --save "$dir/checkpoints" --load "$dir/checkpoints" "$@"
}

say "3/5 BF16, the base"
train "$run/bf16"
say "4/5 FP8: ${FP8[*]}"
train "$run" "${FP8[@]}"

verdict=0 # a gap above 1% makes the script fail, but after it has shown everything
say "5/5 both curves, and what the FP8 model writes"
python tools/compare_runs.py "$run/bf16" "$run" --labels BF16 "FP8 blockwise" --output "$run/loss.png" \
    --max-gap 0.01 || verdict=$?
python tools/evaluate.py --load "$run/checkpoints" --data-path "$run/data_text_document" --split 90,10,0 \
    --output "$run/evaluation.json"
python tools/generate_text.py --load "$run/checkpoints" --prompt "ROMEO:" --num-tokens 150 --temperature 0.8 \
    --seed 1 --output "$run/sample.txt"

cat <<END

Done. Where everything lies:
  $run/metrics.jsonl    one line an iteration; TensorBoard: tensorboard --logdir $run
  $run/loss.png         FP8 against BF16
  $run/sample.txt       what the model writes
  $run/checkpoints/     safetensors and a JSON index
Next: train on, with another recipe, from the same data:
  .venv/bin/python pretrain_gpt.py --config $run/args.json --fp8-format hybrid --fp8-recipe tensorwise \\
      --log-dir $run/tensorwise --save $run/tensorwise/checkpoints --load $run/tensorwise/checkpoints
END
exit "$verdict"
