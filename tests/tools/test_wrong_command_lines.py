"""The table of docs/working_day.md: what newcomers type gets the line that is promised there, and exit code 2."""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import preprocess_data
import pytest
import torch

import pretrain_gpt
from megafp8.data.arguments import run as run_data_tool

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "working_day.md").read_text().partition("## Wrong command lines")[2].partition("\n## ")[0]
TABLE = re.findall(r"^\| `(.+)` \| `(.+)` \|$", PAGE, re.MULTILINE)
TRAINING = shlex.split(
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --disable-bias-linear --seq-length 64 --micro-batch-size 4 --global-batch-size 8 "
    "--train-iters 1 --lr 1e-2 "
    "--bf16 --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --num-workers 0 --split 90,10,0 "
    "--data-path runs/tour/data_text_document --tokenizer-type SentencePieceTokenizer --tokenizer-model "
    "runs/tour/tok.model"
)


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    """A directory that looks like the repository's after the README's tour."""
    home = tmp_path_factory.mktemp("tour")
    for name in ("examples", "tools", "README.md"):
        (home / name).symlink_to(ROOT / name)
    runs = home / "runs" / "tour"
    (runs / "hf").mkdir(parents=True)
    (runs / "hf" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (runs / "empty.jsonl").touch()
    (runs / "tok.model").write_bytes((ROOT / "tests/assets/stories260K/tok512.model").read_bytes())
    (runs / "text.txt").write_text((ROOT / "examples/data/tinyshakespeare.txt").read_text()[:20000])
    before = Path.cwd()
    os.chdir(home)
    try:
        text = "--input runs/tour/text.txt --split-text blank-lines --output-prefix runs/tour/data --workers 1"
        tokenizer = "--tokenizer-type SentencePieceTokenizer --tokenizer-model runs/tour/tok.model --append-eod"
        assert run_data_tool(preprocess_data.main, shlex.split(f"{text} {tokenizer}")) == 0
        saving = ("--save", "runs/tour/blockwise/ckpt", "--device", "cpu")
        assert pretrain_gpt.main([*TRAINING, *saving]) == 0
        yield home
    finally:
        os.chdir(before)


def run_tool(name: str, argv: list[str]) -> int:
    tool = importlib.import_module(name)
    try:
        if name in ("preprocess_data", "train_tokenizer"):
            return run_data_tool(tool.main, argv)
        return tool.main(argv)
    except SystemExit as leaving:
        return leaving.code


def answer(command: str, capsys) -> tuple[int, str]:
    """(exit code, what stderr says); programs of ours run in this process, shell scripts in one of their own."""
    words = shlex.split(command)
    if words[0] == "pretrain_gpt.py":
        assert words[1] == "..."
        code = pretrain_gpt.main([*TRAINING, *words[2:]])
    elif words[0].startswith("tools/"):
        code = run_tool(Path(words[0]).stem, words[1:])
    else:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(["bash", "-c", command], env=os.environ | {"PATH": path}, text=True, capture_output=True)
        return done.returncode, done.stderr
    return code, capsys.readouterr().err


def test_table(tour, capsys, monkeypatch):
    """Every row: code 2 and one line on stderr that holds the promised words, before anything is trained or written."""
    monkeypatch.setattr("megafp8.training.trainer.Trainer.run", lambda self: pytest.fail("training started"))
    assert len(TABLE) >= 20
    wrong = []
    for command, promised in TABLE:
        if "--device cuda" in command and torch.cuda.is_available():
            continue
        code, error = answer(command, capsys)
        lines = [line for line in error.splitlines() if not line.startswith("INFO ")]
        if code != 2 or len(lines) != 1 or promised not in lines[0]:
            wrong.append(f"{command}\n    promised: {promised}\n    got {code}: {error}")
    assert not wrong, "\n".join(wrong)
    assert not list((tour / "runs" / "tour").glob("x*"))


def test_flags_of_other_trainers():
    """What is recommended for them exists."""
    from megafp8.config import parse
    from megafp8.config.strangers import MENDS

    known = parse.build_parser()._option_string_actions
    elsewhere = {"--nproc-per-node", "--nnodes"}
    for flag, mend in MENDS.items():
        assert f"--{flag}" not in known, f"--{flag} is one of ours: its mend is never told"
        for named in re.findall(r"--[a-z0-9-]+", mend):
            assert named in known or named in elsewhere, (flag, named)
