"""The benchmark of a whole mixture, at a small size on the CPU."""

import json

from bench_moe_block import RECIPES, main


def test_small_sizes_on_the_cpu(tmp_path, capsys):
    argv = ["--device", "cpu", "--shapes", "tiny", "--rounds", "1", "--calls", "1", "--parts", "--recipes"]
    assert main([*argv, *RECIPES, "--json", str(tmp_path / "block.json")]) == 0
    lines = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("tiny")]
    results = json.loads((tmp_path / "block.json").read_text())
    assert lines == [r["recipe"] for r in results] == list(RECIPES)
    assert all(r["ms"] > 0 and r["host_ms"] > 0 and r["parts"] for r in results)
