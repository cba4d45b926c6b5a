"""Checkpoints: safetensors and a JSON index, every tensor under its global name with its box; no pickle anywhere."""

from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.resume import Found, check_tokenizer, find_checkpoint, load_found, select_saved
from megafp8.checkpoint.rng import RandomState
from megafp8.checkpoint.save import save_checkpoint
from megafp8.checkpoint.tensor_file import DamagedFileError

__all__ = [
    "DamagedFileError",
    "Found",
    "RandomState",
    "check_tokenizer",
    "find_checkpoint",
    "load_checkpoint",
    "load_found",
    "save_checkpoint",
    "select_saved",
]
