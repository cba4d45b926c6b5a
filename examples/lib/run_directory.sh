# shellcheck shell=bash
# run_directory USAGE DEFAULT [DIR]: prints where a script's run goes; exit code 2 for a flag in its place.
#   USAGE: how the script is called, from its path on, such as "examples/quickstart.sh [DIR]"
run_directory() {
    case ${3:-} in
    -*)
        echo "$(basename "${1%% *}" .sh): unknown flag $3; give a directory, or nothing: bash $1" >&2
        exit 2
        ;;
    esac
    echo "${3:-$2}"
}
