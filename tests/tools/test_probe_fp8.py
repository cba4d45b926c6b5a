"""The probe: what it emulates is what FP8 linears do, it finds the bad linear, and its flags keep the budget."""

import json
import math

import probe_fp8
import pytest
import torch

from megafp8.config import crossover
from megafp8.fp8 import Linear, get_recipe
from megafp8.training.inference import load_trained
from megafp8.training.probe import Emulated, Probe, keep_within, outlier_error
from megafp8.training.probe_report import flags_file
from tests.training.runs import flags, metrics, run, write_corpus

BAD = "layers.1.mlp.fc1"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small model after some training in BF16: (directory, prefix of its data)."""
    directory = tmp_path_factory.mktemp("trained")
    prefix = write_corpus(directory, documents=80)
    argv = flags(prefix, "--bf16", "--train-iters", "12", "--eval-iters", "0", "--lr", "1e-2")
    assert run(*argv, "--save", str(directory / "c")) == 0
    return directory, prefix


def batches(model, count=1):
    from megafp8.data import MaskOptions, make_batch

    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(256, (33,), generator=generator).numpy() for _ in range(2 * count)]
    return [make_batch(samples[2 * i : 2 * i + 2], 32, MaskOptions()) for i in range(count)]


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "mxfp8"])
def test_an_emulated_linear_is_an_fp8_linear(recipe):
    generator = torch.Generator().manual_seed(0)
    recipe = get_recipe(recipe)
    linear = Linear(160, 96, bias=True, recipe=recipe, params_dtype=torch.bfloat16)
    x = torch.randn(200, 160, generator=generator).bfloat16().requires_grad_()
    dy = torch.randn(200, 96, generator=generator).bfloat16()
    leaves = (x, linear.weight, linear.bias)
    real = linear(x)
    real_grads = torch.autograd.grad(real, leaves, dy)
    mine = Emulated.apply(x, linear.weight, linear.bias, recipe, ("input", "weight", "grad_output"))
    grads = torch.autograd.grad(mine, leaves, dy)
    for a, b in zip((mine, *grads), (real, *real_grads), strict=True):
        assert (a.float() - b.float()).norm() <= 2e-3 * b.float().norm()
    alone = Emulated.apply(x, linear.weight, linear.bias, recipe, ())
    assert torch.equal(
        alone, torch.nn.functional.linear(x.float(), linear.weight.float(), linear.bias.float()).bfloat16()
    )


def test_the_linear_that_does_not_bear_fp8_is_found_and_kept(trained):
    """One huge weight that meets a channel without input: under one scale a tensor, all others round to zero."""
    model = load_trained(trained[0] / "c", torch.device("cpu")).model
    recipes = [get_recipe("tensorwise"), get_recipe("blockwise")]
    probe = Probe(model, batches(model), recipes)
    with torch.no_grad():
        probe.linears[BAD].weight[0, 0] = 3e4
        next(p for p in model.parameters() if p.spec.name == "layers.1.mlp_norm.weight")[0] = 0
    probe = Probe(model, probe.batches, recipes)
    effects = {name: probe.measure({name: recipes[0]}) for name in probe.linears}
    worst = max(effects, key=lambda name: effects[name].output_error)
    assert worst == BAD
    assert effects[BAD].cosine < min(effect.cosine for name, effect in effects.items() if name != BAD)
    ranking = sorted(effects, key=lambda name: -abs(effects[name].loss - probe.base.loss))
    whole = probe.measure(dict.fromkeys(probe.linears, recipes[0]), with_cosine=False).loss / probe.base.loss - 1
    kept, gap = keep_within(probe, recipes[0], ranking, abs(whole) / 2)
    assert kept
    assert abs(gap) <= abs(whole) / 2
    by_role = probe.measure({BAD: recipes[0]}, ("weight",))
    assert by_role.output_error > 5 * probe.measure({BAD: recipes[0]}, ("input",)).output_error
    assert probe.measure({BAD: recipes[0]}, ("grad_output",)).output_error == 0
    assert probe.measure({}, None).cosine == pytest.approx(1.0, abs=1e-12), "nothing has changed the model"


def test_an_outlier_channel_drowns_small_neighbours_under_one_scale():
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(64, 256, generator=generator), torch.randn(32, 256, generator=generator)
    x[:, 1:] *= torch.logspace(-3, 0, 255)
    errors = {n: outlier_error(x, weight, get_recipe(n), 1e5) for n in ("tensorwise", "blockwise", "mxfp8")}
    assert errors["tensorwise"] > errors["blockwise"] > 0
    assert math.isclose(errors["mxfp8"], outlier_error(x, weight, get_recipe("mxfp8"), 1.0), rel_tol=0.1)


def test_the_flags_file_keeps_the_budget(trained, tmp_path, capsys):
    """From the checkpoint to a file of flags, which pretrain_gpt.py reads; its loss is within the budget."""
    directory, prefix = trained
    data = ["--data-path", str(prefix), "--split", "80,20,0"]
    argv = [
        "--load",
        str(directory / "c"),
        *data,
        "--output",
        str(tmp_path),
        "--batches",
        "2",
        "--micro-batch-size",
        "2",
    ]
    argv += ["--micro-batch-size", "2", "--top", "5"]
    assert probe_fp8.main([*argv, "--recipes", "tensorwise", "--budget", "0.003"]) == 0
    found = json.loads((tmp_path / "probe.json").read_text())
    assert len(found["rows"]) == 8 * 4
    assert (tmp_path / "heatmap.png").read_bytes().startswith(b"\x89PNG")
    losses, plain = {}, flags(prefix, "--bf16", "--train-iters", "12", "--lr", "1e-2")
    rerun = ["--load", str(directory / "c"), "--skip-train", "--eval-iters", "1", "--save", str(tmp_path / "none")]
    for name, config in (("fp8", ["--config", str(tmp_path / "flags.json")]), ("bf16", plain)):
        assert run(*config, *rerun, "--log-dir", str(tmp_path / name)) == 0
        (line,) = metrics(tmp_path / name)[1]
        losses[name] = line["valid_loss"]
    assert losses["fp8"] != losses["bf16"], "FP8 was not on"
    assert abs(losses["fp8"] / losses["bf16"] - 1) <= 0.003
    assert "flags.json (tensorwise)" in capsys.readouterr().out


def test_linears_too_small_for_fp8_stay_out_of_the_whole_model(trained, tmp_path, capsys, monkeypatch):
    """As in the run that the flags are for; probed they are all the same. The run's own flag goes on."""
    directory, prefix = trained
    rows = [[64, 32, 32, 0.5, 0.5], [64, 32, 48, 1.5, 1.5]]  # proj and fc2, two sequences of 32 tokens
    monkeypatch.setattr(crossover, "table", lambda: crossover.Measured("G", {"blockwise": rows}))
    words = ["--load", str(directory / "c"), "--data-path", str(prefix), "--split", "80,20,0", "--batches", "1"]
    words += ["--output", str(tmp_path), "--micro-batch-size", "2", "--recipes", "blockwise", "--budget", "0"]
    assert probe_fp8.main(words) == 0
    found = json.loads((tmp_path / "probe.json").read_text())
    (choice,) = found["choices"]
    assert choice["small"] == ["layers.0.attention.proj", "layers.1.attention.proj"]
    assert len(choice["kept"]) == 6
    assert not set(choice["kept"]) & set(choice["small"])
    assert set(choice["small"]) < {row["linear"] for row in found["rows"]}
    assert "; 2 too small for FP8" in capsys.readouterr().out
    assert "fp8_small_linears" not in json.loads((tmp_path / "flags.json").read_text())
    assert json.loads(flags_file({"fp8_small_linears": "fp8"}, "blockwise", [], "fp8"))["fp8_small_linears"] == "fp8"


