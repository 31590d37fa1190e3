"""The mathematics: InLine attention against its definition, its propositions, its precision and its errors."""

import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F

from inline_attention.ops import (
    FEATURE_MAPS,
    FeatureMap,
    attention_matrix,
    inline_attention,
    inline_attention_packed,
    linear_attention,
    local_residual,
)
from inline_attention.ops.checks import warn_of_order

MAPS = sorted(FEATURE_MAPS)
# Tokens of a 4×5 map behind one prefix token.
BATCH, PREFIX, GRID, HEADS, DIM = 2, 1, (4, 5), 3, 4
TOKENS = PREFIX + GRID[0] * GRID[1]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(tokens: int = TOKENS, *, queries: int | None = None, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    lengths = (queries or tokens, tokens, tokens)
    return [randn(BATCH, n, HEADS, DIM, seed=i, dtype=dtype) for i, n in enumerate(lengths)]


def local_kernels(batch: int = BATCH) -> Tensor:
    return randn(batch, HEADS, DIM, 9, seed=3)


def some_mask() -> Tensor:
    """Absent tokens in the middle, at the end, and a different number in each sample."""
    mask = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    mask[0, [3, 7, 8, TOKENS - 1]] = False
    mask[1, -5:] = False
    return mask


def apply_matrix(matrix: Tensor, v: Tensor) -> Tensor:
    """(B, heads, Nq, N) times (B, N, heads, d)"""
    return torch.einsum("bhqn,bnhd->bqhd", matrix, v)


def definition(q: Tensor, k: Tensor, v: Tensor, feature_map: str, scale: float) -> Tensor:
    """The paper's weights, token by token, with no vectorised step to hide a mistake in."""
    phi_q, phi_k = (FEATURE_MAPS[feature_map].apply(x) for x in (q, k))
    count = k.shape[1]
    out = torch.zeros_like(q)
    for b, i, h in itertools.product(range(q.shape[0]), range(q.shape[1]), range(q.shape[2])):
        scores = torch.stack([phi_q[b, i, h] @ phi_k[b, j, h] for j in range(count)])
        weights = scale / count * scores - scale / count**2 * scores.sum() + 1 / count
        out[b, i, h] = sum(weights[j] * v[b, j, h] for j in range(count))
    return out


def local_by_convolution(v: Tensor, weight: Tensor) -> Tensor:
    """The 3×3 residual of the map behind the prefix by PyTorch's convolution, one group a sample and channel."""
    batch = v.shape[0]
    v_map = v[:, PREFIX:].reshape(batch, *GRID, -1).permute(0, 3, 1, 2).reshape(1, -1, *GRID)
    out = F.conv2d(v_map, weight.reshape(-1, 1, 3, 3), padding=1, groups=v_map.shape[1])
    tokens = out.reshape(batch, -1, GRID[0] * GRID[1]).mT.reshape(batch, -1, *v.shape[2:])
    return torch.cat([torch.zeros_like(v[:, :PREFIX]), tokens], dim=1)


def assert_close(actual: Tensor, expected: Tensor, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, atol=atol, rtol=0)


# The two forms


@pytest.mark.parametrize("feature_map", MAPS)
def test_state_form_is_the_definition(feature_map: str) -> None:
    q, k, v = qkv()
    assert_close(inline_attention(q, k, v, feature_map=feature_map), definition(q, k, v, feature_map, DIM**-0.5))
    assert_close(inline_attention(q, k, v, feature_map=feature_map, scale=1.7), definition(q, k, v, feature_map, 1.7))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("feature_map", MAPS)
def test_state_form_is_the_matrix_form(feature_map: str, masked: bool) -> None:
    q, k, v = qkv()
    mask = some_mask() if masked else None
    matrix = attention_matrix(q, k, feature_map=feature_map, token_mask=mask, query_mask=mask)
    out = inline_attention(q, k, v, feature_map=feature_map, token_mask=mask, query_mask=mask)
    assert_close(out, apply_matrix(matrix, v))


@pytest.mark.parametrize("feature_map", ["relu", "exp"])
def test_linear_attention_is_its_matrix_form(feature_map: str) -> None:
    q, k, v = qkv()
    mask = some_mask()
    matrix = attention_matrix(q, k, kind="linear", feature_map=feature_map, token_mask=mask, query_mask=mask)
    assert_close(
        linear_attention(q, k, v, feature_map=feature_map, token_mask=mask, query_mask=mask), apply_matrix(matrix, v)
    )


@pytest.mark.parametrize("scale", [0.0, -1.0, 5.0])
def test_linear_attention_does_not_depend_on_the_scale(scale: float) -> None:
    q, k, v = (x.abs() for x in qkv())
    assert torch.equal(linear_attention(q, k, v, scale=scale), linear_attention(q, k, v))
    matrix = attention_matrix(q, k, kind="linear", scale=scale)
    assert torch.equal(matrix, attention_matrix(q, k, kind="linear"))


def test_softmax_matrix_is_pytorchs_attention() -> None:
    q, k, v = qkv(queries=7)
    mask = some_mask()
    rows = (x.transpose(1, 2) for x in (q, k, v))
    expected = F.scaled_dot_product_attention(*rows, attn_mask=mask[:, None, None]).transpose(1, 2)
    assert_close(apply_matrix(attention_matrix(q, k, kind="softmax", token_mask=mask), v), expected)


def test_queries_of_another_length() -> None:
    q, k, v = qkv(queries=5)
    out = inline_attention(q, k, v, token_mask=some_mask())
    assert_close(out, apply_matrix(attention_matrix(q, k, token_mask=some_mask()), v))
    assert out.shape == q.shape


def test_strided_views_of_a_projection() -> None:
    rows = randn(BATCH, TOKENS, 3, HEADS, DIM)
    q, k, v = rows.unbind(2)
    assert not q.is_contiguous()
    assert_close(inline_attention(q, k, v), inline_attention(q.contiguous(), k.contiguous(), v.contiguous()))


@pytest.mark.parametrize("masked", [False, True])
def test_local_residual_is_a_convolution_with_a_kernel_per_sample(masked: bool) -> None:
    q, k, v = qkv()
    weight = local_kernels()
    mask = some_mask() if masked else None
    present = torch.ones(BATCH, TOKENS) if mask is None else mask
    present = present[:, :, None, None].to(v.dtype)
    expected = local_by_convolution(v * present, weight) * present
    options = dict(grid=GRID, num_prefix_tokens=PREFIX, token_mask=mask)
    with_local = inline_attention(q, k, v, local_weight=weight, query_mask=mask, **options)
    assert_close(with_local - inline_attention(q, k, v, token_mask=mask, query_mask=mask), expected)
    assert_close(local_residual(v, weight, **options), expected)


# Gradients


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("local", [False, True])
def test_gradients(feature_map: str, masked: bool, local: bool) -> None:
    q, k, v = (x[:1, :7, :2, :2].requires_grad_() for x in qkv())
    mask = torch.tensor([[True, False, True, True, True, False, True]]) if masked else None
    weight = local_kernels()[:1, :2, :2].requires_grad_() if local else None

    def call(q: Tensor, k: Tensor, v: Tensor, weight: Tensor | None) -> Tensor:
        return inline_attention(
            q, k, v, feature_map=feature_map, local_weight=weight, grid=(2, 3), num_prefix_tokens=1,
            token_mask=mask, query_mask=mask,
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, (q, k, v, weight))
    assert torch.autograd.gradgradcheck(call, (q, k, v, weight), fast_mode=True)


def test_masks_of_queries_and_keys_are_independent() -> None:
    """There may be as many queries as keys. The local residual reads present values and is added to present queries."""
    q, k, v = qkv()
    weight, keys = local_kernels(), some_mask()
    queries = keys.flip(1)
    options = dict(local_weight=weight, grid=GRID, num_prefix_tokens=PREFIX)
    out = inline_attention(q, k, v, token_mask=keys, query_mask=queries, **options)
    matrix = attention_matrix(q, k, token_mask=keys, query_mask=queries)
    present = queries[:, :, None, None]
    local = local_by_convolution(v * keys[:, :, None, None], weight) * present
    assert_close(out, apply_matrix(matrix, v) + local)
    assert_close(inline_attention(q, k, v, token_mask=keys, **options) * present, out)
    linear = attention_matrix(q, k, kind="linear", feature_map="relu", token_mask=keys, query_mask=queries)
    assert_close(linear_attention(q, k, v, token_mask=keys, query_mask=queries), apply_matrix(linear, v))


@pytest.mark.parametrize("attend", [inline_attention, linear_attention])
def test_a_token_mask_says_nothing_of_queries(attend: Callable[..., Tensor]) -> None:
    """Cross-attention with as many queries as keys: every query is there, and gets what it gets among more queries."""
    q, k, v = qkv()
    mask = some_mask()
    more = torch.cat([q, randn(BATCH, 3, HEADS, DIM, seed=7)], 1)
    out = attend(q, k, v, token_mask=mask)
    assert_close(out, attend(more, k, v, token_mask=mask)[:, :TOKENS])
    assert (out.abs().sum((2, 3)) > 0).all()
    for kind in ("inline", "linear", "softmax"):
        matrix = attention_matrix(q, k, kind=kind, feature_map="exp", token_mask=mask)
        assert (matrix.abs().sum((1, 3)) > 0).all()


def test_second_derivatives_of_one_tensor_in_three_places() -> None:
    x = randn(1, 5, 1, 2).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda x: inline_attention(x, x, x), (x,))
    weight = local_kernels()[:1, :1, :2].requires_grad_()
    assert torch.autograd.gradgradcheck(lambda v, w: local_residual(v, w, grid=(1, 5)), (x, weight))


