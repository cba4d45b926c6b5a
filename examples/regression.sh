#!/usr/bin/env bash
# Does FP8 train as BF16 does? The same model on real text in BF16 (two seeds: the noise floor) and in every recipe.
#
#   bash examples/regression.sh prepare                corpus, tokenizer, tokens (once)
#   bash examples/regression.sh train bf16 blockwise   some runs, one after the other; finished ones are left alone
#   bash examples/regression.sh report                 table, verdict (exit code) and page of all runs that are there
#   bash examples/regression.sh flags blockwise        what makes a run what it is
#
# Runs may be made one after the other and on several machines: copy their directories together (without checkpoints)
# before the report. They must have read the same corpus: its digest is in each run's corpus.log, and the report names
# runs that read other documents.
#
#   RUNS=DIR       where everything goes (default runs/regression)
#   DATA=DIR       where corpus, tokenizer and tokens go (default RUNS/data)
#   SIZE=full      110 M parameters, 151 M tokens a run, 2.1 M tokens an evaluation: a GPU, minutes
#   SIZE=small     21 M parameters, 20 M tokens: for ablations
#   SIZE=tiny      the same on a CPU in minutes, to see that the script works: its gaps mean nothing
#   JOBS=N         so many runs at once (default: one a GPU); more, for small ones that leave a GPU idle
#   LIMIT=N        begin no run that would not end within N seconds, by the longest run so far
#   MINUTES=N      stop each run after N minutes with a checkpoint; the next `train` goes on from there
#   EXTRA="..."    more flags of pretrain_gpt.py, for every run
#   GPUS=N         in a report, bytes of a rank of N GPUs with two tensor-parallel ranks, not those of the run itself
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${RUNS:-runs/regression} size=${SIZE:-full}
data=${DATA:-$runs/data}

case $size in
full)
    # Wide and shallow, since that is quickest on a GPU; a batch is one microbatch. The evaluations read 2.1 M tokens each.
    vocabulary=8192 mib=490 iterations=1150
    MODEL=(--num-layers 3 --hidden-size 1536 --ffn-hidden-size 4096 --num-attention-heads 12 --seq-length 1024)
    BATCH=(--micro-batch-size 128 --global-batch-size 128 --lr-warmup-iters 100 --eval-interval 575 --eval-iters 16)
    ;;
small)
    vocabulary=8192 mib=90 iterations=320
    MODEL=(--num-layers 4 --hidden-size 512 --ffn-hidden-size 1408 --num-attention-heads 8 --seq-length 512)
    BATCH=(--micro-batch-size 128 --global-batch-size 128 --lr-warmup-iters 40 --eval-interval 160 --eval-iters 8)
    ;;
tiny)
    vocabulary=512 mib=4 iterations=60
    MODEL=(--num-layers 2 --hidden-size 128 --ffn-hidden-size 256 --num-attention-heads 4 --seq-length 64)
    BATCH=(--micro-batch-size 8 --global-batch-size 8 --lr-warmup-iters 6 --eval-interval 30 --eval-iters 4)
    ;;
*)
    echo "regression.sh: SIZE=$size is none of full, small, tiny" >&2
    exit 2
    ;;
esac
length=${MODEL[9]}
MODEL+=(--max-position-embeddings "$length" --position-embedding-type rope --normalization RMSNorm --swiglu
    --disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0)
TRAINING=(--bf16 --train-iters "$iterations" --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --weight-decay 0.1
    --adam-beta2 0.95 --clip-grad 1.0 --log-interval 10 --log-throughput)
TOKENIZER=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$data/tokenizer.json")
TOKENS=(--data-path "$data/tokens_text_document" --split 98,2,0 --num-workers 2 "${TOKENIZER[@]}")

flags() { # flags NAME: what makes a run what it is
    local watch="--fp8-small-linears fp8 --fp8-monitor-interval $((iterations / 10))" # it is numerics that are compared
    local blockwise="--fp8-format e4m3 --fp8-recipe blockwise $watch" tensorwise="--fp8-format hybrid --fp8-recipe tensorwise $watch"
    case $1 in
    bf16) ;;
    bf16-seed2) echo "--seed 4321" ;;
    blockwise) echo "$blockwise" ;;
    tensorwise) echo "$tensorwise" ;;
    delayed) echo "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-history-len 16 --fp8-amax-compute-algo max $watch" ;;
    mxfp8) echo "--fp8-format e4m3 --fp8-recipe mxfp8 $watch" ;;
    # ablations
    weight-1d) echo "$blockwise --fp8-weight-tile 1d" ;;
    input-2d) echo "$blockwise --fp8-input-tile 2d --fp8-weight-tile 1d" ;;
    fp32-scales) echo "$blockwise --no-fp8-power-of-two-scales" ;;
    pow2-scales) echo "$tensorwise --fp8-power-of-two-scales" ;;
    hybrid) echo "--fp8-format hybrid --fp8-recipe blockwise $watch" ;;
    e4m3) echo "--fp8-format e4m3 --fp8-recipe tensorwise $watch" ;;
    fast-accumulation) echo "$tensorwise --fp8-fast-accumulation" ;; # means something on GPUs only
    fc1-fp8) echo "$blockwise --activation-func-fp8-input-store" ;;
    fp8-weights) echo "$blockwise --fp8-param-gather --use-distributed-optimizer" ;;
    *)
        echo "regression.sh: no run is called '$1'" >&2
        return 2
        ;;
    esac
}
ORDER=(bf16 bf16-seed2 blockwise tensorwise delayed mxfp8 weight-1d input-2d fp32-scales pow2-scales hybrid e4m3 fast-accumulation fc1-fp8 fp8-weights)

