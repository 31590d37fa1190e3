"""What holds for every registered attention: masks, absent samples, single tokens, precision, hooks."""

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck
from variants import VARIANTS, build_variant

from inline_attention.layers import Attention, PatchEmbed
from inline_attention.ops.reference import masked_mean

GRID, PREFIX, DIM, HEADS = (3, 4), 1, 16, 2
N = PREFIX + 12
every_attention = pytest.mark.parametrize("kind", VARIANTS)


def build(kind: str, **kwargs: Any) -> Any:
    """Positional convolution included, and every parameter random, so that no bias hides behind its zeros."""
    torch.manual_seed(0)
    options: dict[str, Any] = dict(num_prefix_tokens=PREFIX, grid=GRID, position_conv=True) | kwargs
    module = build_variant(kind, DIM, HEADS, **options).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def tokens(count: int = N, *, batch: int = 3, seed: int = 0) -> Tensor:
    return torch.randn(batch, count, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def some_mask() -> Tensor:
    """Absent tokens in the middle and at the end, prefix tokens too; the last sample is wholly absent."""
    mask = torch.ones(3, N, dtype=torch.bool)
    mask[0, [3, 7, N - 1]] = False
    mask[1, [0, 5]] = False
    mask[2] = False
    return mask


def run(module: Attention, x: Tensor, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradients of the input and of all parameters, by name."""
    x = x.detach().requires_grad_()
    out = module(x, GRID, **options)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    named = dict(module.named_parameters())
    grads = torch.autograd.grad(out, [x, *named.values()], upstream.to(out.dtype))
    return out, dict(zip(["x", *named], grads, strict=True))


@every_attention
def test_absent_tokens_may_hold_anything(kind: str) -> None:
    """Neither outputs nor gradients change, those of the parameters included."""
    module = build(kind)
    mask = some_mask()
    clean = run(module, tokens().masked_fill(~mask[:, :, None], 0), token_mask=mask)
    for garbage in (torch.nan, torch.inf, 1e6):
        out, grads = run(module, tokens().masked_fill(~mask[:, :, None], garbage), token_mask=mask)
        assert torch.equal(out, clean[0])
        for name, grad in grads.items():
            assert grad.isfinite().all(), name
            assert torch.equal(grad, clean[1][name]), name


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in VARIANTS if not kind.endswith("residual")])
def test_gradients(kind: str, residual: bool) -> None:
    """Those of the input and of all parameters: of gates, powers, positions, and through the mean query."""
    module = build(kind, local_residual=residual)
    parameters = dict(module.named_parameters())
    mask = some_mask()[:2] if residual else None

    def call(x: Tensor, *values: Tensor) -> Tensor:
        named = dict(zip(parameters, values, strict=True))
        return torch.func.functional_call(module, named, (x, GRID), dict(token_mask=mask))

    inputs = (tokens(batch=2), *(p.detach().clone() for p in parameters.values()))
    assert gradcheck(call, [x.requires_grad_() for x in inputs], fast_mode=True)


@every_attention
def test_absent_tokens_give_zeros_to_the_projection(kind: str) -> None:
    """This includes samples without any token. The outputs are then the projection's bias."""
    module = build(kind)
    mask = some_mask()
    out, grads = run(module, tokens(), token_mask=mask)
    assert torch.equal(out[~mask], module.proj.bias.expand_as(out[~mask]))
    assert not grads["x"][~mask].any()


@every_attention
def test_a_mask_that_is_all_true_changes_nothing(kind: str) -> None:
    module = build(kind)
    out, grads = run(module, tokens())
    masked_out, masked_grads = run(module, tokens(), token_mask=torch.ones(3, N, dtype=torch.bool))
    torch.testing.assert_close(masked_out, out, atol=1e-12, rtol=1e-12)
    for name in grads:
        torch.testing.assert_close(masked_grads[name], grads[name], atol=1e-9, rtol=1e-9, msg=name)


@every_attention
@pytest.mark.parametrize("masked", [False, True])
def test_one_token(kind: str, masked: bool) -> None:
    module = build(kind, num_prefix_tokens=0, grid=(1, 1))
    x = tokens(1).requires_grad_()
    mask = torch.tensor([[True], [True], [False]]) if masked else None
    out = module(x, (1, 1), token_mask=mask)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert out.isfinite().all()
    assert grad.isfinite().all()
    with warnings.catch_warnings():  # no warning about the order of dimensions: a module knows the order of its rows
        warnings.simplefilter("error")
        module(x, (1, 1), token_mask=mask)


@every_attention
@pytest.mark.parametrize("masked", [False, True])
def test_half_precision_stays_finite_far_from_zero(kind: str, masked: bool) -> None:
    """4,096 tokens of mean 20 sum to more than float16 holds."""
    torch.manual_seed(0)
    module = build_variant(kind, DIM, HEADS, grid=(64, 64), position_conv=True).half()
    x = (tokens(4096, batch=1) + 20).half()
    mask = torch.ones(1, 4096, dtype=torch.bool) if masked else None
    with torch.no_grad():
        out = module(x, (64, 64), token_mask=mask)
    assert out.dtype == torch.float16
    assert out.isfinite().all()


@every_attention
def test_half_precision_of_tokens_of_zeros(kind: str) -> None:
    """float16 rounds the eps of a norm to zero. Absent tokens are zeros too, if the projection has no bias."""
    module = build(kind, qkv_bias=False).half()
    x = tokens().half()
    out, grads = run(module, x, token_mask=some_mask())
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in grads.values())
    x[0, 2] = 0
    assert module(x, GRID).isfinite().all()


@every_attention
def test_an_empty_batch(kind: str) -> None:
    out, grads = run(build(kind, local_residual=True), tokens(batch=0))
    assert out.shape == (0, N, DIM)
    assert all((grad == 0).all() for grad in grads.values())


@every_attention
def test_a_grid_that_nothing_needs_is_not_looked_at(kind: str) -> None:
    """Neither one that is wrong, nor the one that is missing where all tokens are prefix tokens."""
    module = build(kind, position_conv=False, local_residual=False)
    if module.uses_grid():
        with pytest.raises(ValueError, match="grid 5×5 with 1 prefix tokens"):
            module(tokens(), (5, 5))
        return
    assert torch.equal(module(tokens(), (5, 5)), module(tokens()))
    assert module(tokens(PREFIX)).shape == (3, PREFIX, DIM)


def test_the_mean_of_many_tokens_in_half_precision() -> None:
    x = torch.full((1, 4096, 16), 20.0, dtype=torch.float16)
    mean = masked_mean(x, torch.ones(1, 4096, dtype=torch.bool))
    assert mean.dtype == torch.float16
    assert torch.equal(mean, masked_mean(x, None))


@every_attention
def test_autocast_reaches_the_output_projection(kind: str) -> None:
    """Nothing in between widens activations to the parameters' float32."""
    module = build(kind).float()
    seen = []
    module.proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        out = module(tokens().float(), GRID, token_mask=some_mask())
    assert (seen, out.dtype) == ([torch.bfloat16], torch.bfloat16)


@every_attention
def test_prefix_tokens_take_no_part_in_the_positional_convolution(kind: str) -> None:
    """Neither its weight nor its bias affects them."""
    module = build(kind)
    with torch.no_grad():
        before = module(tokens(), GRID)
        module.position.weight.add_(1)
        module.position.bias.add_(1)
        after = module(tokens(), GRID)
    torch.testing.assert_close(after[:, :PREFIX], before[:, :PREFIX], atol=1e-12, rtol=1e-12)
    assert not torch.isclose(after[:, PREFIX:], before[:, PREFIX:]).any()


@every_attention
def test_every_module_that_can_be_called_is_called(kind: str) -> None:
    """Hooks, adapters and quantisers work on each of them. Modules that are never called have no forward.

    Each is called once, but for an affine map, which queries and keys share.
    """
    module = build(kind)
    calls: Counter[str] = Counter()
    for name, part in module.named_modules():
        part.register_forward_hook(lambda *_, name=name: calls.update([name]))
    module(tokens(), GRID)
    for name, part in module.named_modules():
        has_forward = type(part).forward is not nn.Module.forward
        assert calls[name] == has_forward * (2 if name == "affine" else 1), name


def test_the_projection_of_patches_is_a_convolution_that_is_called() -> None:
    """An adapter that replaces it, or a hook, therefore changes the embedding."""
    embed = PatchEmbed(4, 3, 6)
    x = torch.randn(2, 3, 9, 10)
    assert isinstance(embed.proj, nn.Conv2d)
    before = embed(x)
    handle = embed.proj.register_forward_hook(lambda _, args, out: out + 1)
    torch.testing.assert_close(embed(x), before + 1)
    handle.remove()
    plain = nn.Conv2d(3, 6, 4, stride=4)
    plain.load_state_dict(embed.proj.state_dict())
    torch.testing.assert_close(embed.proj(x), plain(x))  # borders that fill no patch left out
    embed.proj = plain
    torch.testing.assert_close(embed(x), before)