@pytest.mark.parametrize("argument", range(4))
def test_transforms_of_torch_func(argument: int) -> None:
    mask = some_mask()
    q, k, v = (x.masked_fill(~mask[:, :, None, None], torch.nan)[:, :7, :1, :2] for x in qkv())
    tensors = [q, k, v, local_kernels()[:, :1, :2]]
    mask = mask[:, :7]

    def call(x: Tensor) -> Tensor:
        q, k, v, weight = (x if i == argument else tensor for i, tensor in enumerate(tensors))
        return inline_attention(
            q, k, v, feature_map="exp", local_weight=weight, grid=(2, 3), num_prefix_tokens=1, token_mask=mask,
            query_mask=mask,
        )  # fmt: skip

    x = tensors[argument]
    expected = torch.autograd.functional.jacobian(call, x)
    assert_close(torch.func.jacrev(call)(x), expected)
    assert_close(torch.func.jacfwd(call)(x), expected)
    direction = randn(*x.shape, seed=7)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(call(forward_ad.make_dual(x, direction))).tangent
        assert_close(tangent, (expected * direction).flatten(4).sum(-1))
    several = torch.stack([x, 2 * x])
    assert_close(torch.func.vmap(call)(several), torch.stack([call(y) for y in several]))


@pytest.mark.parametrize("places", ["three tensors", "one tensor"])
def test_gradients_of_one_compiled_graph(places: str) -> None:
    """Self-attention passes one mask for tokens and queries, and may pass one tensor as q, k and v."""
    torch._dynamo.reset()
    tensors = [randn(BATCH, TOKENS, HEADS, DIM).requires_grad_() for _ in range(3 if places == "three tensors" else 1)]
    mask = some_mask()

    def call(*tensors: Tensor) -> Tensor:
        q, k, v = tensors if len(tensors) == 3 else tensors * 3
        return inline_attention(q, k, v, token_mask=mask, query_mask=mask)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected, found = (torch.autograd.grad(f(*tensors).square().sum(), tensors) for f in (call, compiled))
    for x, y in zip(found, expected, strict=True):
        assert_close(x, y)