prepare() {
    mkdir -p "$data"
    [ -f "$data/tokenizer.json" ] ||
        python examples/regression_corpus.py --output "$data/corpus.jsonl" --max-mib "$mib" \
            --tokenizer "$data/tokenizer.json" --vocab-size "$vocabulary" | tee "$data/corpus.log"
    [ -f "$data/tokens_text_document.idx" ] || {
        python tools/preprocess_data.py --input "$data/corpus.jsonl" --output-prefix "$data/tokens" --append-eod \
            "${TOKENIZER[@]}" --log-interval 0 | tee -a "$data/corpus.log"
        sha256sum < "$data/tokens_text_document.bin" | sed 's/^\(.\{16\}\).*/tokens: digest \1/' | tee -a "$data/corpus.log"
    }
}

train_one() { # train_one NAME: every line of its log begins with that
    local name=$1 dir=$runs/$1 extra
    extra=$(flags "$name")
    if [ -f "$dir/done" ]; then
        echo "already trained: $name"
        return
    fi
    mkdir -p "$dir"
    [ -d "$dir/checkpoints" ] || rm -f "$dir"/{metrics,events,fp8_monitor}.jsonl "$dir"/events.out.* # of one cut short
    cp "$data/corpus.log" "$dir/"
    local begun=$SECONDS
    # shellcheck disable=SC2086 # a run's flags are words
    python pretrain_gpt.py "${MODEL[@]}" "${BATCH[@]}" "${TRAINING[@]}" "${TOKENS[@]}" $extra --log-dir "$dir" \
        ${MINUTES:+--exit-duration-in-mins $MINUTES --save "$dir/checkpoints" --load "$dir/checkpoints" --save-interval 100000} \
        ${EXTRA:-} 2>&1 | sed -u "s/^/$name: /"
    if tail -n 1 "$dir/metrics.jsonl" | grep -q "\"iteration\": $iterations,"; then
        touch "$dir/done"
        echo $((SECONDS - begun)) > "$dir/seconds"
    fi
}

has_time() { # whether a run would end within LIMIT seconds, as far as one knows
    local longest
    longest=$(cat "$runs"/*/seconds 2> /dev/null | sort -n | tail -n 1)
    [ -z "${LIMIT:-}" ] || [ $((SECONDS + ${longest:-0})) -le "$LIMIT" ]
}

train() { # train NAME...: JOBS at a time, each in a slot of its own; slots take turns on the GPUs
    local name slot pids=() failed=0 gpus
    gpus=$(nvidia-smi --list-gpus 2> /dev/null | wc -l || true)
    for name in "$@"; do
        flags "$name" > /dev/null
    done
    if [ ! -f "$data/corpus.log" ]; then
        echo "regression.sh: $data holds no tokens; make them with: bash examples/regression.sh prepare" >&2
        return 2
    fi
    for name in "$@"; do
        slot=$(free_slot "${pids[@]}")
        while [ "$slot" -ge "${JOBS:-$((gpus > 1 ? gpus : 1))}" ]; do
            wait -n "${pids[@]}" || failed=$?
            slot=$(free_slot "${pids[@]}")
        done
        if ! has_time && [ ! -f "$runs/$name/done" ]; then
            echo "no time left for $name"
            continue
        fi
        CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-$((gpus > 0 ? slot % gpus : 0))} train_one "$name" &
        pids[slot]=$!
    done
    for slot in "${!pids[@]}"; do
        wait "${pids[slot]}" || failed=$?
    done
    return "$failed"
}

free_slot() { # free_slot PID...: number of the first that has ended, or of a new one
    local slot=0 pid
    for pid in "$@"; do
        kill -0 "$pid" 2> /dev/null || break
        slot=$((slot + 1))
    done
    echo "$slot"
}

report() {
    local name found=() paths=() noise=() budgets=() wide
    wide="--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --micro-batch-size $((BATCH[1] / 2))"
    for name in "${ORDER[@]}"; do
        [ ! -f "$runs/$name/metrics.jsonl" ] || found+=("$name") paths+=("$runs/$name")
    done
    if [ ${#found[@]} = 0 ]; then
        echo "regression.sh: RUNS=$runs holds no run; bash examples/regression.sh train bf16 blockwise makes two" >&2
        return 2
    fi
    for name in "${found[@]}"; do
        case $name in
        bf16-seed2) noise=(--noise bf16-seed2) ;;
        blockwise) budgets+=(blockwise=0.0025) ;;
        tensorwise) budgets+=(tensorwise=0.005) ;;
        esac
    done
    python tools/compare_runs.py "${paths[@]}" --labels "${found[@]}" --output "$runs/report.html" "${noise[@]}" \
        --bytes ${GPUS:+--gpus "$GPUS" --layout "$wide"} ${budgets:+--budgets "${budgets[@]}"}
}

command=${1:-help}
shift || true
case $command in
train | flags)
    if [ $# = 0 ]; then
        echo "regression.sh: $command: give the name of a run, such as blockwise; they are ${ORDER[*]}" >&2
        exit 2
    fi
    ;;
esac
case $command in
prepare | train | report | flags) "$command" "$@" ;;
help | -h | --help) sed -n '2,23s/^# \?//p' "$0" ;;
*)
    echo "regression.sh: no command is called '$command'; give prepare, train, report, flags or help" >&2
    exit 2
    ;;
esac
