"""examples/regression.sh: every run has flags that pretrain_gpt.py takes, and the corpus is the same each time."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from megafp8.config import parse_args
from tests.training.runs import flags

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "regression.sh"
NAMES = re.search(r"^ORDER=\((.*)\)$", SCRIPT.read_text(), re.MULTILINE).group(1).split()


@pytest.mark.parametrize("name", NAMES)
def test_flags_of_every_run_are_taken(name, tmp_path):
    words = subprocess.run(["bash", SCRIPT, "flags", name], capture_output=True, text=True, check=True).stdout.split()
    argv = flags(tmp_path / "no-data", "--bf16", "--log-dir", str(tmp_path), "--device", "auto", *words)
    config = parse_args(argv, env={}, check_files=False)
    assert config.fp8.enabled == (not name.startswith("bf16"))
    assert not [note for note in config.notes if "no effect" in note]


def test_an_unknown_run_is_told():
    done = subprocess.run(["bash", SCRIPT, "train", "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no run is called 'nothing'" in done.stderr


def test_the_corpus_takes_each_text_once_in_the_same_order(tmp_path):
    for name, text in {
        "a.py": "x" * 300,
        "b/c.md": "y" * 300,
        "b/d.txt": "x" * 300,
        "e.bin": "z" * 300,
        "f.py": "s",
    }.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(text)
    texts = []
    for output in (tmp_path / "1.jsonl", tmp_path / "2.jsonl"):
        command = [
            "python3",
            ROOT / "examples" / "regression_corpus.py",
            "--output",
            output,
            "--roots",
            tmp_path / "in",
        ]
        subprocess.run(command, check=True, capture_output=True)
        texts.append([json.loads(line)["text"] for line in output.read_text().splitlines()])
    assert texts[0] == texts[1]
    assert sorted(texts[0]) == ["x" * 300, "y" * 300]