def test_gradients_of_queries_of_another_length() -> None:
    q, k, v = (x[:1, :9, :2, :2].requires_grad_() for x in qkv(queries=3))
    mask = some_mask()[:1, :9]
    assert torch.autograd.gradcheck(lambda *x: inline_attention(*x, token_mask=mask, feature_map="exp"), (q, k, v))


def test_gradients_of_packed_images() -> None:
    q, k, v = (x[0, :11, :2, :2].requires_grad_() for x in qkv())
    weight = local_kernels()[:, :2, :2].requires_grad_()
    bounds, grids = torch.tensor([0, 7, 11]), [(2, 3), (3, 1)]

    def call(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Tensor:
        return inline_attention_packed(
            q, k, v, cu_seqlens=bounds, grids=grids, local_weight=weight, num_prefix_tokens=1, feature_map="relu"
        )

    assert torch.autograd.gradcheck(call, (q, k, v, weight))


def test_the_backward_keeps_inputs_and_state_alone() -> None:
    """Nothing of the size of the sequence is saved beyond q, k, v: no centred copies, no products."""
    tokens, grid = 512, (16, 32)
    q, k, v = (torch.randn(1, tokens, 2, 8, requires_grad=True) for _ in range(3))
    weight = torch.randn(1, 2, 8, 9, requires_grad=True)
    mask = torch.ones(1, tokens, dtype=torch.bool)
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = inline_attention(q, k, v, local_weight=weight, grid=grid, token_mask=mask, feature_map="relu")
    inputs = {x.data_ptr() for x in (q, k, v, weight, mask)}
    extra = sum(x.numel() for x in saved if x.data_ptr() not in inputs)
    assert extra == 2 * 8 * 8 + 2 * (2 * 8)  # S, k̄ and v̄
    out.sum().backward()
    assert all(x.grad is not None for x in (q, k, v, weight))


# Properties


@pytest.mark.parametrize("kind", ["inline", "softmax"])
@pytest.mark.parametrize("feature_map", MAPS)
def test_rows_sum_to_one(kind: str, feature_map: str) -> None:
    q, k, _ = qkv(queries=6)
    matrix = attention_matrix(q, k, kind=kind, feature_map=feature_map, token_mask=some_mask())
    assert matrix.shape == (BATCH, HEADS, 6, TOKENS)
    assert_close(matrix.sum(-1), torch.ones_like(matrix[..., 0]))


def test_weights_may_be_negative() -> None:
    q, k, _ = qkv()
    assert attention_matrix(10 * q, k).min() < 0
    assert attention_matrix(10 * q, k, kind="softmax").min() >= 0


@pytest.mark.parametrize("feature_map", MAPS)
def test_permuted_tokens_permute_the_output(feature_map: str) -> None:
    tensors = qkv()
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(5))
    out = inline_attention(*tensors, feature_map=feature_map)
    assert_close(inline_attention(*(x[:, order] for x in tensors), feature_map=feature_map), out[:, order])


