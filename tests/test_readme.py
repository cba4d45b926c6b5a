"""The README's commands, run one after another in a copy of the repository's layout.

`make` commands set up an environment of their own and take minutes: the quickstart's script is run by a slow test.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megafp8.config.compat import NOT_YET_FIELDS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    """The README's fenced code blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A directory that looks like the repository; what commands write stays in it."""
    directory = tmp_path_factory.mktemp("checkout")
    for name in ("megafp8", "kernels", "tools", "examples", "pretrain_gpt.py"):
        (directory / name).symlink_to(ROOT / name)
    return directory


def run(script: list[str], directory: Path, timeout: float) -> subprocess.CompletedProcess:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, cwd=directory, env=env, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{script[-1]}\n{done.stdout}\n{done.stderr}"
    return done


def test_every_command(checkout):
    """All bash blocks but `make`'s, as a reader would paste them."""
    commands = [block for block in blocks("bash") if not block.startswith("make ")]
    assert len(commands) >= 6
    for block in commands:
        run(["bash", "-euo", "pipefail", "-c", block], checkout, timeout=240)
    tour = checkout / "runs" / "tour"
    assert (tour / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert (tour / "blockwise" / "ckpt" / "latest").read_text().strip() == "iter_0000060"


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 8
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_python_blocks(checkout):
    for block in blocks("python"):
        run([sys.executable, "-c", block], checkout, timeout=120)


def test_what_is_missing_is_what_the_flags_refuse():
    sentences = re.findall(r"^- Not yet, [^:]*: (.*?)\.", README, re.MULTILINE | re.DOTALL)
    named = {feature for sentence in sentences for feature in " ".join(sentence.split()).split(", ")}
    assert named == {field.feature for field in NOT_YET_FIELDS}


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = re.findall(r"\bmake ([a-z-]+)", README)
    assert {"quickstart", "test", "venv"} <= set(named)
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_quickstart(checkout):
    """The quickstart's script on this machine: its files, its loss, and its two curves."""
    import json

    run(["bash", "examples/quickstart.sh"], checkout, timeout=1700)
    directory = checkout / "runs" / "quickstart"
    for name in ("metrics.jsonl", "loss.png", "sample.txt", "evaluation.json", "checkpoints/latest"):
        assert (directory / name).is_file(), name
    (result,) = json.loads((directory / "evaluation.json").read_text()).values()
    assert result["loss"] <= 0.75 * result["unigram_entropy"]
