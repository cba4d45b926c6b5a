#!/usr/bin/env bash
# Does megafp8 run right on the GPUs of this machine? Layouts against one GPU, switches, checkpoints, collectives, speed.
#
#   bash tools/selftest_nccl.sh [DIR]      DIR defaults to runs/selftest_nccl; run it from an activated environment
#
# GPUS=2 takes two GPUs (default: all), PARTS="layouts speed" only those parts, RECIPES="fp32 blockwise" only those
# precisions, CASES="DP" only that case of speed (DP EP TP GRAPHS WHOLE), JOBS=1 one job at a time (default 3 beside each
# other), CHECK_SECONDS=120 leaves a check more than a minute (a whole model has three times that), SECONDS_AT_MOST=600
# ends all by then, DEVICE=cpu runs it on gloo with tiny models, which proves the script and not the machine. WHOLE is
# left out where the GPUs can't hold it, or are odd in number. A line a check is printed; DIR/selftest.json
# holds them, DIR/log_*.txt what the runs said. Exit code 0: all passed, 1: one did not. The user's own NCCL_* variables
# are kept.
set -euo pipefail
cd "$(dirname "$0")/.."
. examples/lib/run_directory.sh
run=$(run_directory "tools/selftest_nccl.sh [DIR]" runs/selftest_nccl "${1:-}")
if [ $# -gt 1 ]; then
    echo "selftest_nccl: unexpected argument '$2' after $1; what to run is said before the command: PARTS=... bash $0" >&2
    exit 2
fi
flags=$(python tools/selftest_variables.py)
mkdir -p "$run"
if [ ! -f "$run/data_text_document.idx" ]; then
    python tools/preprocess_data.py --input examples/data/tinyshakespeare.txt --output-prefix "$run/data" \
        --append-eod --split-text blank-lines --tokenizer-type ByteTokenizer > "$run/log_data.txt"
fi
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-8}"
# shellcheck disable=SC2086 # flags are words
exec python tools/selftest_nccl.py "$run" $flags