vectors = st.lists(st.floats(-3, 3), min_size=3, max_size=3).map(lambda x: torch.tensor(x, dtype=torch.float64))
key_sets = st.integers(0, 2**32 - 1).map(lambda seed: randn(8, 3, seed=seed))


def rows_of(kind: str, p: Tensor, q: Tensor, keys: Tensor, feature_map: str) -> Tensor:
    """The attention rows of two queries over one set of keys → (2, N)"""
    queries = torch.stack([p, q])[None, :, None]
    return attention_matrix(queries, keys[None, :, None], kind=kind, feature_map=feature_map)[0, 0]


def centred_rank(keys: Tensor, feature_map: str) -> int:
    phi = FEATURE_MAPS[feature_map].apply(keys)
    return int(torch.linalg.matrix_rank(phi - phi.mean(0), atol=1e-3))


@settings(max_examples=30, deadline=None)
@given(p=vectors, q=vectors, keys=key_sets, feature_map=st.sampled_from(["identity", "leaky_relu", "exp"]))
def test_inline_is_injective(p: Tensor, q: Tensor, keys: Tensor, feature_map: str) -> None:
    """Where φ is injective and the centred keys span the space, different queries get different rows."""
    if centred_rank(keys, feature_map) < 3:
        return
    phi = FEATURE_MAPS[feature_map].apply
    distance = (phi(p) - phi(q)).norm()
    rows = rows_of("inline", p, q, keys, feature_map)
    # The rows differ by the centred keys applied to φ(p) − φ(q): at least by their smallest singular value.
    centred = phi(keys) - phi(keys).mean(0)
    floor = torch.linalg.svdvals(centred)[-1] * distance * 3**-0.5 / 8
    assert (rows[0] - rows[1]).norm() >= 0.999 * floor - 1e-12
    if (p - q).norm() > 1e-3:
        assert (rows[0] - rows[1]).norm() > 1e-9


@settings(max_examples=20, deadline=None)
@given(p=vectors, factor=st.floats(1.5, 20), keys=key_sets, feature_map=st.sampled_from(["identity", "relu"]))
def test_linear_attention_confuses_collinear_queries(p: Tensor, factor: float, keys: Tensor, feature_map: str) -> None:
    """φ(factor·p) = factor·φ(p), and the division cancels the factor: two queries, one row. InLine tells them apart."""
    phi = FEATURE_MAPS[feature_map].apply(p)
    phi_keys = FEATURE_MAPS[feature_map].apply(keys)
    # Away from a vanishing denominator, where the eps that guards it would show.
    if (phi @ phi_keys.sum(0)).abs() < 0.5:
        return
    linear = rows_of("linear", p, factor * p, keys, feature_map)
    assert_close(linear[0], linear[1], atol=1e-4)
    inline = rows_of("inline", p, factor * p, keys, feature_map)
    if centred_rank(keys, feature_map) == 3:
        assert (inline[0] - inline[1]).norm() > 1e-6


@settings(max_examples=20, deadline=None)
@given(p=vectors, q=vectors, keys=key_sets)
def test_softmax_is_injective_when_the_keys_span(p: Tensor, q: Tensor, keys: Tensor) -> None:
    """rank(K) = d and rank([K, 1]) = d + 1: its logarithm determines s·K·q up to a constant, and so q."""
    with_ones = torch.cat([keys, torch.ones(8, 1, dtype=keys.dtype)], dim=1)
    if torch.linalg.matrix_rank(with_ones, atol=1e-3) < 4:
        return
    log_rows = rows_of("softmax", p, q, keys, "identity").log()
    scores = torch.linalg.lstsq(with_ones, log_rows.T).solution[:3].T * 3**0.5
    assert_close(scores, torch.stack([p, q]), atol=1e-6)


