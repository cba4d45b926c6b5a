"""The benchmark of experts, at a small size on the CPU."""

import json

import bench_moe_memory
import pytest
from bench_moe import main, uneven


def test_small_sizes_on_the_cpu(tmp_path, capsys):
    argv = "--device cpu --hidden 256 --ffn 128 --rows 200 --experts 4 --repeats 1 --fresh-weights --recipes"
    recipes = ["bf16", "blockwise", "mxfp8", "tensorwise"]
    assert main([*argv.split(), *recipes, "--json", str(tmp_path / "moe.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["recipe", *recipes]
    results = json.loads((tmp_path / "moe.json").read_text())["results"]
    assert all(result["ms"] > result["forward_ms"] > 0 for result in results)


def test_experts_have_uneven_rows():
    counts = uneven(32768, 8)
    assert sum(counts) == 32768
    assert max(counts) > 2 * min(counts)
    assert all(count % 2 for count in counts[:-1])


def test_what_travelling_costs(tmp_path, capsys):
    argv = "--device cpu --hidden 256 --rows 64 --repeats 1 --wire --parts"
    assert main([*argv.split(), "--json", str(tmp_path / "wire.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("bf16")[0].strip() for line in lines if "break even" in line] == ["to experts", "gradients"]
    results = json.loads((tmp_path / "wire.json").read_text())["results"]
    for result in results:
        assert result["saved"] == 64 * (256 - 256 // 32)  # a byte a value, and four of scale for 128
        assert len(result["fp8_parts"]) > len(result["bf16_parts"]) > 0


@pytest.mark.parametrize("tool", [main, bench_moe_memory.main], ids=["bench_moe", "bench_moe_memory"])
def test_mistakes_are_one_line(tool, capsys):
    for argv, line in (
        (["--repeats", "-1"], f"--repeats -1: give {int(tool is main)} or more"),
        (["--json", "/dev/null/x"], "--json /dev/null/x: can't write there; give another file"),
    ):
        with pytest.raises(SystemExit, match="2"):
            tool(["--device", "cpu", *argv])
        assert capsys.readouterr().err.partition("error: ")[2] == line + "\n"
