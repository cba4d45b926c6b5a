#!/usr/bin/env bash
# Every figure of docs/conversions.md and of whole steps on the GPU that is here, in about eight minutes.
#
#   bash tools/bench_step_all.sh OUT      OUT: directory for JSON, pictures and tables
set -uo pipefail
out=${1:?usage: tools/bench_step_all.sh OUT}
mkdir -p "$out"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

run() { # NAME SECONDS ARG...: one call of bench_step; a failure or a lack of time doesn't stop the others
    local name=$1 seconds=$2 start=$SECONDS
    shift 2
    echo "== $name: bench_step.py $*"
    timeout "$seconds" python tools/bench_step.py --output "$out/$name.json" "$@" 2>"$out/$name.err" | tee "$out/$name.txt"
    local code=${PIPESTATUS[0]}
    [ "$code" = 0 ] || { echo "$name: exit code $code"; tail -3 "$out/$name.err"; }
    echo "== $name took $((SECONDS - start)) s"
}

FP8=("blockwise" "tensorwise") # what matters most comes first
# A run that is cut short leaves no figures, and the first ones compile kernels: their limits are far off.
run layers 300 --scopes layers --recipes bf16 "${FP8[@]}" delayed --png "$out/layers.png"
run step 200 --scopes step --recipes bf16 "${FP8[@]}" "blockwise, FP8 weights" "tensorwise, FP8 weights" --rounds 7 \
    --png "$out/step.png"
run deepseek-v3 60 --preset deepseek-v3 --scopes layers --recipes bf16 blockwise --no-compile --rounds 7
run qwen3-30b-a3b 70 --preset qwen3-30b-a3b --scopes layers --recipes bf16 blockwise --no-compile --rounds 5
run layers-bf16-gradients 60 --scopes layers --gradients bf16 --recipes bf16 "${FP8[@]}" --rounds 7 --no-compile
echo "== crossover"
timeout 120 python tools/bench_step.py --crossover "$out/crossover.json" --rounds 3 2>"$out/crossover.err" |
    tee "$out/crossover.txt"
run llama3-70b 60 --preset llama3-70b --scopes layers --recipes bf16 "${FP8[@]}" --no-compile --rounds 7
for count in 4 64; do
    run "microbatches-$count" 60 --scopes step --recipes bf16 blockwise --microbatches $count --rounds 2 --warmup 1 \
        --flags "--num-layers 2 --seq-length 2048 --micro-batch-size 1 --vocab-size 32767"
done
for length in 2048 32768; do
    run "length-$length" 45 --scopes layers --recipes bf16 "${FP8[@]}" --no-compile --rounds 5 \
        --flags "--seq-length $length --micro-batch-size $((length < 8192 ? 8192 / length : 1)) --num-layers 3"
done
