#!/usr/bin/env python3
"""A corpus of real text that every machine with Python has: sources and documentation of the installed packages.

    python examples/regression_corpus.py --output corpus.jsonl --max-mib 540 --tokenizer tokenizer.json

One JSON object a line, `{"text": ...}`, one a file; files that occur twice are taken once. The order follows from the
files' contents, so it is mixed, and the same on machines with the same packages. What a corpus holds is printed, with
the digest of it all: runs to be compared must have read the same. With --tokenizer a byte-level BPE vocabulary is
trained on its beginning, for --tokenizer-type HuggingFaceTokenizer; the same text gives the same one.
"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

SUFFIXES = {
    *(".py", ".pyi", ".md", ".rst", ".txt", ".h", ".hpp", ".cuh", ".cu", ".cpp", ".cc", ".c", ".pyx", ".ipynb"),
    *(".html", ".js", ".toml", ".yaml", ".yml", ".cmake", ".f90", ".tex"),
}
SMALLEST, LARGEST = 200, 1 << 20  # bytes of a file: below is boilerplate, above are tables
HEADERS = ("/usr/include", "/usr/local/include", "/usr/local/cuda/include")
VOCABULARY_BYTES = 16 << 20  # of text that a vocabulary is trained on


def default_roots() -> list[Path]:
    """The standard library, what is installed beside it, and the system's C headers."""
    paths = sysconfig.get_paths()
    roots = [paths["stdlib"], paths["purelib"], paths["platlib"], *(p for p in sys.path if "packages" in p), *HEADERS]
    return sorted({Path(root).resolve() for root in roots if Path(root).is_dir()})


def candidates(root: Path) -> Iterator[str]:
    """Files by name; not those that an editable install writes, which hold paths of this machine."""
    for directory, _, names in os.walk(root):
        for name in names:
            if os.path.splitext(name)[1] in SUFFIXES and not name.startswith("__editable__"):
                yield os.path.join(directory, name)


def read(path: str) -> tuple[str, int, bytes] | None:
    """(digest, characters, line for the corpus) of a file; None where it is no text of the wanted size."""
    try:
        if not os.path.isfile(path) or not SMALLEST <= os.path.getsize(path) <= LARGEST:
            return None
        raw = Path(path).read_bytes()
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    if "\0" in text:
        return None
    return hashlib.sha256(raw).hexdigest(), len(text), json.dumps({"text": text}).encode() + b"\n"


def read_all(roots: list[Path], workers: int) -> list[tuple[str, int, bytes]]:
    """Every file's, each content once, in the order of the digests."""
    paths = [path for root in roots for path in candidates(root)]
    with ProcessPoolExecutor(workers) as pool:
        found = {item[0]: item for item in pool.map(read, paths, chunksize=64) if item is not None}
    return [found[digest] for digest in sorted(found)]


def train_tokenizer(lines: list[bytes], vocabulary: int, output: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    bytes_first = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=["<|endoftext|>"], initial_alphabet=bytes_first, show_progress=False
    )
    tokenizer.train_from_iterator((json.loads(line)["text"] for line in lines), trainer)
    tokenizer.save(str(output))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--max-mib", type=float, default=540, metavar="X", help="text to write at most (default: 540)")
    parser.add_argument("--roots", nargs="+", type=Path, metavar="DIR", help="directories (default: Python's own)")
    parser.add_argument("--tokenizer", type=Path, metavar="FILE.json", help="train a vocabulary, too")
    parser.add_argument("--vocab-size", type=int, default=8192, metavar="N", help="of --tokenizer (default: 8192)")
    args = parser.parse_args(argv)
    workers = len(os.sched_getaffinity(0))
    found = read_all(args.roots or default_roots(), workers)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    size, count, digest, sample = 0, 0, hashlib.sha256(), []
    with args.output.open("wb") as stream:
        for name, characters, line in found:
            if size + characters > args.max_mib * 2**20:
                break
            stream.write(line)
            if size < VOCABULARY_BYTES:
                sample.append(line)
            size, count = size + characters, count + 1
            digest.update(name.encode())
    of_all = f"{len(found)} files, {size / 2**20:.1f} of {sum(item[1] for item in found) / 2**20:.1f} MiB of text"
    print(f"{count} of {of_all}, digest {digest.hexdigest()[:16]}: {args.output}")
    if count and args.tokenizer:
        train_tokenizer(sample, args.vocab_size, args.tokenizer)
    return 0 if count else 1


if __name__ == "__main__":
    sys.exit(main())
