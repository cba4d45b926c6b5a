"""The experts' memory benchmark on the CPU: formulas against what lives, its table, picture and JSON."""

import json

import bench_moe_memory as bench
import pytest


def test_tiny(tmp_path, capsys):
    argv = ["--device", "cpu", "--shapes", "tiny", "--tokens", "1024", "--repeats", "1"]
    variants = ["bf16", "bf16, moe_act", "blockwise"]
    files = ["--json", str(tmp_path / "r.json"), "--png", str(tmp_path / "r.png")]
    assert bench.main([*argv, "--variants", *variants, *files]) == 0
    results = json.loads((tmp_path / "r.json").read_text())
    assert [r["variant"] for r in results] == variants
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    measured = {r["variant"]: r["measured_bytes"] for r in results}
    for r in results:  # rows between experts, numbers of rows and the router's numbers come on top
        assert r["formula_bytes"] <= r["measured_bytes"] <= 1.35 * r["formula_bytes"], r
        assert r["experts_ms"] > 0
        assert r["layer_ms"] > 0
    assert measured["blockwise"] < 0.55 * measured["bf16"]
    assert measured["bf16, moe_act"] < measured["bf16"]
    table = capsys.readouterr().out
    assert all(variant in table for variant in variants)


def test_what_cannot_be_dealt_out_is_one_line(capsys):
    assert bench.main(["--device", "cpu", "--shapes", "tiny", "--tokens", "3", "--variants", "bf16"]) == 1
    assert "3 x 2 can't be dealt out to 8 experts evenly" in capsys.readouterr().err


def test_storages_that_were_there_before_are_not_counted():
    import torch

    weight = torch.nn.Parameter(torch.zeros(100, 10))
    with bench.LiveBytes() as live:
        view = weight.detach()[:5]
        made = torch.ones(16)
        gone = torch.ones(1000)
        del gone
        assert live() == made.numel() * 4
    assert view.shape == (5, 10)


@pytest.mark.parametrize("name", bench.SHAPES)
def test_formulas_of_published_shapes(name):
    """BF16 2h + 6f to the byte; FP8 h + 2f, and scales of at most 4%."""
    import torch

    shape, cpu = bench.SHAPES[name], torch.device("cpu")
    tokens = shape.experts * 128

    def formula(variant):
        return bench.formula_bytes(bench.config_of(shape, tokens, 1, bench.VARIANTS[variant][1], "cpu"), cpu)

    assert formula("bf16") == 2 * shape.hidden + 6 * shape.ffn
    assert formula("bf16, moe_act") == 2 * shape.hidden + 4 * shape.ffn
    small = shape.hidden + 2 * shape.ffn
    assert small < formula("blockwise") <= 1.04 * small
    assert formula("blockwise, bf16 fc1 output") - formula("blockwise") == pytest.approx(2 * shape.ffn, rel=0.04)
