#!/usr/bin/env bash
# 16 ranks on the CPU, TP2 x PP2 x CP2 x DP2, against one process: losses and gradient norms must agree.
#
#   bash examples/smoke_16_ranks.sh [DIR]     DIR defaults to runs/smoke_16_ranks; run it from an activated environment
#
# It shows that all axes work together, not how fast: on a laptop it takes minutes, most of them to start 16 processes.
# RECIPE="--bf16 --fp8-format hybrid --fp8-recipe delayed" runs it in FP8, where ranks round differently than one
# process, so TOLERANCE must be larger, e.g. 1e-2.
set -euo pipefail
cd "$(dirname "$0")/.."
. examples/lib/run_directory.sh
run=$(run_directory "examples/smoke_16_ranks.sh [DIR]" runs/smoke_16_ranks "${1:-}")
tolerance=${TOLERANCE:-1e-6}
read -ra recipe <<< "${RECIPE:-}"
text=examples/data/tinyshakespeare.txt
mkdir -p "$run"
rm -rf "$run/one" "$run/sixteen"
export OMP_NUM_THREADS=1

if [ ! -f "$run/data_text_document.idx" ]; then
    python tools/preprocess_data.py --input "$text" --output-prefix "$run/data" --append-eod --split-text blank-lines \
        --tokenizer-type ByteTokenizer
fi

FLAGS=(
    --num-layers 4 --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 4
    --group-query-attention --num-query-groups 2 --seq-length 64 --max-position-embeddings 64
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0 --reset-attention-mask --reset-position-ids --eod-mask-loss
    --micro-batch-size 1 --global-batch-size 8 --train-iters 5 --lr 1e-4 --min-lr 1e-4 --seed 1234
    --data-path "$run/data_text_document" --split 90,10,0 --num-workers 0 --tokenizer-type ByteTokenizer
    --eval-interval 5 --eval-iters 1 --log-interval 1 --device cpu "${recipe[@]}"
)
LAYOUT=(
    --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --cp-comm-type p2p
    --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --pipeline-schedule zero-bubble
)

echo "== one process"
python pretrain_gpt.py "${FLAGS[@]}" --log-dir "$run/one"
echo "== 16 processes: TP2 x PP2 x CP2 x DP2"
torchrun --standalone --nproc-per-node 16 pretrain_gpt.py "${FLAGS[@]}" "${LAYOUT[@]}" --log-dir "$run/sixteen"

python - "$run" "$tolerance" <<'PYTHON'
import sys
from pathlib import Path

from megafp8.training.run_log import read_metrics

folder, tolerance = Path(sys.argv[1]), float(sys.argv[2])
(one, valid), (sixteen, valid_16) = (read_metrics(folder / name) for name in ("one", "sixteen"))
pairs = [(a[key], b[key]) for a, b in zip(one, sixteen, strict=True) for key in ("lm_loss", "grad_norm")]
pairs += [(a["valid_loss"], b["valid_loss"]) for a, b in zip(valid, valid_16, strict=True)]
assert len(pairs) == 11, "a run is not whole"
gap = max(abs(a - b) / abs(a) for a, b in pairs)
print(f"largest relative difference of losses and gradient norms: {gap:.1e} (allowed {tolerance:g})")
sys.exit(gap > tolerance)
PYTHON
