# shellcheck shell=bash
# A command in the background that is told of SIGUSR1 and SIGTERM, so that ranks save before they end.

# shellcheck disable=SC2034 # read by launch.sh
stopped=0

# run_until_signal self|children COMMAND...: waits for the command and returns its status. SIGUSR1 or SIGTERM to this
# shell sets stopped=1 and sends SIGUSR1 to the command itself (srun passes it on to its tasks), or to its children.
# The command ignores SIGUSR1 until it asks for it: torchrun never does (SIGTERM would give ranks 30 seconds to save,
# however large the model), and a rank that still starts is not killed by it.
run_until_signal() {
    local whom=$1 pid status
    shift
    if [ "$whom" = children ]; then
        (
            trap '' USR1
            exec "$@"
        ) &
    else
        "$@" &
    fi
    pid=$!
    trap 'stopped=1; pass_on "$whom" "$pid"' USR1 TERM
    while :; do
        status=0
        wait "$pid" || status=$? # a signal ends the wait, not the command
        kill -0 "$pid" 2>/dev/null || break
    done
    trap - USR1 TERM
    return "$status"
}

pass_on() {
    if [ "$1" = children ]; then
        pkill -USR1 -P "$2" || true
    else
        kill -USR1 "$2" || true
    fi
}
