"""Configuration: frozen dataclasses, flags generated from their fields, one place for cross-checks.

config = parse_args(["--num-layers", "2", ...])     # ValueError: one line with flag, value and mend
config.model.hidden_size, config.optimizer.lr, config.fp8.fp8_recipe
"""

from megafp8.config.checkpoint import CheckpointConfig
from megafp8.config.config import Config, diff
from megafp8.config.data import DataConfig
from megafp8.config.fp8 import FP8Config
from megafp8.config.logging import LoggingConfig
from megafp8.config.model import ModelConfig
from megafp8.config.optimizer import OptimizerConfig
from megafp8.config.parallel import ParallelConfig
from megafp8.config.parse import build_config, build_parser, parse_args
from megafp8.config.provenance import changes, read_args, write_args
from megafp8.config.resolve import with_vocab_size
from megafp8.config.train import TrainConfig

__all__ = [
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "FP8Config",
    "LoggingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "TrainConfig",
    "build_config",
    "build_parser",
    "changes",
    "diff",
    "parse_args",
    "read_args",
    "with_vocab_size",
    "write_args",
]
