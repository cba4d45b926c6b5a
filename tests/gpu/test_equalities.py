"""Twenty steps of every recipe on a GPU under --deterministic-mode: what may not change a bit, changes none.

The runs are those of tests/core/equalities.py, wide enough for every kernel's fast path.
"""

import pytest
import torch

from tests.core import equalities as eq

CUDA = torch.device("cuda")
STORE = {"activation_func_fp8_input_store": True}
VARIANTS = eq.RECIPES | {"blockwise, fc1 in FP8": eq.RECIPES["blockwise"] | STORE, "bf16": {}}


@pytest.fixture(autouse=True)
def deterministic(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("variant", VARIANTS)
def test_twenty_steps_are_the_same_bits(variant, tmp_path):
    """CASES 04, 05, 22: twice the same, copies dropped, evaluations and saves between steps, every recomputation."""
    flags = eq.SMALL | VARIANTS[variant]
    plain, save = eq.trace(flags, CUDA), eq.saving(tmp_path)
    assert all(t.isfinite().all() for t in (*plain.values, *plain.weights))

    def between(model, scaling, iteration):
        eq.evaluate(model, scaling, iteration)
        save(model, scaling, iteration)

    assert eq.begins(plain, eq.trace(flags, CUDA, steps=5)), "the same run twice"
    assert eq.same(plain, eq.trace(flags, CUDA, before=eq.drop_copies)), "weight copies made for each microbatch"
    assert eq.same(plain, eq.trace(flags, CUDA, between=between)), "evaluations and saves between steps"
    for name, plan in eq.RECOMPUTE.items():
        if name in ("full", "all parts"):
            assert eq.same(plain, eq.trace(flags | plan, CUDA)), f"recompute {name}"
        else:
            assert eq.begins(plain, eq.trace(flags | plan, CUDA, steps=5)), f"recompute {name}"


@pytest.mark.parametrize("recipe", ["blockwise", "tensorwise"])
@pytest.mark.parametrize("fault", [eq.skipped_refresh, eq.stale_column_copy])
def test_stale_copies_show(recipe, fault):
    flags = eq.SMALL | eq.RECIPES[recipe]
    fresh = eq.trace(flags, CUDA, steps=3, before=eq.drop_copies)
    with fault():
        assert not eq.same(fresh, eq.trace(flags, CUDA, steps=3))


def test_a_column_copy_left_by_evaluation_shows():
    flags = eq.SMALL | eq.RECIPES["blockwise"]
    faulty = eq.trace(flags, CUDA, steps=3, between=eq.evaluation_with_old_columns())
    assert not eq.same(eq.trace(flags, CUDA, steps=3), faulty)
