#!/usr/bin/env python3
"""A corpus of real text that every machine with Python has: sources and documentation of the installed packages.

    python examples/regression_corpus.py --output corpus.jsonl --max-mib 700

One JSON object a line, `{"text": ...}`, one a file; files that occur twice are taken once. The order follows from the
files' contents, so it is mixed, and the same on machines with the same packages. What a corpus holds is printed, with
the digest of it all: runs to be compared must have read the same.
"""

import argparse
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = {
    *(".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".cc", ".c", ".pyx", ".ipynb"),
    *(".html", ".js", ".toml", ".yaml", ".yml", ".cmake", ".f90", ".tex"),
}
SMALLEST, LARGEST = 200, 1 << 20  # bytes of a file: below is boilerplate, above are tables


def default_roots() -> list[Path]:
    """The standard library and what is installed beside it."""
    paths = sysconfig.get_paths()
    roots = [paths["stdlib"], paths["purelib"], paths["platlib"], *(p for p in sys.path if "packages" in p)]
    return sorted({Path(root).resolve() for root in roots if Path(root).is_dir()})


def texts(roots: list[Path]) -> Iterator[tuple[str, str]]:
    """(digest, text) of every file, each content once."""
    seen: set[str] = set()
    for root in roots:
        for path in sorted(root.rglob("*")):
            try:
                if path.suffix not in SUFFIXES or not path.is_file() or not SMALLEST <= path.stat().st_size <= LARGEST:
                    continue
                raw = path.read_bytes()
                text = raw.decode("utf-8")
            except (OSError, UnicodeDecodeError):
                continue
            digest = hashlib.sha256(raw).hexdigest()
            if digest not in seen and "\0" not in text:
                seen.add(digest)
                yield digest, text


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--max-mib", type=float, default=700, metavar="X", help="text to write at most (default: 700)")
    parser.add_argument("--roots", nargs="+", type=Path, metavar="DIR", help="directories (default: Python's own)")
    args = parser.parse_args(argv)
    found = sorted(texts(args.roots or default_roots()))
    args.output.parent.mkdir(parents=True, exist_ok=True)
    size, count, digest = 0, 0, hashlib.sha256()
    with args.output.open("w", encoding="utf-8") as stream:
        for name, text in found:
            if size + len(text) > args.max_mib * 2**20:
                break
            stream.write(json.dumps({"text": text}) + "\n")
            size, count = size + len(text), count + 1
            digest.update(name.encode())
    print(f"{count} files, {size / 2**20:.1f} MiB of text, digest {digest.hexdigest()[:16]}: {args.output}")
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
