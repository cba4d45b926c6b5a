"""The README's commands, run one after another in a copy of the repository's layout.

`make` commands set up an environment of their own and take minutes: the quickstart's script is run by a slow test. So
is a block after the comment `<!-- slow -->`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from megafp8.config.compat import NOT_YET_FIELDS
from tests import forked

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
PATIENCE_S = 1800
"""A limit for what hangs, far from what the slowest machine takes for a block."""
pytestmark = pytest.mark.timeout(2 * PATIENCE_S)


class Block(NamedTuple):
    """Code between fences. name: number, and the words that lead up to it; slow: too long for `make test`."""

    name: str
    text: str
    slow: bool


def blocks(language: str, text: str = README) -> list[Block]:
    """The fenced code blocks of a language, in order, without those of `make`."""
    found = []
    fences = re.finditer(r"^(<!-- slow -->\s*\n)?```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for fence in fences:
        comment, kind, code = fence.groups()
        if kind == language and not code.startswith("make "):
            leads = re.findall(r"^(?:\*\*|#+ )([^*\n]+)", text[: fence.start()], re.MULTILINE)
            words = re.sub(r"\W+", "-", leads[-1] if leads else "").strip("-").lower()
            found.append(Block(f"{len(found) + 1:02}-{words}", code, comment is not None))
    return found


BASH, PYTHON = blocks("bash"), blocks("python")


def run_in_bash(script: str, directory: Path) -> tuple[int, str]:
    """(exit code, what it printed)"""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=directory, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=PATIENCE_S)  # fmt: skip
    return done.returncode, done.stdout


def run_in_python(argv: list[str], directory: Path) -> tuple[int, str]:
    output = directory.parent / "output.txt"
    code = forked.run(argv, output, cwd=directory, timeout=PATIENCE_S)
    return code, output.read_text()


def plain_commands(text: str) -> list[list[str]] | None:
    """The words of a block's commands, or None if it asks more of the shell than words."""
    if re.search(r"[|&;<>$`(){}*?~]|^\s*\w+=|^\s*(cd|export|source)\b", re.sub(r"'[^']*'", "", text), re.MULTILINE):
        return None
    return [words for line in text.replace("\\\n", " ").splitlines() if (words := shlex.split(line, comments=True))]


class Tour:
    """The blocks in a directory that looks like the repository; what they write stays in it."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.done, self.failed = directory, set(), None
        directory.mkdir()
        for name in ("megafp8", "kernels", "tools", "examples", "pretrain_gpt.py"):
            (directory / name).symlink_to(ROOT / name)

    def run(self, block: Block) -> None:
        """This block, and before it those that it may build on, if no test has run them yet."""
        for earlier in BASH[: BASH.index(block) + 1]:
            if earlier.name in self.done or (earlier.slow and not block.slow):
                continue
            if self.failed is not None:
                pytest.fail(f"not run: {self.failed} failed before it", pytrace=False)
            code, output = self._execute(earlier.text)
            if code != 0:
                self.failed = earlier.name
                pytest.fail(f"README block {earlier.name}: exit code {code}\n{earlier.text}\n{output}", pytrace=False)
            self.done.add(earlier.name)

    def _execute(self, text: str) -> tuple[int, str]:
        commands = plain_commands(text)
        if commands is None:
            return run_in_bash(text, self.directory)
        printed = []
        for words in commands:
            if words[0] == "python":
                code, output = run_in_python(words[1:], self.directory)
            else:
                code, output = run_in_bash(shlex.join(words), self.directory)
            printed.append(output)
            if code != 0:
                return code, "".join(printed)
        return 0, "".join(printed)


@pytest.fixture(scope="module")
def tour(tmp_path_factory) -> Tour:
    return Tour(tmp_path_factory.mktemp("readme") / "checkout")


def test_blocks_are_found_with_their_names():
    text = "## One\n```bash\na\n```\n**Two.** Words.\n\n<!-- slow -->\n\n```bash\nmake b\n```\n"
    text += "<!-- slow -->\n```bash\nc\n```\n"
    assert blocks("bash", text) == [Block("01-one", "a\n", False), Block("02-two", "c\n", True)]
    assert plain_commands("python a.py 'x|y' \\\n  --b  # why\nls\n") == [["python", "a.py", "x|y", "--b"], ["ls"]]
    assert plain_commands("A=1 python a.py\n") is plain_commands("cat x | wc\n") is plain_commands("cd x\n") is None
    assert len(BASH) >= 6
    assert PYTHON


@pytest.mark.parametrize(
    "block", [pytest.param(b, id=b.name, marks=[pytest.mark.slow] * b.slow) for b in BASH]
)  # fmt: skip
def test_commands(tour, block):
    """As a reader would paste them."""
    tour.run(block)


def test_what_the_commands_leave(tour):
    tour.run(next(block for block in reversed(BASH) if not block.slow))
    left = tour.directory / "runs" / "tour"
    assert (left / "compare.png").read_bytes().startswith(b"\x89PNG")
    assert (left / "blockwise" / "ckpt" / "latest").read_text().strip() >= "iter_0000060"


@pytest.mark.parametrize("block", PYTHON, ids=[block.name for block in PYTHON])
def test_python(tour, block):
    code, output = run_in_python(["-c", block.text], tour.directory)
    assert code == 0, f"{block.text}\n{output}"


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 8
    for link in links:
        assert link.startswith("https://") or (ROOT / link).exists(), link


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
def test_quickstart(tour):
    """The quickstart's script on this machine: its files, its loss, and its two curves."""
    code, output = run_in_bash("bash examples/quickstart.sh", tour.directory)
    assert code == 0, output
    directory = tour.directory / "runs" / "quickstart"
    for name in ("metrics.jsonl", "loss.png", "sample.txt", "evaluation.json", "checkpoints/latest"):
        assert (directory / name).is_file(), name
    (result,) = json.loads((directory / "evaluation.json").read_text()).values()
    assert result["loss"] <= 0.75 * result["unigram_entropy"]
