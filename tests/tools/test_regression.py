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


@pytest.mark.parametrize("command", ["flags", "train"])
def test_a_run_without_a_name_is_told(command):
    done = subprocess.run(["bash", SCRIPT, command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"regression.sh: {command}: give the name of a run, such as blockwise; they are bf16")
    assert done.stderr.count("\n") == 1


PYTHON = """#!/usr/bin/env bash
while [ $# -gt 0 ]; do [ "$1" = --log-dir ] && directory=$2; shift; done
[ "$(basename "$directory")" = blockwise ] || until [ -f "$directory/../blockwise/metrics.jsonl" ]; do sleep 0.02; done
[ "$(basename "$directory")" = mxfp8 ] && exit 3
echo "on GPU $CUDA_VISIBLE_DEVICES"
echo '{"iteration": 60, "valid_loss": 1}' > "$directory/metrics.jsonl"
"""


def test_runs_share_the_gpus(tmp_path):
    """Two at a time on two GPUs, the next where one has ended; a failure stops no other run, and is told at the end."""
    bin_dir, data = tmp_path / "bin", tmp_path / "data"
    bin_dir.mkdir()
    data.mkdir()
    (data / "corpus.log").write_text("the corpus\n")
    for name, text in (("python", PYTHON), ("nvidia-smi", "#!/usr/bin/env bash\necho GPU 0\necho GPU 1\n")):
        (bin_dir / name).write_text(text)
        (bin_dir / name).chmod(0o755)
    env = {"PATH": f"{bin_dir}:/usr/bin:/bin", "SIZE": "tiny", "RUNS": str(tmp_path)}
    names = ["bf16", "blockwise", "mxfp8", "tensorwise"]
    done = subprocess.run(["bash", SCRIPT, "train", *names], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "blockwise: on GPU 1" in done.stdout.splitlines(), done.stdout + done.stderr
    assert [name for name in names if (tmp_path / name / "done").is_file()] == ["bf16", "blockwise", "tensorwise"]
    assert (tmp_path / "bf16" / "corpus.log").read_text() == "the corpus\n"
    again = subprocess.run(["bash", SCRIPT, "train", *names[:2]], env=env, capture_output=True, text=True, check=True)
    assert sorted(again.stdout.splitlines()) == ["already trained: bf16", "already trained: blockwise"]
    longest = env | {"LIMIT": "60"}
    (tmp_path / "bf16" / "seconds").write_text("100\n")
    late = subprocess.run(["bash", SCRIPT, "train", "delayed"], env=longest, capture_output=True, text=True, check=True)
    assert late.stdout == "no time left for delayed\n"


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