MOE = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32", "--moe-layer-freq", "[0,1]"),
    *("--moe-router-load-balancing-type", "none"),
)


def test_the_experts_of_a_layer_are_probed_as_one(trained, tmp_path, capsys):
    """Each of their linears computes as the recipe would, also one that gets no rows; the flags' pattern names them."""
    prefix, fc1 = trained[1], "layers.1.mlp.experts.fc1"
    argv = flags(prefix, "--bf16", "--train-iters", "4", "--eval-iters", "0", "--lr", "1e-2", *MOE)
    assert run(*argv, "--save", str(tmp_path / "c")) == 0
    words = ["--load", str(tmp_path / "c"), "--data-path", str(prefix), "--split", "80,20,0", "--batches", "1"]
    words += ["--output", str(tmp_path / "out"), "--micro-batch-size", "2", "--recipes", "blockwise", "--budget", "0"]
    assert probe_fp8.main(words) == 0, "met when all have gone back"
    found = json.loads((tmp_path / "out" / "probe.json").read_text())
    rows = {(row["linear"], row["role"]): row for row in found["rows"]}
    assert len(rows) == (4 + 2 + 2) * 4
    for role in ("all", "input", "weight"):
        assert 0.005 < rows[fc1, role]["output_error"] < 0.1
    assert rows[fc1, "grad_output"]["output_error"] == 0
    assert rows[fc1, "all"]["cosine"] < 1
    kept = json.loads((tmp_path / "out" / "flags.json").read_text())["keep_modules_in_bf16"]
    assert "layers.1.mlp.experts.*.fc1" in kept
    assert run("--config", str(tmp_path / "out" / "flags.json"), "--dry-run") == 0
    assert "not probed" not in capsys.readouterr().out


def test_mistakes_are_one_line(trained, tmp_path, capsys):
    directory, prefix = trained
    argv = ["--load", str(directory / "c"), "--data-path", str(prefix), "--output", str(tmp_path)]
    assert probe_fp8.main([*argv, "--recipes", "fp4"]) == 2
    assert probe_fp8.main([*argv, "--batches", "9999"]) == 2
    (tmp_path / "file").write_text("")
    assert probe_fp8.main([*argv, "--output", str(tmp_path / "file")]) == 2
    assert [line.split(":")[2] for line in capsys.readouterr().err.splitlines()] == [
        " --recipes fp4",
        " --batches 9999",
        f" --output {tmp_path / 'file'}",
    ]
