"""What a block keeps for the backward."""

import pytest
import torch

from inline_attention.layers.block import Mlp

KEPT_BY_INDUCTOR = "aot_eager_decomp_partition"  # chooses what to keep as Inductor does, and compiles nothing


def train(mlp, x, compiled):
    torch._dynamo.reset()
    run = torch.compile(mlp, backend=KEPT_BY_INDUCTOR, fullgraph=True) if compiled else mlp
    torch.manual_seed(1)
    out = run(x)
    kept = [tuple(t.shape) for t in out.grad_fn.saved_tensors] if compiled else []
    return out, torch.autograd.grad(out.square().sum(), list(mlp.parameters())), kept


def test_compiled_training_keeps_no_activation():
    mlp = Mlp(8, 24).train()
    x = torch.randn(5, 8)
    out, grads, kept = train(mlp, x, compiled=True)
    assert kept.count((5, 24)) == 1  # the activation's input, and not its output
    expected, expected_grads, _ = train(mlp, x, compiled=False)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads, expected_grads)


@pytest.mark.parametrize("index", range(4))
def test_the_backward_sees_the_same_dropout(index):
    mlp = Mlp(8, 24, drop=0.4).double().train()
    x = torch.randn(5, 8, dtype=torch.double)
    _, grads, _ = train(mlp, x, compiled=True)
    parameter = list(mlp.parameters())[index]
    direction, step = torch.randn_like(parameter), 1e-6
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter += sign * step * direction
            torch.manual_seed(1)
            losses.append(torch.compile(mlp, backend=KEPT_BY_INDUCTOR)(x).square().sum())
            parameter -= sign * step * direction
    difference = (losses[0] - losses[1]) / (2 * step)
    torch.testing.assert_close(difference, (grads[index] * direction).sum(), rtol=1e-6, atol=1e-6)
