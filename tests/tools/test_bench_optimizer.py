"""tools/bench_optimizer.py, as far as a machine without a GPU can tell."""

import bench_optimizer
import pytest
import torch

from megafp8.optimizer.precision import FP32_STATE, Precision
from megafp8.optimizer.primary import FlatPrimary

TINY = {"norm.weight": (64,), "fc.weight": (130, 192)}


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench_optimizer.main([]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


def test_no_layers_is_a_mistake(capsys):
    assert bench_optimizer.main(["--layers", "0"]) == 2
    assert "--layers 0" in capsys.readouterr().err


def test_bytes_are_those_of_the_state():
    assert bench_optimizer.update_bytes(FP32_STATE, 2) == 30
    assert bench_optimizer.update_bytes(Precision("remainder"), 2) == 28
    assert bench_optimizer.update_bytes(Precision("fp32", "bf16", "bf16"), 2) == 22


@pytest.mark.parametrize("recipe", [None, *bench_optimizer.RECIPES])
def test_the_optimizers_that_it_times_take_steps(recipe, monkeypatch):
    monkeypatch.setattr(bench_optimizer, "LAYER", TINY)
    optimizer = bench_optimizer.make_optimizer(2, recipe, primary=recipe is not None, device="cpu")
    assert any(isinstance(w, FlatPrimary) for w in optimizer._flat_weights) == (recipe is not None)
    before = optimizer.masters.views["layers.1.fc.weight"].clone()
    assert optimizer.step(lr=1e-3, weight_decay=0.1, valid_tokens=4).grad_norm > 0
    assert not torch.equal(optimizer.masters.views["layers.1.fc.weight"], before)
