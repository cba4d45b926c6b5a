"""The first gradient of a step is written over what the step before left: as if it were added to zeros.

The same on a GPU: tests/gpu/test_first_gradients.py.
"""

import pytest
import torch

from megafp8.optimizer.buffers import GradBuffers
from tests.core import equalities as eq
from tests.core.first_gradients import ALIKE, compiled_and_plain, poison, starting, traces

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", ALIKE)
def test_written_is_as_added_to_zeros(case):
    written, added = traces(eq.TINY | ALIKE[case], CPU)
    assert eq.same(written, added)
    assert all(values.isfinite().all() for values in written.values)


def test_a_gradient_that_is_added_to_what_was_there_shows(monkeypatch):
    """The planted fault: who never asks whether to add."""
    target = GradBuffers.target
    monkeypatch.setattr(GradBuffers, "target", lambda self, param: (target(self, param)[0], True))
    with starting(poison):
        assert not all(values.isfinite().all() for values in eq.trace(eq.TINY, CPU, steps=1).values)


def test_torch_compile_takes_the_product():
    compiled, plain = compiled_and_plain(CPU, "aot_eager")
    assert all(torch.equal(a, b) for a, b in zip(compiled, plain, strict=True))
    assert (plain[1] != 1).all()
