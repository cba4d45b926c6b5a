"""Files that are replaced in one step, so that a reader never sees half of one."""

import os
from pathlib import Path


def publish(path: str | Path, content: str | bytes) -> None:
    """Writes a file, in place of the one that is there; its directory is made. Raises OSError, and leaves no trace."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
