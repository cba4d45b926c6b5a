"""Twenty steps of every recipe on the CPU: caching, recomputing, evaluating and saving change no bit.

Each equality fails when its fault is planted. The same on a GPU: tests/gpu/test_equalities.py.
"""

import pytest
import torch

from megafp8.core.transformer.norm import Norm
from megafp8.fp8.param import Weight
from tests.core import equalities as eq

CPU = torch.device("cpu")
ALL_RECIPES = pytest.mark.parametrize("recipe", eq.RECIPES)


@pytest.fixture(scope="module")
def plain():
    """Recipe -> the trace of a run in which nothing else happens; made once."""
    traces = {}

    def get(recipe):
        if recipe not in traces:
            traces[recipe] = eq.trace(eq.TINY | eq.RECIPES[recipe], CPU)
        return traces[recipe]

    return get


@ALL_RECIPES
def test_weight_copies_evaluation_and_saves_change_no_bit(plain, recipe, tmp_path):
    """CASES 04, 05: with copies dropped before each microbatch, an evaluation after each step, and saves."""
    save = eq.saving(tmp_path)

    def between(model, scaling, iteration):
        eq.evaluate(model, scaling, iteration)
        save(model, scaling, iteration)

    busy = eq.trace(eq.TINY | eq.RECIPES[recipe], CPU, before=eq.drop_copies, between=between)
    assert eq.same(plain(recipe), busy)


@pytest.mark.slow
@pytest.mark.parametrize("plan", eq.RECOMPUTE)
@ALL_RECIPES
def test_recomputation_changes_no_bit(plain, recipe, plan):
    """CASES 22. (Over three steps, and with biases and attention dropout: test_fp8.py.)"""
    assert eq.same(plain(recipe), eq.trace(eq.TINY | eq.RECIPES[recipe] | eq.RECOMPUTE[plan], CPU))


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
@pytest.mark.parametrize("fault", [eq.skipped_refresh, eq.stale_column_copy])
def test_stale_copies_show(recipe, fault):
    """The copies of step 1 in step 2, where every microbatch of the other run makes them anew."""
    flags = eq.TINY | eq.RECIPES[recipe]
    fresh = eq.trace(flags, CPU, steps=3, before=eq.drop_copies)
    assert eq.same(fresh, eq.trace(flags, CPU, steps=3))
    with fault():
        assert not eq.same(fresh, eq.trace(flags, CPU, steps=3))


WAYS = {
    "for all linears": {},
    "by a file": {"fp8_module_recipes": "@"},
    "but in the first and last layers": {"num_layers": 3, "first_last_layers_bf16": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_copies_follow_the_weights_however_fp8_is_switched_on(way, tmp_path, monkeypatch):
    """CASES 05: new bytes after each step, the same ones in its second microbatch."""
    flags = eq.TINY | eq.RECIPES["blockwise"] | WAYS[way]
    if "fp8_module_recipes" in flags:
        path = tmp_path / "recipes.txt"
        path.write_text("*=bf16\nlayers.1.*=blockwise\n")
        flags["fp8_module_recipes"] = (f"@{path}",)
    fresh = eq.trace(flags, CPU, steps=3, before=eq.drop_copies)
    made, quantize = [], Weight._quantize
    monkeypatch.setattr(Weight, "_quantize", lambda self, *args, **o: made.append(1) or quantize(self, *args, **o))
    assert eq.same(fresh, eq.trace(flags, CPU, steps=3))
    assert len(made) == 3 * (8 if way == "for all linears" else 4)


def test_a_column_copy_left_by_evaluation_shows():
    flags = eq.TINY | eq.RECIPES["blockwise"]
    faulty = eq.trace(flags, CPU, steps=3, between=eq.evaluation_with_old_columns())
    assert not eq.same(eq.trace(flags, CPU, steps=3), faulty)


def test_another_value_in_the_second_pass_shows(monkeypatch):
    """A fault: backward makes a norm's output anew, from an input that is not quite the same (CASES 22)."""
    flags = eq.TINY | eq.RECIPES["blockwise"]
    kept, again = (eq.trace(flags | plan, CPU, steps=2) for plan in ({}, eq.RECOMPUTE["norms"]))
    assert eq.same(kept, again)
    remake = Norm.remake
    monkeypatch.setattr(Norm, "remake", lambda self, kept, *args: remake(self, (kept[0] * 1.01, *kept[1:]), *args))
    assert not eq.same(kept, eq.trace(flags | eq.RECOMPUTE["norms"], CPU, steps=2))


@pytest.mark.parametrize("recipe", [None, "blockwise", "tensorwise"])
def test_fc1_output_in_fp8_changes_gradients_a_little_and_nothing_else(recipe):
    """--activation-func-fp8-input-store: forward is the same, backward sees the rounding, also when recomputed."""
    flags = eq.TINY | (eq.RECIPES[recipe] if recipe else {})
    stored = flags | {"activation_func_fp8_input_store": True}
    plain, rounded = (eq.trace(f, CPU, steps=1) for f in (flags, stored))
    losses, (gradient, *_) = plain.values[:2], plain.values[2:]
    assert all(torch.equal(a, b) for a, b in zip(losses, rounded.values[:2], strict=True))
    assert 1e-4 < (gradient - rounded.values[2]).norm() / gradient.norm() < 0.05
    assert eq.same(rounded, eq.trace(stored | eq.RECOMPUTE["mlp"], CPU, steps=1))
