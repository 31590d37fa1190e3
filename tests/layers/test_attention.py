"""The attention modules in a user's own network."""

from typing import Any

import numpy as np
import official
import pytest
import torch
from torch import Tensor, nn

from inline_attention import InLineAttention, LinearAttention, SoftmaxAttention
from inline_attention.layers import Attention
from inline_attention.layers.local import LocalWeight
from inline_attention.ops import attention_matrix, inline_attention

MODULES = [InLineAttention, LinearAttention, SoftmaxAttention]
GRID = (3, 5)


def tokens(count: int = 15, *, batch: int = 2, dim: int = 8, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, count, dim, generator=generator, dtype=torch.float64)


def build(cls: type[Attention] = InLineAttention, **kwargs: Any) -> Attention:
    torch.manual_seed(0)
    return cls(8, 2, **kwargs).double()


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("feature_map", ["identity", "relu", "leaky_relu", "exp"])
def test_official_module(feature_map: str) -> None:
    """One InLine attention of the official Swin: 32 channels, 2 heads, a window of 7×7."""
    module = InLineAttention(32, 2, feature_map=feature_map).double()
    names = {"local.fc1": "residual.0", "local.fc2": "residual.2", "qkv": "qkv", "proj": "proj"}
    for own, theirs in names.items():
        layer = module.get_submodule(own)
        for kind, parameter in layer.named_parameters():
            # The grouped 1×1 convolutions of a checkpoint are (out, in / heads, 1).
            shape = [parameter.numel()] if kind == "bias" else [-1, parameter.shape[-1], 1]
            if theirs in ("qkv", "proj"):
                shape = list(parameter.shape)
            elif kind == "weight":
                shape[0] = parameter.numel() // parameter.shape[-1]
            value = official.weight(f"{theirs}.{kind}", shape)
            parameter.data.copy_(value.reshape(parameter.shape))
    x = torch.from_numpy(np.random.Generator(np.random.PCG64(1)).standard_normal((3, 49, 32)))[:1]
    expected = official.outputs()[f"attn_{feature_map.replace('_', '')}"]
    assert_close(module(x, (7, 7)), expected)


@pytest.mark.parametrize("cls", MODULES)
@pytest.mark.parametrize("prefix", [0, 2])
def test_alone_in_a_network(cls: type[Attention], prefix: int) -> None:
    module = build(cls, num_prefix_tokens=prefix)

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = module
            self.out = nn.Linear(8, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x + self.attn(x, GRID)).mean(1)

    network = Network()
    network(tokens(prefix + 15)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize(
    ("cls", "kind", "feature_map"),
    [
        (InLineAttention, "inline", "identity"),
        (InLineAttention, "inline", "exp"),
        (LinearAttention, "linear", "relu"),
        (SoftmaxAttention, "softmax", "identity"),
    ],
)
def test_module_is_its_matrix_between_two_projections(cls: type[Attention], kind: Any, feature_map: str) -> None:
    module = build(cls, feature_map=feature_map, local_residual=False)
    x = tokens()
    q, k, v = module.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2)
    matrix = attention_matrix(q, k, kind=kind, feature_map=feature_map)
    expected = module.proj(torch.einsum("bhij,bjhd->bihd", matrix, v).flatten(2))
    assert_close(module(x, GRID), expected)


def test_autocast_leaves_float64_alone() -> None:
    module = build()
    with torch.autocast("cpu", torch.bfloat16):
        out = module(tokens(), GRID)
    assert_close(out, module(tokens(), GRID))


def test_separate_projections_are_the_fused_one_cut_apart() -> None:
    fused, separate = build(), build(fused_qkv=False)
    state = fused.state_dict()
    for kind in ("weight", "bias"):
        whole = state.pop(f"qkv.{kind}")
        state[f"q.{kind}"], state[f"kv.{kind}"] = whole[:8], whole[8:]
    separate.load_state_dict(state)
    assert_close(separate(tokens(), GRID), fused(tokens(), GRID))


@pytest.mark.parametrize("cls", MODULES)
@pytest.mark.parametrize("local_residual", [False, True])
def test_masked_tokens_are_absent(cls: type[Attention], local_residual: bool) -> None:
    """Absent rows and columns at the bottom and right: the output of the smaller map."""
    module = build(cls, local_residual=local_residual, num_prefix_tokens=1)
    present = torch.zeros(GRID, dtype=torch.bool)
    present[:2, :3] = True
    mask = torch.cat([torch.tensor([True]), present.flatten()])
    x = tokens(16).masked_fill(~mask[:, None], 1e6)
    out = module(x, GRID, token_mask=mask.expand(2, -1))
    assert_close(out[:, mask], module(x[:, mask], (2, 3)))


def test_local_residual_depends_on_the_sample_and_not_on_the_position() -> None:
    """Unlike in a depthwise convolution, the kernels differ between images. They are the same all over an image."""
    module = build(num_prefix_tokens=0)
    x = tokens()
    kernels = module.local_weight(x, None, None)
    assert kernels.shape == (2, 2, 4, 9)
    assert not torch.allclose(kernels[0], kernels[1])
    shuffled = x[:, torch.randperm(15, generator=torch.Generator().manual_seed(0))]
    assert_close(module.local_weight(shuffled, None, None), kernels)


