"""Checks that the files which flags name exist, before anything is built."""

import sys
from glob import escape
from importlib.util import find_spec
from os.path import exists, isdir, isfile  # Path's raises an error for a name that is too long
from pathlib import Path

from megafp8.config.config import Config, flag_of
from megafp8.config.validate.limits import number

# HuggingFaceTokenizer's model may be the name of a repository instead of a path: the tokenizer itself looks for it.
TOKENIZER_FILES = {
    "GPT2BPETokenizer": ("vocab_file", "merge_file"),
    "SentencePieceTokenizer": ("tokenizer_model",),
    "TikTokenizer": ("tokenizer_model",),
}


def check_files(config: Config) -> None:
    """Checks data prefixes, tokenizer files, the checkpoint to fine-tune, and the package that --wandb-project needs.

    Raises:
        ValueError: the first one that is missing, with its flag and the mend.
    """
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for prefix in config.value(name) or ():
            if number(prefix) is None:
                _check_prefix(flag_of(name), prefix)
    for name in TOKENIZER_FILES.get(config.data.tokenizer_type, ()):
        path = Path(config.value(name))
        if not exists(path):
            raise ValueError(f"{flag_of(name)} {path}: no such file; give the tokenizer's path")
        if isdir(path):
            raise ValueError(f"{flag_of(name)} {path}: a directory; give the file of the tokenizer in it")
    project = config.logging.wandb_project
    if project and not config.train.dry_run and not _installed("wandb"):
        raise ValueError(f"--wandb-project {project}: the package wandb is not installed; pip install wandb")
    load = config.checkpoint.load
    if load and (config.checkpoint.finetune or config.train.skip_train) and not isdir(load):
        raise ValueError(f"--load {load}: no such directory; give one with a checkpoint")
    if load:
        check_no_foreign_model(load)


def _installed(package: str) -> bool:
    """Whether a package can be imported; a mere directory of its name, as W&B leaves one, is none."""
    if package in sys.modules:
        return True
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def require_checkpoints(load: str) -> None:
    """ValueError when `--load` is no directory, or a Hugging Face model: what a tool can tell before torch loads."""
    check_no_foreign_model(load)
    if not isdir(load):
        raise ValueError(f"--load {load}: no such directory; give one written by --save")


def check_no_foreign_model(load: str) -> None:
    if isfile(Path(load) / "config.json") and not any(Path(load).glob("iter_*")):
        raise ValueError(
            f"--load {load}: a Hugging Face model, not a checkpoint; tools/convert_checkpoint.py from-hf --hf {load} "
            "--save DIR makes one"
        )


def _check_prefix(flag: str, prefix: str) -> None:
    for suffix in (".bin", ".idx"):
        if prefix.endswith(suffix):
            raise ValueError(f"{flag} {prefix}: give the prefix without {suffix}: {prefix.removesuffix(suffix)}")
    near = sorted(Path(prefix).parent.glob(f"{escape(Path(prefix).name)}_*_document.idx"))
    if near and not isfile(f"{prefix}.bin"):
        raise ValueError(f"{flag} {prefix}: no such files; there is {str(near[0]).removesuffix('.idx')}")
    if isfile(prefix) and not isfile(f"{prefix}.bin"):
        raise ValueError(
            f"{flag} {prefix}: a file, not the prefix of token files; tools/preprocess_data.py --input {prefix} "
            "--output-prefix PREFIX makes them, and PREFIX_text_document goes here"
        )
    if isdir(prefix) and not isfile(f"{prefix}.bin"):
        inside = [str(index).removesuffix(".idx") for index in sorted(Path(prefix).glob("*.idx"))]
        mend = f"there is {' and '.join(inside[:3])}" if inside else "give the prefix of token files"
        raise ValueError(f"{flag} {prefix}: a directory; {mend}")
    for suffix in (".bin", ".idx"):
        if not isfile(prefix + suffix):
            raise ValueError(f"{flag} {prefix}: {prefix}{suffix} is missing; build it with tools/preprocess_data.py")
