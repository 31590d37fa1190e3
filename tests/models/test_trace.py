"""torch.jit.trace at a fixed size."""

import io
import warnings

import pytest
import torch
from small import FAMILIES, create_shallow, create_small, image

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit:FutureWarning", "ignore:`torch.jit:DeprecationWarning"  # PyTorch recommends torch.export
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_a_traced_model_is_the_model(family: str) -> None:
    """Saved and loaded, and on other images of its size, which pads patches, windows and stripes."""
    model = create_shallow(f"inline_{family}_tiny")
    size = (65, 91)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # sizes become constants, as they should
        traced = torch.jit.trace(model, image(*size), check_trace=False)  # checked below
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    x = image(*size).flip(0) + 1
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x))


def test_a_traced_model_trains() -> None:
    """Traced with PyTorch's own checks, which run it with and without gradients."""
    model = create_small("inline_deit_tiny", depth=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        traced = torch.jit.trace(model, image())
    grads = [torch.autograd.grad(m(image()).square().sum(), list(model.parameters())) for m in (model, traced)]
    for expected, grad in zip(*grads, strict=True):
        torch.testing.assert_close(grad, expected, atol=1e-4, rtol=1e-4)
