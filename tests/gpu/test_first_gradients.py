"""On a GPU: the first gradient of a step is written over what the step before left, as if it were added to zeros."""

import pytest
import torch

from megafp8.fp8.wgrad import multiply_wgrad
from tests.core import equalities as eq
from tests.core.first_gradients import ALIKE, compiled_and_plain, traces


@pytest.mark.parametrize("case", ALIKE)
def test_written_is_as_added_to_zeros(case):
    written, added = traces(eq.SMALL | ALIKE[case], torch.device("cuda"))
    assert eq.same(written, added)
    assert all(values.isfinite().all() for values in written.values)


@pytest.mark.parametrize("shape", [(8192, 128256, 4096), (8192, 6144, 4096), (300, 96, 264), (4096, 2048, 128)])
def test_a_bf16_product(shape):
    """cuBLAS adds up along tokens alike, whether it adds to C or not."""
    tokens, rows, columns = shape
    dy, x = (torch.randn(tokens, n, device="cuda", dtype=torch.bfloat16) for n in (rows, columns))
    written = multiply_wgrad(dy, x, torch.full((rows, columns), torch.nan, device="cuda"), adds=False)
    added = multiply_wgrad(dy, x, torch.zeros(rows, columns, device="cuda"))
    different = (written != added).sum().item()
    assert different == 0, f"{different} of {written.numel()}, by up to {(written - added).abs().max().item()}"


def test_torch_compile_takes_the_product():
    compiled, plain = compiled_and_plain(torch.device("cuda"), "inductor")
    assert torch.equal(compiled[1], plain[1])
    torch.testing.assert_close(compiled[0], plain[0])
