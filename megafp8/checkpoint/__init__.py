"""Checkpoints: safetensors and a JSON index, every tensor under its global name with its box; no pickle anywhere."""

from megafp8.checkpoint.background import BackgroundSaver
from megafp8.checkpoint.load import load_checkpoint
from megafp8.checkpoint.resume import (
    Found,
    check_tokenizer,
    find_checkpoint,
    find_together,
    load_found,
    select_saved,
)
from megafp8.checkpoint.rng import RandomState
from megafp8.checkpoint.save import SaveJob, SavePlans, save_checkpoint
from megafp8.checkpoint.storage import CheckpointReader, CheckpointWriter
from megafp8.checkpoint.strictness import STRICTNESS
from megafp8.checkpoint.tensor_file import DamagedFileError

__all__ = [
    "STRICTNESS",
    "BackgroundSaver",
    "CheckpointReader",
    "CheckpointWriter",
    "DamagedFileError",
    "Found",
    "RandomState",
    "SaveJob",
    "SavePlans",
    "check_tokenizer",
    "find_checkpoint",
    "find_together",
    "load_checkpoint",
    "load_found",
    "save_checkpoint",
    "select_saved",
]
