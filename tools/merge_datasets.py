#!/usr/bin/env python3
"""Join all indexed data sets of a directory into one, in the order of their names.

    python tools/merge_datasets.py --input parts/ --output-prefix data/corpus

writes data/corpus.bin and .idx.
"""

import argparse
import sys
from pathlib import Path

from megafp8.config.tool_parser import ToolParser
from megafp8.data.arguments import run
from megafp8.data.indexed import IndexedDataset, IndexedDatasetBuilder, index_path, token_path


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = ToolParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, metavar="DIR", help="directory with pairs of .bin and .idx files")
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="files are named PREFIX.bin and .idx")
    return parser.parse_args(argv)


def find_prefixes(directory: Path, output_prefix: str) -> list[Path]:
    """Prefixes of the pairs in a directory, sorted by name; the output's own pair is left out."""
    if not directory.is_dir():
        raise ValueError(f"--input {directory}: no such directory")
    files = [path for path in directory.iterdir() if path.suffix in (".bin", ".idx")]
    ours = Path(output_prefix).resolve()
    prefixes = sorted({path.with_suffix("") for path in files if path.with_suffix("").resolve() != ours})
    if not prefixes:
        raise ValueError(f"--input {directory}: no .bin and .idx files in there")
    for prefix in prefixes:
        for path in (index_path(prefix), token_path(prefix)):
            if not path.is_file():
                raise ValueError(f"--input {directory}: {path.name} is missing; complete the pair or move it away")
    return prefixes


def main(argv: list[str]) -> None:
    args = parse_args(argv)
    datasets = [IndexedDataset(prefix) for prefix in find_prefixes(Path(args.input), args.output_prefix)]
    with IndexedDatasetBuilder(args.output_prefix, datasets[0].dtype) as builder:
        for dataset in datasets:
            builder.add_dataset(dataset)
    tokens = sum(dataset.num_tokens for dataset in datasets)
    print(
        f"{args.output_prefix}.bin/.idx: {builder.num_documents} documents, {tokens} tokens "
        f"({builder.dtype}) of {len(datasets)} data sets"
    )


if __name__ == "__main__":
    sys.exit(run(main))
