"""The flags of a job, checked before it starts: a mistake is one line here, and pages of every rank's afterwards."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megafp8.config import parse_args  # noqa: E402 - found through the path above

try:
    if find_spec("torch") is None:
        raise ValueError(f"{sys.executable} has no torch; make venv, then source .venv/bin/activate")
    parse_args(check_files=False)
except ValueError as error:
    print(f"{os.environ.get('JOB_NAME', 'job')}: error: {error}", file=sys.stderr)
    sys.exit(2)
