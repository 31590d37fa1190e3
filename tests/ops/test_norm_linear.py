"""The kernel of a norm and a linear layer against the reference in float64. Without a GPU: in the interpreter."""

import pytest
import torch
from torch import nn
from torch.library import opcheck

pytest.importorskip("triton")

from kernel_cases import DEVICE, DTYPES, GPU, NormLinearCase, random_norm_linear
from kernel_cases import norm_linear_inputs as draw

from inline_attention.ops import fused_mlp, norm_linear, use_backend
from inline_attention.ops import fused_norm_linear as fused
from inline_attention.ops.fused_mlp import TILES, Tile, Win

pytestmark = pytest.mark.usefixtures("poisoned_memory")

SHAPES = {  # rows, channels, outputs, tile
    "one token": ((1,), 16, 48, None),
    "two blocks of channels": ((2, 9), 48, 144, None),
    "more rows than a tile": ((37,), 16, 48, None),
    "no width of a block": ((3, 5), 23, 37, None),
    "split unevenly": ((19,), 40, 72, Tile(16, 16, 4, 1, splits=3)),
    "more splits than steps": ((2,), 16, 20, Tile(16, 16, 4, 1, splits=4)),
    "no token": ((0,), 16, 48, None),
}


def assert_accurate(case):
    """At most twice the error of the reference, and one rounding."""
    for name, error, allowed in case.errors():
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e} for {case}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_float64(shape, dtype):
    rows, width, outputs, tile = SHAPES[shape]
    assert_accurate(NormLinearCase(draw(rows, width, outputs, dtype), tile))


@pytest.mark.parametrize("seed", range(210 if GPU else 6))
def test_random_shapes(seed):
    """`gpu_check.py norm` runs more of them."""
    assert_accurate(random_norm_linear(seed))


@pytest.mark.parametrize("few", [15, 14])
@pytest.mark.parametrize("stream", [torch.float32, DTYPES[-1]])
def test_under_autocast(stream, few, monkeypatch):
    """The kernel casts the weights for few rows."""
    monkeypatch.setattr(fused_mlp, "FEW_ROWS", few)
    x, *tensors = draw((3, 5), 32, 96, torch.float32)
    with torch.autocast(DEVICE, DTYPES[-1]), torch.no_grad():
        fast, plain = (norm_linear(x.to(stream), *tensors, backend=backend) for backend in ("triton", "reference"))
    for one, other in zip(fast, plain, strict=True):
        assert one.dtype == other.dtype == DTYPES[-1]
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_gradients_take_the_reference(monkeypatch):
    monkeypatch.setattr(fused, "norm_linear", None)
    x, *tensors = draw((3, 5), 16, 48, torch.float32)
    normal, out = norm_linear(x.requires_grad_(), *tensors, backend="triton")
    (normal.sum() + out.sum()).backward()
    assert x.grad is not None


def test_auto_is_the_reference_until_the_table_says_otherwise(monkeypatch):
    ran = []
    x, *tensors = draw((4,), 16, 48, torch.float32)
    monkeypatch.setattr(fused, "norm_linear", lambda *args: ran.append(args[-1]) or (x, x))
    with torch.no_grad():
        norm_linear(x, *tensors)
        assert ran == []
        with use_backend("triton"):
            norm_linear(x, *tensors)
    assert ran == [None]


def test_what_pytorch_is_told_of_the_operator():
    x, *tensors = draw((3, 5), 16, 48, DTYPES[-1])
    arguments = (x.float(), *tensors, 1e-5, DTYPES[-1], [])
    opcheck(torch.ops.inline_attention.norm_linear.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=torch.zeros(2, 17)), r"x has shape \(2, 17\); expected \(…, 16\)"),
        (dict(bias=torch.zeros(16)), r"bias has shape \(16,\); expected \(48,\)"),
        (dict(weight=torch.zeros(48)), r"weight has shape \(48,\); expected \(outputs, channels\)"),
        (dict(x=torch.zeros(2, 16, dtype=torch.float16)), "x is torch.float16 and weight is torch.float32"),
    ],
)
def test_bad_inputs_are_named(change, message):
    names = ("x", "norm_weight", "norm_bias", "weight", "bias")
    given = dict(zip(names, draw((2,), 16, 48, torch.float32), strict=True))
    given |= {name: tensor.to(DEVICE) for name, tensor in change.items()}
    with pytest.raises(ValueError, match=message):
        norm_linear(**given)


@pytest.mark.parametrize("layer", [nn.LayerNorm(32, bias=False), nn.LayerNorm(32, elementwise_affine=False)])
def test_a_block_keeps_layers_without_a_bias(layer):
    from inline_attention.layers import InLineAttention
    from inline_attention.layers.block import Block

    block = Block(32, InLineAttention(32, 2), mlp_ratio=2, norm_eps=1e-6).eval()
    assert block.has_plain_norm()
    assert block.has_plain_mlp()
    block.norm1 = block.norm2 = layer
    assert not block.has_plain_norm()
    assert not block.has_plain_mlp()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_block_takes_the_kernel(hooked, monkeypatch):
    """Where `optimize` allows it and the table says so, unless somebody would see the difference."""
    from inline_attention.layers import InLineAttention
    from inline_attention.layers.block import Block

    torch.manual_seed(0)
    block = Block(32, InLineAttention(32, 2, num_prefix_tokens=1), mlp_ratio=2, norm_eps=1e-6).to(DEVICE).eval()
    x = torch.randn(2, 7, 32, device=DEVICE)
    ran = []
    run = fused.run
    monkeypatch.setattr(fused, "run", lambda *args: ran.append(args[-1]) or run(*args))
    win = Win(0, fused_mlp.ANY, TILES[0])
    monkeypatch.setattr(fused_mlp, "winning_tile", lambda x, hidden, dtype, use: win.tile if use == "normed" else None)
    with torch.no_grad():
        expected = block(x, (2, 3))
        assert ran == []
        block.fused = ("normed",)
        torch.compiler.reset()  # torch 2.11 takes what it compiled for a block without hooks
        compiled = torch.compile(block, fullgraph=True, backend="eager")
        seen = []
        if hooked:
            block.norm1.register_forward_hook(lambda *_: seen.append("norm"))
        with use_backend("triton"):
            for call in (block, compiled):
                torch.testing.assert_close(call(x, (2, 3)), expected, rtol=1e-4, atol=1e-4)
    assert (len(ran), len(seen)) == ((0, 2) if hooked else (2, 0))
    block(x, (2, 3)).sum().backward()  # with gradients, PyTorch computes it
    assert len(ran) == (0 if hooked else 2)
