#!/usr/bin/env bash
# Makes the virtual environment DIR with megafp8 installed (editable). Safe to run again.
#
#   PYTHON=python3.12 tools/make_venv.sh [DIR]        DIR defaults to .venv
#
# Where $PYTHON already has a torch that sees a CUDA GPU, that torch and its neighbours are used as they are (a link
# to their site-packages) and nothing is downloaded; elsewhere the pinned versions of constraints.txt are installed.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=${1:-.venv}
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "make venv: $("$python" --version 2>&1) is too old: megafp8 needs Python 3.11 or newer; say PYTHON=python3.11" >&2
    exit 2
fi

has_cuda() { "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }

if has_cuda; then
    echo "make venv: using the torch of $("$python" -c 'import sys; print(sys.executable)')"
    [ -x "$dir/bin/python" ] || "$python" -m venv --without-pip "$dir"
    site=$("$dir/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import site, sysconfig; print(sysconfig.get_path("purelib"))' > "$site/host.pth"
    # The host's setuptools builds the editable install, so no network is needed.
    "$dir/bin/python" -m pip install --quiet --no-deps --no-build-isolation --no-index --editable . ||
        { echo "make venv: the editable install failed; is setuptools installed beside torch?" >&2; exit 1; }
else
    [ -x "$dir/bin/python" ] || "$python" -m venv "$dir"
    echo "make venv: installing the pinned packages of constraints.txt (some minutes the first time)"
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[all]'
    # Only its dataset reader and schedules are compared with, which need none of its dependencies.
    "$dir/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps megatron-core==0.16.1 ||
        echo "make venv: megatron-core is not to be had; the tests that compare with it will be skipped"
fi
