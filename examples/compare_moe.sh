#!/usr/bin/env bash
# FP8 against BF16 in a mixture of experts at GPU size: 52 million tokens each of BF16 with two seeds and of FP8.
#
#   bash examples/compare_moe.sh [DIR] [TEXT...]      DIR defaults to runs/compare_moe; TEXT: files of any kind that
#                                                     tools/preprocess_data.py reads
#
# Without TEXT it trains on the Python source files of the environment it runs in: real text, hundreds of megabytes, and
# there on every machine. Fails when FP8's validation loss is further from the mean of the two BF16 runs than they are
# apart, plus 0.25%. EXTRA="--train-iters 20 ..." in the environment overrides flags; STEP=data stops after the data.
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:-runs/compare_moe}
shift || true
workers=$(nproc)
read -ra extra <<< "${EXTRA:-}"
mkdir -p "$run"

say() { printf '\n== %s\n' "$*"; }

say "1/3 data: $run/data_text_document"
if [ ! -f "$run/data_text_document.idx" ]; then
    texts=("$@")
    if [ ${#texts[@]} -eq 0 ]; then
        python - "$run/sources.jsonl" "$run/sample.txt" <<'END'
import hashlib, json, random, sys, sysconfig
from pathlib import Path

paths = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
files = sorted({file for path in paths for file in Path(path).rglob("*.py") if file.stat().st_size < 400_000})
random.Random(0).shuffle(files)
seen, total, sample = set(), 0, 0
with open(sys.argv[1], "w") as out, open(sys.argv[2], "w") as small:
    for file in files:
        text = file.read_text(errors="replace")
        digest = hashlib.md5(text.encode()).digest()
        if len(text) < 500 or digest in seen or total > 220e6:  # many packages ship the same file
            continue
        seen.add(digest)
        total += len(text)
        out.write(json.dumps({"text": text}) + "\n")
        if sample < 4_000_000:
            sample += small.write(text)
print(f"{len(seen)} files, {total / 1e6:.0f} MB")
END
        texts=("$run/sources.jsonl")
    else
        cat "${texts[@]}" | head -c 4000000 > "$run/sample.txt"
    fi
    python tools/train_tokenizer.py --input "$run/sample.txt" --vocab-size "${VOCAB:-4096}" --output-prefix "$run/tokenizer"
    python tools/preprocess_data.py --input "${texts[@]}" --output-prefix "$run/data" --workers "$workers" --append-eod \
        --tokenizer-type SentencePieceTokenizer --tokenizer-model "$run/tokenizer.model"
fi
[ "${STEP:-}" != data ] || exit 0

FLAGS=(
    --num-layers 6 --hidden-size 512 --ffn-hidden-size 1536 --num-attention-heads 8
    --seq-length 1024 --max-position-embeddings 1024
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0
    --num-experts 16 --moe-layer-freq "[0]+[1]*5" --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512
    --moe-router-topk 2 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 1.5
    --moe-router-enable-expert-bias --moe-router-bias-update-rate 5e-3
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
    --micro-batch-size 32 --global-batch-size 128 --train-iters 400 --bf16
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.1
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 20 --log-interval 20
    --data-path "$run/data_text_document" --split 95,5,0 --num-workers 2
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$run/tokenizer.model"
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

say "2/3 three runs"
train bf16 --seed 1
train bf16_again --seed 2
train fp8 --seed 1 --fp8-format e4m3 --fp8-recipe blockwise

say "3/3 comparison"
python tools/compare_runs.py "$run/bf16" "$run/bf16_again" "$run/fp8" --labels "BF16, seed 1" "BF16, seed 2" "FP8, seed 1" \
    --output "$run/loss.png" || true # other seeds are other data: it says so
python - "$run" <<'END'
import sys
from pathlib import Path

from megafp8.training.run_log import read_metrics

one, two, fp8 = (read_metrics(Path(sys.argv[1], name))[1][-1]["valid_loss"] for name in ("bf16", "bf16_again", "fp8"))
mean, spread = (one + two) / 2, abs(one - two)
gap, room = fp8 - mean, spread + 0.0025 * mean
print(f"validation loss: BF16 {one:.4f} and {two:.4f} (spread {spread / mean:.3%}), FP8 {fp8:.4f} ({gap / mean:+.3%})")
print(f"{'within' if abs(gap) <= room else 'OUTSIDE of'} the spread plus 0.25% ({room / mean:.3%})")
sys.exit(abs(gap) > room)
END
