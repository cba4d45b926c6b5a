"""Small real runs for the tests: a corpus of bytes, a command line, and what a run leaves behind."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

import pretrain_gpt
from megafp8.data import IndexedDatasetBuilder
from megafp8.training.run_log import read_metrics

TEXT = Path(__file__).resolve().parents[2] / "examples" / "data" / "tinyshakespeare.txt"
EOD = 256  # ByteTokenizer's

RECIPES = {
    "fp32": (),
    "bf16": ("--bf16",),
    "tensorwise": ("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    "blockwise": ("--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "blockwise"),
    "mxfp8": ("--bf16", "--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"),
    "delayed": (
        *("--bf16", "--fp8-format", "hybrid", "--fp8-recipe", "delayed"),
        *("--fp8-amax-history-len", "4", "--fp8-amax-compute-algo", "max"),
    ),
}


def write_corpus(directory: Path, documents: int = 40, length: int = 400) -> Path:
    """Shakespeare's bytes as `documents` documents in Megatron's format; returns the prefix."""
    text = TEXT.read_bytes()
    prefix = directory / "corpus"
    with IndexedDatasetBuilder(prefix, np.uint16) as builder:
        for i in range(documents):
            builder.add_document(np.array([*text[i * length : (i + 1) * length], EOD]))
    return prefix


def flags(prefix: Path, *extra: str) -> list[str]:
    """A tiny model's command line; later flags win."""
    return [
        *("--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "48", "--num-attention-heads", "4"),
        *("--seq-length", "32", "--max-position-embeddings", "32", "--position-embedding-type", "rope"),
        *("--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear", "--make-vocab-size-divisible-by", "8"),
        *("--micro-batch-size", "2", "--global-batch-size", "4", "--train-iters", "20", "--seed", "7"),
        *("--lr", "3e-3", "--lr-decay-style", "cosine", "--lr-warmup-iters", "3", "--min-lr", "1e-4"),
        *("--attention-dropout", "0", "--hidden-dropout", "0", "--eval-interval", "10", "--eval-iters", "2"),
        *("--data-path", str(prefix), "--split", "80,20,0", "--tokenizer-type", "ByteTokenizer"),
        *("--num-workers", "0", "--log-interval", "5", "--device", "cpu", *extra),
    ]


def run(*argv: str) -> int:
    """pretrain_gpt.py in this process; returns its exit code."""
    return pretrain_gpt.main([str(a) for a in argv])


def _run_and_exit(argv: list[str]) -> None:
    torch.set_num_threads(1)
    raise SystemExit(run(*argv))


def run_in_new_process(*argv: str) -> int:
    """The same in a process of its own: nothing of this one's random or module state can help it."""
    process = multiprocessing.get_context("fork").Process(target=_run_and_exit, args=(list(argv),))
    process.start()
    process.join()
    return process.exitcode


TIMES = (
    *("elapsed_ms", "tokens_per_second", "tflops_per_gpu", "mfu", "max_memory_gib"),
    *("data_ms", "compute_ms_max", "compute_ms_median", "slowest_rank"),
)


def metrics(directory: Path) -> tuple[list[dict], list[dict]]:
    """(training, validation) lines without the numbers that depend on the clock or the machine."""
    training, validation = read_metrics(directory)
    return [{k: v for k, v in line.items() if k not in TIMES} for line in training], validation


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by global name."""
    found = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - safe_open is no dict
                assert key not in found
                found[key] = opened.get_tensor(key)
    return found
