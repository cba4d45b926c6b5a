"""The commands of docs/conversion.md, one after another, and the families it lists."""

import importlib
import re
import shlex
from pathlib import Path

import pytest

from megafp8.checkpoint.hf import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "conversion.md").read_text()


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def test_every_command(tmp_path, monkeypatch, capfd):
    """Run in this process, each through its script's `main`, in a directory that looks like the repository."""
    pytest.importorskip("transformers")
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    assert len(commands()) == 12
    for python, script, *argv in commands():
        assert python == "python"
        assert (ROOT / script).is_file(), script
        assert not importlib.import_module(Path(script).stem).main(argv), (script, argv)
    out = capfd.readouterr().out
    assert "32 tensors, all the same" in out
    assert "within 0.0001" in out
    assert re.search(r"\d+ of 35 weights quantized again", out)


def test_every_family_is_listed():
    assert set(re.findall(r"^\| [^|`]+ \| `(\w+)` \|", PAGE, re.MULTILINE)) - {"model_type"} == set(FAMILIES)