def test_token_mean_can_be_given() -> None:
    module = build()
    x = tokens()
    assert_close(module(x, GRID, token_mean=x.mean(1)), module(x, GRID))
    assert not torch.allclose(module(x, GRID, token_mean=x.mean(1) + 1), module(x, GRID))


def test_local_kernel_is_a_grouped_convolution_per_head() -> None:
    kernel = LocalWeight(8, 2).double()
    mean = tokens(1)[:, 0]
    first, second = (nn.Conv1d(8, n, 1, groups=2).double() for n in (8, 72))
    for conv, layer in ((first, kernel.fc1), (second, kernel.fc2)):
        conv.weight.data.copy_(layer.weight.reshape(conv.weight.shape))
        conv.bias.data.copy_(layer.bias.flatten())
    expected = second(nn.functional.gelu(first(mean[:, :, None]))).reshape(2, 2, 4, 9)
    assert_close(kernel(mean), expected)


def test_relu_affine_starts_as_relu_and_learns() -> None:
    relu, affine = build(feature_map="relu"), build(feature_map="relu_affine")
    missing, unexpected = affine.load_state_dict(relu.state_dict(), strict=False)
    assert (sorted(missing), unexpected) == (["affine.bias", "affine.weight"], [])
    assert_close(affine(tokens(), GRID), relu(tokens(), GRID))
    affine(tokens(), GRID).square().sum().backward()
    assert affine.affine.weight.grad.abs().max() > 0
    # q and k pass through the same map, one per head.
    affine.affine.weight.data.normal_()
    q, k, v = affine.qkv(tokens()).unflatten(-1, (3, 2, 4)).unbind(2)
    q, k = (torch.einsum("bnhi,hoi->bnho", x, affine.affine.weight).relu() for x in (q, k))
    weight = affine.local_weight(tokens(), None, None)
    expected = affine.proj(inline_attention(q, k, v, local_weight=weight, grid=GRID).flatten(2))
    assert_close(affine(tokens(), GRID), expected)


def test_position_conv_is_a_depthwise_convolution_of_v() -> None:
    module, without = build(position_conv=True), build()
    without.load_state_dict(module.state_dict(), strict=False)
    x = tokens()
    v = module.qkv(x)[..., 16:]
    v_map = v.unflatten(1, GRID).permute(0, 3, 1, 2)
    added = nn.functional.conv2d(v_map, module.position.weight, module.position.bias, padding=1, groups=8)
    added = added.permute(0, 2, 3, 1).flatten(1, 2)
    assert_close(module(x, GRID), without(x, GRID) + added @ module.proj.weight.T)


class Gated(InLineAttention):
    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.gate = nn.Linear(dim, dim)


class OtherLocalWeight(InLineAttention):
    def local_weight(self, *args: Any) -> Tensor:
        weight = super().local_weight(*args)
        assert weight is not None
        return 2 * weight


@pytest.mark.parametrize("cls", [InLineAttention, Gated, OtherLocalWeight])
def test_images_of_different_sizes_are_computed_as_each_alone(cls: type[Attention]) -> None:
    module, grids = build(cls), [(3, 5), (2, 4)]
    x = tokens()
    for out, image, (height, width) in zip(module.forward_each(x, grids), x, grids, strict=True):
        own = height * width
        assert_close(out[:own], module(image[None, :own], (height, width))[0])


def test_an_overridden_local_weight_counts_in_inference_too() -> None:
    module = build(OtherLocalWeight)
    trained = module(tokens(), GRID)
    with torch.no_grad():
        assert_close(module(tokens(), GRID), trained)


def test_errors() -> None:
    with pytest.raises(ValueError, match="dim=8 is not a multiple of num_heads=3"):
        InLineAttention(8, 3)
    with pytest.raises(ValueError, match="dim=8 is not a multiple of num_heads=0"):
        InLineAttention(8, 0)
    with pytest.raises(ValueError, match=r"x has shape \(2, 3, 5, 8\); expected \(B, N, C\)"):
        InLineAttention(8, 2)(torch.zeros(2, 3, 5, 8), (3, 5))
    with pytest.raises(ValueError, match=r"feature_map='gelu' is unknown; expected one of .*relu_affine"):
        InLineAttention(8, 2, feature_map="gelu")
    with pytest.raises(ValueError, match=r"token_mask has shape \(2, 14\) .* expected bool \(B, N\) = \(2, 15\)"):
        build(SoftmaxAttention)(tokens(), GRID, token_mask=torch.ones(2, 14, dtype=torch.bool))
    mask = torch.ones(2, 15, dtype=torch.bool)
    with pytest.raises(ValueError, match="two forms of the same mask; pass one of them"):
        build()(tokens(), GRID, token_mask=mask, attn_mask=mask[:, None, None])
    with pytest.raises(ValueError, match="a mask over pairs of tokens is impossible"):
        build()(tokens(), GRID, token_mask=torch.ones(2, 1, 15, 15, dtype=torch.bool))
    with pytest.raises(ValueError, match="grid 4×4 with 0 prefix tokens makes 16 tokens, but there are 15"):
        build()(tokens(), (4, 4))