def test_softmax_is_not_injective_without_its_condition() -> None:
    """Keys on a plane beside the origin, rank(K) = 2 and rank([K, 1]) = 2: moving along the normal changes nothing."""
    keys = torch.stack([torch.linspace(-1, 1, 8), torch.ones(8)], dim=1).double()
    p, q = torch.tensor([0.3, -2.0]).double(), torch.tensor([0.3, 5.0]).double()
    rows = rows_of("softmax", p, q, keys, "identity")
    assert_close(rows[0], rows[1])


def test_inline_is_not_injective_where_the_feature_map_is_not() -> None:
    keys = randn(8, 3)
    p, q = torch.tensor([1.0, -1.0, -2.0]).double(), torch.tensor([1.0, -3.0, -0.5]).double()
    rows = rows_of("inline", p, q, keys, "relu")
    assert_close(rows[0], rows[1])


# Masks and packing


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("garbage", [0.0, 1e30, float("nan"), float("inf")])
def test_masked_is_removed(feature_map: str, garbage: float) -> None:
    """Outputs and gradients are those of the tokens present, whatever the absent ones hold."""
    mask = some_mask()
    tensors = [x.masked_fill(~mask[:, :, None, None], garbage).requires_grad_() for x in qkv()]
    out = inline_attention(*tensors, feature_map=feature_map, token_mask=mask, query_mask=mask)
    upstream = randn(*out.shape, seed=9)
    again = torch.autograd.grad(out, tensors, upstream, create_graph=True)
    assert all(x.isfinite().all() for x in (*again, *torch.autograd.grad(sum(x.sum() for x in again), tensors)))
    out = inline_attention(*tensors, feature_map=feature_map, token_mask=mask, query_mask=mask)
    out.backward(upstream)
    assert (out[~mask] == 0).all()
    for b in range(BATCH):
        present = mask[b]
        removed = [x.detach()[b : b + 1, present].requires_grad_() for x in tensors]
        expected = inline_attention(*removed, feature_map=feature_map)
        expected.backward(upstream[b : b + 1, present])
        assert_close(out[b, present], expected[0])
        for x, y in zip(tensors, removed, strict=True):
            assert x.grad is not None
            assert y.grad is not None
            assert_close(x.grad[b, present], y.grad[0])
            assert (x.grad[b, ~present] == 0).all()


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("garbage", [0.0, float("nan"), float("inf")])
def test_masked_is_removed_from_linear_attention(feature_map: str, garbage: float) -> None:
    mask = some_mask()
    tensors = [x.abs().masked_fill(~mask[:, :, None, None], garbage).requires_grad_() for x in qkv()]
    out = linear_attention(*tensors, feature_map=feature_map, token_mask=mask, query_mask=mask)
    upstream = randn(*out.shape, seed=9)
    grads = torch.autograd.grad(out, tensors, upstream)
    for b in range(BATCH):
        removed = [x.detach()[b : b + 1, mask[b]].requires_grad_() for x in tensors]
        expected = linear_attention(*removed, feature_map=feature_map)
        expected_grads = torch.autograd.grad(expected, removed, upstream[b : b + 1, mask[b]])
        assert_close(out[b, mask[b]], expected[0])
        for x, y in zip(grads, expected_grads, strict=True):
            assert_close(x[b, mask[b]], y[0])
            assert (x[b, ~mask[b]] == 0).all()


@pytest.mark.parametrize("kind", ["inline", "linear", "softmax"])
@pytest.mark.parametrize("garbage", [0.0, float("nan"), float("inf")])
def test_masked_is_removed_from_a_matrix(kind: str, garbage: float) -> None:
    """This includes samples without any token."""
    mask = some_mask()
    mask[1] = False
    q, k = (x.abs().masked_fill(~mask[:, :, None, None], garbage).requires_grad_() for x in qkv()[:2])
    matrix = attention_matrix(q, k, kind=kind, token_mask=mask, query_mask=mask)
    upstream = randn(*matrix.shape, seed=9)
    grads = torch.autograd.grad(matrix, (q, k), upstream)
    present = mask[0]
    removed = [x.detach()[:1, present].requires_grad_() for x in (q, k)]
    expected = attention_matrix(*removed, kind=kind)
    expected_grads = torch.autograd.grad(expected, removed, upstream[:1][:, :, present][..., present])
    assert_close(matrix[:1][:, :, present][..., present], expected)
    assert not matrix[1].any()
    for x, y in zip(grads, expected_grads, strict=True):
        assert_close(x[0, present], y[0])
        assert not x[0, ~present].any()
        assert not x[1].any()


