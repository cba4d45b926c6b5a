# shellcheck shell=bash
# Starts a job on one node or on many. The scripts in examples/ source it; docs/launching.md explains its variables.
#
#   job NAME NODES GPUS      sizes of the job, which the environment and Slurm override; sets RUN_DIR, WORLD
#   data VOCABULARY          sets the array DATA: the user's files, or generated tokens of a model's vocabulary
#   launch FLAG...           trains with these flags; DRY_RUN=1: shows what the flags would run, without a GPU;
#                            ONE_RANK=R: runs rank R of the job alone, and compares it with the plan (docs/scaling.md)

lib=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$lib/../.." && pwd)
# shellcheck source=signals.sh
. "$lib/signals.sh"

# shellcheck disable=SC2034 # the scripts in examples/ read RUN and PRECISION_FLAGS
job() {
    JOB_NAME=$1
    NNODES=${SLURM_JOB_NUM_NODES:-${NNODES:-$2}}
    # Slurm names the GPUs of this node alone; all nodes are alike.
    GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-$3}}
    if ! [[ $NNODES =~ ^[1-9][0-9]*$ && $GPUS_PER_NODE =~ ^[1-9][0-9]*$ ]]; then
        echo "$JOB_NAME: NNODES=$NNODES, GPUS_PER_NODE=$GPUS_PER_NODE: give numbers, 1 or more" >&2
        exit 2
    fi
    WORLD=$((NNODES * GPUS_PER_NODE))
    RUN_DIR=${RUN_DIR:-$root/runs/$JOB_NAME}
    RUN=(--log-dir "$RUN_DIR" --save "$RUN_DIR/checkpoints" --load "$RUN_DIR/checkpoints")
    if [ -n "${ONE_RANK:-}" ]; then
        if ! [[ $ONE_RANK =~ ^[0-9]{1,9}$ ]] || ((10#$ONE_RANK >= WORLD)); then
            echo "$JOB_NAME: ONE_RANK=$ONE_RANK is no rank of a job of $WORLD; give 0 to $((WORLD - 1))" >&2
            exit 2
        fi
        RUN=(--fake-process-group)
    fi
    case ${PRECISION:-fp8} in
        fp8) PRECISION_FLAGS=(--bf16 --fp8-format e4m3 --fp8-recipe blockwise --fp8-param-gather) ;;
        bf16) PRECISION_FLAGS=(--bf16) ;;
        *)
            echo "$JOB_NAME: PRECISION=$PRECISION is neither fp8 nor bf16" >&2
            exit 2
            ;;
    esac
    export NNODES GPUS_PER_NODE RUN_DIR
}

# Without DATA_PATH: tokens made up, of the right vocabulary. NullTokenizer adds the end of a document, hence the - 1.
data() {
    if [ -z "${DATA_PATH:-}" ]; then
        DATA=(--mock-data --tokenizer-type NullTokenizer --vocab-size $(($1 - 1)))
        return
    fi
    DATA=(--data-path "$DATA_PATH" --split "${SPLIT:-99,1,0}"
        --tokenizer-type "${TOKENIZER_TYPE:-HuggingFaceTokenizer}")
    if [ -n "${TOKENIZER_MODEL:-}" ]; then
        DATA+=(--tokenizer-model "$TOKENIZER_MODEL")
    fi
}

launch() {
    if [ "${DRY_RUN:-0}" != 0 ]; then
        echo "$JOB_NAME: $NNODES node(s) of $GPUS_PER_NODE processes, run in $RUN_DIR"
        WORLD_SIZE=$WORLD exec "${PYTHON:-python}" "$root/pretrain_gpt.py" "$@" --dry-run
    fi
    if [ -n "${ONE_RANK:-}" ]; then
        export WORLD_SIZE=$WORLD RANK=$ONE_RANK LOCAL_RANK=0
        export PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}
        exec "${PYTHON:-python}" "$root/pretrain_gpt.py" "$@"
    fi
    JOB_NAME=$JOB_NAME WORLD_SIZE=$WORLD "${PYTHON:-python}" "$lib/check_flags.py" "$@" || exit 2
    mkdir -p "$RUN_DIR"
    if [ -n "${SLURM_JOB_ID:-}" ]; then
        launch_slurm "$@"
    elif [ "$NNODES" -gt 1 ] && { [ -z "${NODE_RANK:-}" ] || [ -z "${MASTER_ADDR:-}" ]; }; then
        echo "$JOB_NAME: $NNODES nodes need Slurm (sbatch), or on each node NODE_RANK=0, 1, ... and MASTER_ADDR=HOST" >&2
        exit 2
    else
        LAUNCH_ID=${LAUNCH_ID:-$(date +%Y%m%d-%H%M%S)} exec bash "$lib/node.sh" "$root/pretrain_gpt.py" "$@"
    fi
}

# In the batch script, which runs on the allocation's first node: one task a node, each of which runs torchrun.
launch_slurm() {
    local hosts status=0
    if [ -z "${MASTER_ADDR:-}" ]; then
        hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
        MASTER_ADDR=${hosts%%$'\n'*}
    fi
    MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))} # jobs that share a node: each its own
    LAUNCH_ID=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
    export MASTER_ADDR MASTER_PORT LAUNCH_ID
    unset NODE_RANK # a task's SLURM_NODEID counts
    run_until_signal "self" srun --nodes "$NNODES" --ntasks "$NNODES" --ntasks-per-node 1 --kill-on-bad-exit=1 \
        bash "$lib/node.sh" "$root/pretrain_gpt.py" "$@" || status=$?
    # #SBATCH --signal says that time is up: the ranks have saved, and the same job goes on from there.
    if [ "$stopped" = 1 ] && [ "$status" != 0 ]; then
        echo "$JOB_NAME: stopped by a signal and saved; requeued as job $SLURM_JOB_ID"
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$status"
}
