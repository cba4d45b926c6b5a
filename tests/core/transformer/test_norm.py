"""RMSNorm and LayerNorm: FP32 inside, one rounding at the end."""

import pytest
import torch

from megafp8.core.transformer.norm import Norm

CPU = torch.device("cpu")


def reference(x, weight, bias, kind, eps):
    if kind == "LayerNorm":
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    return y if bias is None else y + bias


def ulp(expected):
    """One unit in the last place of BF16 at each value (8 significant bits)."""
    return torch.exp2(torch.floor(torch.log2(expected.abs().clamp(min=2.0**-126))) - 7)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(dtype, kind, zero_centered):
    generator = torch.Generator().manual_seed(0)
    norm = Norm("n", 96, kind=kind, eps=1e-5, zero_centered=zero_centered, dtype=dtype, device=CPU)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(96, generator=generator) * 0.1 + (0 if zero_centered else 1))
        if norm.bias is not None:
            norm.bias.copy_(torch.randn(96, generator=generator))
    scale = torch.tensor([1.0, 1e3, 1e-3, 0.0])[:, None, None]  # 0: eps keeps the row finite
    x = (torch.randn(4, 5, 96, generator=generator) * scale).to(dtype).requires_grad_()
    exact = [t.detach().double().requires_grad_() if t is not None else None for t in (x, norm.weight, norm.bias)]
    expected = reference(exact[0], exact[1] + zero_centered, exact[2], kind, 1e-5)
    actual = norm(x)
    assert actual.dtype == dtype
    if dtype == torch.bfloat16:
        assert ((actual.double() - expected).abs() <= ulp(expected) + 1e-6).all()
    else:
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)

    grad = torch.randn(4, 5, 96, generator=generator).to(dtype)
    actual.backward(grad)
    expected.backward(grad.double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for param, reference_param in zip((x, norm.weight, norm.bias), exact, strict=True):
        if param is not None:
            rows = slice(0, 3) if param is x else slice(None)  # the gradient at the zero row is 1/sqrt(eps) large
            error = (param.grad[rows].double() - reference_param.grad[rows]).norm() / reference_param.grad[rows].norm()
            assert error < tolerance
            assert param.grad.isfinite().all()


def test_empty():
    norm = Norm("n", 8, kind="RMSNorm", eps=1e-5, dtype=torch.float32, device=CPU)
    assert norm(torch.empty(0, 8)).shape == (0, 8)