def test_a_masked_border_is_a_smaller_map() -> None:
    """Masked rows and columns at the bottom and right read as zero: the local residual sees the border of the rest."""
    q, k, v = qkv()
    weight = local_kernels()
    rows, columns = 3, 2
    present = torch.zeros(GRID, dtype=torch.bool)
    present[:rows, :columns] = True
    mask = torch.cat([torch.ones(PREFIX, dtype=torch.bool), present.flatten()])
    out = inline_attention(
        q, k, v, local_weight=weight, grid=GRID, num_prefix_tokens=PREFIX, token_mask=mask.expand(BATCH, -1)
    )
    kept = (x[:, mask] for x in (q, k, v))
    expected = inline_attention(*kept, local_weight=weight, grid=(rows, columns), num_prefix_tokens=PREFIX)
    assert_close(out[:, mask], expected)


@pytest.mark.parametrize("queries", [TOKENS, 5])
def test_a_sample_without_tokens_is_zero(queries: int) -> None:
    """This includes cross-attention, whose queries are other tokens and are present."""
    mask = some_mask()
    mask[0] = False
    q, k, v = qkv()
    tensors = [x.requires_grad_() for x in (q[:, :queries], k, v)]
    out = inline_attention(*tensors, token_mask=mask)
    out.sum().backward()
    assert (out[0] == 0).all()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)
    assert all((x.grad[0] == 0).all() for x in tensors)


@pytest.mark.parametrize("feature_map", MAPS)
@pytest.mark.parametrize("local", [False, True])
def test_packed_is_one_by_one(feature_map: str, local: bool) -> None:
    grids = [(2, 3), (1, 1), (4, 2)]
    lengths = [1 + h * w for h, w in grids]
    bounds = [0, *itertools.accumulate(lengths)]
    q, k, v = (randn(bounds[-1], HEADS, DIM, seed=i) for i in range(3))
    weight = local_kernels(len(grids)) if local else None
    options = dict(feature_map=feature_map, scale=0.7, num_prefix_tokens=1)
    packed = inline_attention_packed(
        q, k, v, cu_seqlens=torch.tensor(bounds, dtype=torch.int32), grids=grids, local_weight=weight, **options
    )
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        one = (x[None, start:end] for x in (q, k, v))
        own = None if weight is None else weight[i : i + 1]
        assert_close(packed[start:end], inline_attention(*one, local_weight=own, grid=grids[i], **options)[0])


# Precision


