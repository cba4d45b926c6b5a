"""Twenty steps of every recipe on the CPU: caching, recomputing, evaluating and saving change no bit.

Each equality fails when its fault is planted. The same on a GPU: tests/gpu/test_equalities.py.
"""

import pytest
import torch

from megafp8.core.transformer.norm import Norm
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

    flags = eq.TINY | eq.RECIPES[recipe]
    assert eq.same(plain(recipe), eq.trace(flags, CPU, before=eq.drop_copies))
    assert eq.same(plain(recipe), eq.trace(flags, CPU, between=between))


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
