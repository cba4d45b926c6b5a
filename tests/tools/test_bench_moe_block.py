"""The benchmark of a whole mixture, at a small size on the CPU."""

import json

import pytest
from bench_moe_block import RECIPES, main


def test_small_sizes_on_the_cpu(tmp_path, capsys):
    argv = ["--device", "cpu", "--shapes", "tiny", "--rounds", "1", "--calls", "1"]
    argv += ["--json", str(tmp_path / "block.json"), "--recipes"]
    assert main([*argv, *RECIPES]) == 0
    lines = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("tiny")]
    results = json.loads((tmp_path / "block.json").read_text())
    assert lines == [r["recipe"] for r in results] == list(RECIPES)
    assert all(r["ms"] > 0 and r["host_ms"] > 0 and not r["parts"] for r in results)
    assert main([*argv, "bf16", "--parts"]) == 0
    parts = json.loads((tmp_path / "block.json").read_text())[0]["parts"]
    assert "aten::mm" in parts
    assert list(parts.values()) == sorted(parts.values(), reverse=True)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (("--rounds", "0"), "--rounds 0: give 1 or more"),
        (("--calls", "0"), "--calls 0: give 1 or more"),
        (("--json", "/dev/null/x"), "--json /dev/null/x: can't write there; give another file"),
    ],
)
def test_mistakes_are_one_line(argv, line, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--shapes", "tiny", "--device", "cpu", *argv])
    assert capsys.readouterr().err.partition("error: ")[2] == line + "\n"
