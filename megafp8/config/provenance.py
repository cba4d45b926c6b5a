"""What a run was made of: its args.json, with the code's commit and the versions of the libraries."""

import json
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from megafp8.config.config import Config, diff
from megafp8.config.publish import publish

PACKAGES = ("megafp8", "torch", "triton", "numpy", "safetensors")
_REPOSITORY = Path(__file__).resolve().parents[2]


def collect() -> dict[str, Any]:
    """Returns commit, library versions, Python, platform and the command line, as plain JSON types."""
    return {
        "commit": git_commit(_REPOSITORY),
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "command": sys.argv,
    }


def git_commit(directory: Path) -> str | None:
    """Returns the commit checked out in `directory`, with "-dirty" when tracked files differ from it.

    None when git is missing or the directory isn't the top of a git repository (an installed package).
    """
    if not (directory / ".git").exists():
        return None
    command = ["git", "-C", str(directory), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_args(config: Config, path: str | Path) -> None:
    """Writes args.json: the flags given, all resolved values, and where they came from. Replaces the file atomically.

    Args:
        config: the run's configuration.
        path: the file; its directory is made.
    """
    content = config.to_dict() | {"provenance": collect()}
    publish(path, json.dumps(content, indent=2) + "\n")


def read_args(path: str | Path) -> Config:
    """Returns the configuration in an args.json. Raises ValueError when it is damaged or of another version."""
    try:
        return Config.from_json(Path(path).read_text())
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no args.json of megafp8: {error}") from None


def changes(old: Config, new: Config, unremarkable: tuple[str, ...] = ()) -> list[str]:
    """Returns the lines to print on resume: one per argument that differs from the run that is resumed, but for flags
    that begin as one of `unremarkable` does."""
    return [f"changed since the checkpoint: {line}" for line in diff(old, new) if not line.startswith(unremarkable)]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
