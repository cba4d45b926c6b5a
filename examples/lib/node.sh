#!/usr/bin/env bash
# The processes of one node: environment, logs, torchrun. Started by launch.sh, on each node of the job.
#
#   node.sh SCRIPT FLAG...
set -euo pipefail
lib=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=signals.sh
. "$lib/signals.sh"
node=${SLURM_NODEID:-${NODE_RANK:-0}}

# preset NAME VALUE: what the user has set stays, and is told of.
preset() {
    if [ -z "${!1+set}" ]; then
        export "$1=$2"
    elif [ "${!1}" != "$2" ] && [ "$node" = 0 ]; then
        echo "warning: $1=${!1} is kept, these scripts take $2 (docs/launching.md)" >&2
    fi
}
preset CUDA_DEVICE_MAX_CONNECTIONS 1
preset PYTORCH_CUDA_ALLOC_CONF expandable_segments:True
preset OMP_NUM_THREADS 1
preset TORCH_DISABLE_SHARE_RDZV_TCP_STORE 1 # ranks that start again would find addresses of those that died

if [ "$NNODES" -gt 1 ]; then
    # Ranks follow the nodes' numbers, in Slurm the network's topology; c10d's rendezvous would number them itself.
    rendezvous=(--nnodes "$NNODES" --node-rank "$node" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
else
    rendezvous=(--standalone --nnodes 1)
fi

# Each rank's stdout and stderr in files of their own; of the job's first node, rank 0 also where the job writes.
logs=$RUN_DIR/logs/$LAUNCH_ID/node$node
mkdir -p "$logs"
output=(--log-dir "$logs" --redirects 3)
if [ "$node" = 0 ]; then
    output+=(--tee 0:3)
fi

run_until_signal children torchrun "${rendezvous[@]}" --nproc-per-node "$GPUS_PER_NODE" \
    --max-restarts "${MAX_RESTARTS:-0}" "${output[@]}" "$@"
