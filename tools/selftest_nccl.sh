#!/usr/bin/env bash
# Does megafp8 run right on the GPUs of this machine? Collectives, layouts against one GPU, checkpoints, speed.
#
#   bash tools/selftest_nccl.sh [DIR]      DIR defaults to runs/selftest_nccl; run it from an activated environment
#
# GPUS=2 takes two GPUs (default: all), PARTS="collectives layouts" only those parts, RECIPES="fp32 blockwise" only
# those precisions, DEVICE=cpu runs it on gloo with tiny models, which proves the script and not the machine. The table is printed, DIR/selftest.json holds it; exit code
# 0: every comparison holds, 1: one does not. The user's own NCCL_* variables are kept.
set -euo pipefail
cd "$(dirname "$0")/.."
run=${1:-runs/selftest_nccl}
device=${DEVICE:-cuda}
gpus=${GPUS:-$(python -c 'import torch; print(torch.cuda.device_count() or 2)')}
read -ra parts <<< "${PARTS:-collectives layouts switches checkpoint speed}"
read -ra recipes <<< "${RECIPES:-fp32 bf16 tensorwise blockwise mxfp8 delayed}"
flags=(--device "$device" --recipes "${recipes[@]}" --parts "${parts[@]}")
mkdir -p "$run"
if [ ! -f "$run/data_text_document.idx" ]; then
    python tools/preprocess_data.py --input examples/data/tinyshakespeare.txt --output-prefix "$run/data" \
        --append-eod --split-text blank-lines --tokenizer-type ByteTokenizer
fi
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-8}"
python tools/selftest_nccl.py "$run" --reference "${flags[@]}"
# The module, not the command: a torchrun on PATH may belong to another Python than `python` (a venv over a site's torch).
python -m torch.distributed.run --standalone --nproc-per-node "$gpus" tools/selftest_nccl.py "$run" "${flags[@]}"
