"""GELU without the error function."""

import pytest
import torch
from torch.nn import functional as F

from inline_attention.ops.gelu import gelu

X = torch.cat([torch.linspace(-12, 12, 20_001, dtype=torch.double), torch.tensor([0.0, 1e-30, -1e-30, 100, -100])])


def test_it_is_gelu_to_the_digits_of_float32() -> None:
    x = X.float()
    assert (gelu(x).double() - F.gelu(x.double())).abs().max() < 5e-7


def test_its_gradient_is_that_of_gelu() -> None:
    x = X.float().requires_grad_()
    (slope,) = torch.autograd.grad(gelu(x).sum(), x)
    exact = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.gelu(exact).sum(), exact)
    assert (slope.double() - expected).abs().max() < 3e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_it_rounds_once(dtype: torch.dtype) -> None:
    x = X.to(dtype).requires_grad_()
    out = gelu(x)
    (slope,) = torch.autograd.grad(out.sum(), x)
    exact = x.detach().double().requires_grad_()
    expected = F.gelu(exact)
    (expected_slope,) = torch.autograd.grad(expected.sum(), exact)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), expected, rtol=0.51 * eps, atol=1e-6)
    torch.testing.assert_close(slope.double(), expected_slope, rtol=0.51 * eps, atol=3e-6)
    assert out.dtype == slope.dtype == dtype


def test_nan_stays() -> None:
    assert gelu(torch.tensor([float("nan"), 1.0])).isnan().tolist() == [True, False]


def test_second_derivative() -> None:
    x = torch.linspace(-3, 3, 13, dtype=torch.float32, requires_grad=True)
    (slope,) = torch.autograd.grad(gelu(x).sum(), x, create_graph=True)
    (curvature,) = torch.autograd.grad(slope.sum(), x)
    expected = (2 - x**2) * torch.exp(-(x**2) / 2) / (2 * torch.pi) ** 0.5
    torch.testing.assert_close(curvature, expected, rtol=1e-4, atol=1e-4)