def textbook(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """InLine attention as one would first write it, every step in the dtype of its inputs."""
    count = q.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = (scale / count) * (q @ (k.mT @ v))
    row_sums = q @ k.sum(2, keepdim=True).mT
    return (out - (scale / count) * row_sums * v.mean(2, keepdim=True) + v.mean(2, keepdim=True)).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("mean", [0.0, 1.0, 4.0])
def test_low_precision(dtype: torch.dtype, mean: float) -> None:
    """The error is at most the textbook's in this precision, and at most twice that of rounding the exact output."""
    q, k, v = (randn(1, 784, 2, 32, seed=i) + (mean if i else 0) for i in range(3))
    low = [x.to(dtype) for x in (q, k, v)]
    exact = inline_attention(*(x.double() for x in low))  # of what low precision was given
    error = (inline_attention(*low).double() - exact).abs()
    rounding = (exact.to(dtype).double() - exact).abs()
    naive = (textbook(*low, scale=32**-0.5).double() - exact).abs().nan_to_num(nan=torch.inf)  # it may overflow
    for measure in (Tensor.max, Tensor.mean):
        assert measure(error) <= 2 * measure(rounding)
        assert measure(error) <= measure(naive)


def test_half_precision_does_not_overflow() -> None:
    """65,536 tokens of values to ±30: Σ k·v leaves the range of half precision, the result does not."""
    tokens = 65_536
    q, k = (randn(1, tokens, 1, 8, seed=i).clamp(-30, 30) for i in range(2))
    k = 30 * k / k.abs().max()
    v = 0.9 * k + 0.1 * randn(1, tokens, 1, 8, seed=2)
    low = [x.half() for x in (q, k, v)]
    exact = inline_attention(*(x.double() for x in low))
    assert exact.abs().max() < torch.finfo(torch.float16).max
    assert not (low[1].transpose(1, 2).mT @ low[2].transpose(1, 2)).isfinite().all()
    tensors = [x.requires_grad_() for x in low]
    out = inline_attention(*tensors)
    out.sum().backward()
    assert out.isfinite().all()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in tensors)
    assert (out.double() - exact).abs().max() <= 2 * (exact.half().double() - exact).abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_autocast_leaves_the_state_alone(dtype: torch.dtype) -> None:
    q, k, v = (x + 4 for x in qkv(dtype=torch.float32))
    weight = local_kernels().float()
    options = dict(local_weight=weight, grid=GRID, num_prefix_tokens=PREFIX)
    tensors = [x.clone().requires_grad_() for x in (q, k, v)]
    plain = [x.clone().requires_grad_() for x in (q, k, v)]
    with torch.autocast("cpu", dtype):
        out = inline_attention(*tensors, **options)
    expected = inline_attention(*plain, **options)
    assert torch.equal(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(tensors, plain, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_output_has_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    tensors = [x.requires_grad_() for x in qkv(dtype=dtype)]
    out = inline_attention(*tensors)
    out.sum().backward()
    assert out.dtype == dtype
    assert all(x.grad is not None and x.grad.dtype == dtype for x in tensors)


# Errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(q=randn(TOKENS, HEADS, DIM)), r"q has shape \(21, 3, 4\); expected \(B, N, heads, d\)"),
        (dict(k=torch.ones(BATCH, TOKENS, HEADS, DIM, dtype=torch.long)), "k is torch.int64; expected a floating"),
        (dict(k=randn(BATCH, TOKENS, HEADS, DIM, dtype=torch.float32)), "convert them to one dtype and device"),
        (dict(v=randn(BATCH, 5, HEADS, DIM)), r"v has shape \(2, 5, 3, 4\); expected that of k"),
        (dict(q=randn(BATCH, TOKENS, HEADS, 2)), r"q has \(heads, d\) = \(3, 2\)"),
        (dict(q=randn(1, TOKENS, HEADS, DIM)), "q is a batch of 1 but k of 2"),
        (dict(k=randn(BATCH, 0, HEADS, DIM), v=randn(BATCH, 0, HEADS, DIM)), "no token to attend to"),
        ({name: randn(BATCH, TOKENS, HEADS, 0) for name in "qkv"}, "heads of no channels"),
        (dict(token_mask=torch.ones(BATCH, TOKENS).bool().numpy()), "token_mask is a ndarray; expected a torch.Tensor"),
        (dict(token_mask=torch.ones(BATCH, TOKENS)), r"expected bool \(B, N\) = \(2, 21\)"),
        (dict(token_mask=torch.ones(BATCH, 3, dtype=torch.bool)), r"expected bool \(B, N\) = \(2, 21\)"),
        (dict(token_mask=torch.ones(TOKENS, TOKENS, dtype=torch.bool)), "a mask over pairs of tokens is impossible"),
        (dict(token_mask=torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool)), "over pairs of tokens is impossible"),
        (
            dict(token_mask=torch.ones(BATCH, TOKENS, dtype=torch.bool, device="meta")),
            "token_mask is on meta but the",
        ),
        (
            dict(local_weight=local_kernels().to("meta"), grid=(3, 7)),
            "local_weight is on meta but the tokens are on cpu",
        ),
        (dict(grid=(4, 4)), "grid 4×4 with 0 prefix tokens makes 16 tokens, but there are 21"),
        (dict(grid=(21,)), r"expected \(height, width\)"),
        (dict(grid=21), r"grid=21; expected \(height, width\)"),
        (dict(grid=(3.0, 7)), r"grid=\(3.0, 7\); expected \(height, width\) as integers"),
        (dict(grid=(2, 11), num_prefix_tokens=-1), "num_prefix_tokens=-1; expected 0 or more"),
        (dict(scale=torch.tensor(0.5)), "scale is a tensor; expected a number"),
        (dict(scale="a"), "scale='a'; expected a number"),
        (dict(grid=(-3, -7)), "pass the"),
        (dict(local_weight=local_kernels()), "local_weight needs grid"),
        (dict(local_weight=local_kernels() * 1j, grid=(3, 7)), "dtype torch.complex128; .* in floating point"),
        (
            dict(query_mask=torch.ones(BATCH, 3, dtype=torch.bool)),
            r"query_mask has .* expected bool \(B, N\) = \(2, 21\)",
        ),
        (dict(query_mask=torch.ones(BATCH, TOKENS)), "query_mask has .* dtype torch.float32"),
        (dict(k=randn(BATCH, HEADS, TOKENS, DIM), v=randn(BATCH, HEADS, TOKENS, DIM)), r"use x\.transpose\(1, 2\)"),
        (dict(local_weight=local_kernels()[..., :8], grid=(3, 7)), r"expected \(B, heads, d, 9\) = \(2, 3, 4, 9\)"),
        (
            dict(q=randn(BATCH, 5, HEADS, DIM), local_weight=local_kernels(), grid=(3, 7)),
            "there are 5 queries and 21 keys",
        ),
        (dict(feature_map="swish"), "feature_map='swish' is unknown; expected one of identity"),
        (dict(backend="cuda"), "backend='cuda' is unknown"),
    ],
)
def test_errors(arguments: dict, message: str) -> None:
    q, k, v = qkv()
    arguments = dict(q=q, k=k, v=v) | arguments
    with pytest.raises(ValueError, match=message):
        inline_attention(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(cu_seqlens=torch.tensor([0.0, 21.0])), r"expected \(images \+ 1,\) integers"),
        (dict(cu_seqlens=[0]), r"expected \(images \+ 1,\) integers"),
        (dict(cu_seqlens=[0, 4.0, 21]), r"cu_seqlens=\[0, 4.0, 21\]; expected \(images \+ 1,\) integers"),
        (dict(cu_seqlens=[0, 20]), "must rise from 0 to the token count 21"),
        (dict(cu_seqlens=torch.tensor([0, 20])), "must rise from 0 to the token count 21"),
        (dict(cu_seqlens=torch.tensor([0, 9, 9, 21])), "every image at least one token"),
        (dict(grids=[(3, 7), (1, 1)]), "there are 2 grids for 1 images"),
        (dict(grids=[(3, 6)]), "grid 3×6 with 0 prefix tokens makes 18 tokens, but there are 21"),
        (dict(num_prefix_tokens=-3), "num_prefix_tokens=-3; expected 0 or more"),
        (dict(local_weight=local_kernels(1)), "local_weight needs grids"),
        (dict(local_weight=local_kernels(2), grids=[(3, 7)]), r"expected \(B, heads, d, 9\) = \(1, 3, 4, 9\)"),
        (dict(q=randn(5, HEADS, DIM)), "packed queries and keys are the same tokens"),
    ],
)
def test_packed_errors(arguments: dict, message: str) -> None:
    q, k, v = (x[0] for x in qkv())
    arguments = dict(q=q, cu_seqlens=torch.tensor([0, TOKENS])) | arguments
    with pytest.raises(ValueError, match=message):
        inline_attention_packed(arguments.pop("q"), k, v, **arguments)


