"""The small files beside a Hugging Face model's weights: tokenizer and generation_config.json, copied and written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megafp8.checkpoint.hf.write import write_json
from megafp8.checkpoint.tensor_file import DamagedFileError, check_regular

KEPT = "hf"
"""Name of the directory, beside a converted model's checkpoints, that keeps the files of the model it came from."""
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json"),
)
_LARGEST = 1 << 30


def copy_companions(source: Path, target: Path, names: Sequence[str] = (*TOKENIZER_FILES, GENERATION)) -> bool:
    """Copies what there is of tokenizer and generation_config.json into the directory `target`, made if need be.

    names: of the files that are wanted.
    Returns whether a tokenizer was among it. Raises DamagedFileError for a link, or a file of absurd size.
    """
    target.mkdir(exist_ok=True)
    for name in names:
        path = source / name
        check_regular(source, name)
        if not path.exists():
            continue
        if path.stat().st_size > _LARGEST:
            raise DamagedFileError(f"{path} is larger than {_LARGEST >> 30} GiB: no {name}")
        shutil.copyfile(path, target / name)
    return bool(tokenizer_args(target))


def tokenizer_args(directory: Path) -> dict[str, Any]:
    """Fields of DataConfig for the tokenizer in a directory; empty when there is none."""
    if (directory / "tokenizer.json").is_file():
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(directory)}
    if (directory / "tokenizer.model").is_file():
        return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(directory / "tokenizer.model")}
    vocab, merges = directory / "vocab.json", directory / "merges.txt"
    if vocab.is_file() and merges.is_file():
        return {"tokenizer_type": "GPT2BPETokenizer", "vocab_file": str(vocab), "merge_file": str(merges)}
    return {}


def export_tokenizer(data: Mapping[str, Any], target: Path) -> bool:
    """Copies a run's tokenizer under the names of Hugging Face; False where there is no such form or file.

    data: tokenizer_type, tokenizer_model, vocab_file and merge_file of DataConfig, as far as given.
    """
    kind, model = data["tokenizer_type"], data.get("tokenizer_model")
    if kind == "HuggingFaceTokenizer" and model and Path(model).exists():
        return copy_companions(Path(model) if Path(model).is_dir() else Path(model).parent, target, TOKENIZER_FILES)
    files = {
        "SentencePieceTokenizer": {"tokenizer.model": model},
        "GPT2BPETokenizer": {"vocab.json": data.get("vocab_file"), "merges.txt": data.get("merge_file")},
    }.get(kind, {})
    if not files or not all(path and Path(path).is_file() for path in files.values()):
        return False
    for name, path in files.items():
        shutil.copyfile(path, target / name)
    names = {"SentencePieceTokenizer": "LlamaTokenizer", "GPT2BPETokenizer": "GPT2Tokenizer"}
    space = {"add_prefix_space": _adds_space(model)} if kind == "SentencePieceTokenizer" else {}
    write_json(target / "tokenizer_config.json", {"tokenizer_class": names[kind], **space})
    return True


def _adds_space(model: str) -> bool:
    """Whether a SentencePiece model puts a space before a text; transformers would, without being told."""
    import sentencepiece

    return sentencepiece.SentencePieceProcessor(model_file=model).encode("a", out_type=str)[0].startswith("\u2581")


def write_generation_config(config: Mapping[str, Any], target: Path) -> None:
    """Writes generation_config.json from the ids in a config.json, where none was copied."""
    if not (target / GENERATION).exists():
        ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
        write_json(target / GENERATION, {"_from_model_config": True, **ids})