def test_unknown_kind_of_matrix() -> None:
    q, k, _ = qkv()
    with pytest.raises(ValueError, match="kind='cosine' is unknown"):
        attention_matrix(q, k, kind="cosine")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(pair_mask=torch.ones(5, 1, 1, 1, dtype=torch.bool)), r"pair_mask has shape .* = \(2, 3, 21, 21\)"),
        (dict(pair_mask=torch.ones(1, 1, 1, 1, 1, dtype=torch.bool)), "pair_mask has shape"),
        (dict(pair_mask=torch.ones(TOKENS, TOKENS)), "pair_mask is torch.float32; expected bool"),
        (dict(pair_mask=torch.ones(TOKENS, TOKENS, dtype=torch.bool, device="meta")), "pair_mask is on meta"),
        (dict(kind="softmax", bias=torch.zeros(7, HEADS, TOKENS, TOKENS)), "bias has shape"),
        (dict(kind="softmax", bias=torch.zeros(HEADS, TOKENS, 7)), "bias has shape"),
        (dict(kind="softmax", bias=torch.ones(TOKENS, TOKENS, dtype=torch.bool)), "bias is torch.bool"),
        (dict(bias=torch.zeros(TOKENS, TOKENS)), "only softmax has"),
    ],
)
def test_errors_of_a_matrix(arguments: dict, message: str) -> None:
    q, k, _ = qkv()
    with pytest.raises(ValueError, match=message):
        attention_matrix(q, k, **arguments)


@pytest.mark.parametrize("attend", [inline_attention, linear_attention])
def test_a_hint_at_rows_in_the_order_of_pytorchs_attention(attend: Callable[..., Tensor]) -> None:
    """One warning a process, and none for rows as they should be or for a single short side."""
    rows = qkv()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_order.cache_clear()
        attend(*rows)
        attend(rows[0][:, :2], *rows[1:])
        with pytest.raises(UserWarning, match=r"pass x\.transpose\(1, 2\)"):
            attend(*(x.transpose(1, 2) for x in rows))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            attend(*(x.transpose(1, 2) for x in rows))
    assert [warning.filename for warning in seen] == [__file__]


def test_a_new_feature_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference needs only an entry in FEATURE_MAPS."""
    square = FeatureMap(torch.square, lambda x, grad: 2 * x * grad)
    monkeypatch.setitem(FEATURE_MAPS, "square", square)
    tensors = [x[:1, :6, :1, :2].requires_grad_() for x in qkv()]
    assert_close(inline_attention(*tensors, feature_map="square"), definition(*tensors, "square", 2**-0.5))
    assert torch.autograd.gradcheck(lambda *x: inline_attention(*x, feature_map="square"), tensors)
