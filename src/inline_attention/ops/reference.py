"""Linear attention in plain PyTorch. It runs on a CPU, it is what exporters see, and the kernels are compared with it.

Everything is computed in at least float32, for every input dtype and under autocast. Sums over an image of products of
keys and values leave the range of half precision, and centring them in half precision loses the signal.

q, k and v come as (B, N, heads, d). They are copied once to (B, heads, N, d), the layout of batched products, so that
every later pass reads contiguous memory. The state S is (B, heads, d, e), token means are (B, heads, 1, d).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .feature_maps import FeatureMap
from .local import Grid, local_sum, local_sum_backward
from .precision import is_autocast_on
from .tracing import has_tangents, is_exporting, needs_plain_operations

# Vanilla linear attention divides by a sum that can be zero.
LINEAR_EPS = 1e-6


class Inputs(NamedTuple):
    """The tensors of a call, checked."""

    q: Tensor  # (B, Nq, heads, d)
    k: Tensor  # (B, N, heads, d)
    v: Tensor  # (B, N, heads, e)
    local_weight: Tensor | None = None  # (B, heads, e, 9)
    token_weight: Tensor | None = None  # (B, heads, N): shares, of sum one
    query_offset: Tensor | None = None  # (B, 1, heads, d)
    token_mask: Tensor | None = None  # (B, N) bool
    query_mask: Tensor | None = None  # (B, Nq) bool


class State(NamedTuple):
    """What all queries of a sample share: out = g(z)·φ(q)·covariance + f(z)·v_mean with z = s·φ(q)·k_mean."""

    covariance: Tensor  # (B, heads, d, e): s·Σ_j p_j (φ(k_j) − k̄)(v_j − v̄)ᵀ, p_j = 1/n or the token weight
    k_mean: Tensor  # (B, heads, 1, d)
    v_mean: Tensor  # (B, heads, 1, e)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switches autocast off. If it is off already, nothing is entered: an exported graph then has no such region."""
    if is_autocast_on(device):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, N, heads, d) → (B, heads, N, d), contiguous. It is always a copy, so that it may be overwritten."""
    return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format, copy=True)


def zero_absent(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, N, …) with zeros for the tokens that a mask (B, N) says are absent, whatever x holds there."""
    return x if mask is None else x.masked_fill(~mask.view(*mask.shape, *(1,) * (x.ndim - 2)), 0)


def masked_mean(x: Tensor, token_mask: Tensor | None) -> Tensor:
    """Mean of the tokens present, its sum in at least float32: x (B, N, C), token_mask (B, N) → (B, C) in x's dtype"""
    if token_mask is None:
        return x.mean(1)  # PyTorch sums in float32 by itself here
    total = zero_absent(x, token_mask).sum(1, dtype=accumulation_dtype(x.dtype))
    return (total / token_mask.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)


def _zero_absent_heads_first(x: Tensor, mask: Tensor | None) -> Tensor:
    """`zero_absent` of x (B, heads, N, d)"""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0)


def token_count(x: Tensor, mask: Tensor | None) -> Tensor | int:
    """Tokens present of x (B, N, heads, d): N, or (B, 1, 1, 1) with a mask. At least 1, to divide by."""
    if mask is None:
        return max(x.shape[1], 1)
    return mask.sum(1).clamp(min=1).to(accumulation_dtype(x.dtype))[:, None, None, None]


def mean_of_rows(rows: Tensor, mask: Tensor | None) -> Tensor:
    """Mean of the rows present, zero without any: (B, N, heads, d) → (B, 1, heads, d) in at least float32"""
    total = zero_absent(rows, mask).sum(1, keepdim=True, dtype=accumulation_dtype(rows.dtype))
    return total / token_count(rows, mask)


def _state(k: Tensor, v: Tensor, inputs: Inputs, scale: float) -> State:
    """The state of φ(k) and v (B, heads, N, d), zero where absent. Both are overwritten if no graph records this."""
    mask, weight = inputs.token_mask, inputs.token_weight
    count = token_count(inputs.k, mask)
    subtract = torch.sub if torch.is_grad_enabled() or needs_plain_operations() else Tensor.sub_
    if weight is None:
        k_mean = k.sum(2, keepdim=True) / count
        v_mean = v.sum(2, keepdim=True) / count
    else:
        shares = weight.to(k.dtype).unsqueeze(2)  # (B, heads, 1, N)
        k_mean, v_mean = shares @ k, shares @ v
    k_centred = _zero_absent_heads_first(subtract(k, k_mean), mask)
    v_centred = _zero_absent_heads_first(subtract(v, v_mean), mask)
    if weight is None:
        return State(k_centred.mT @ v_centred * (scale / count), k_mean, v_mean)
    return State(k_centred.mT @ (v_centred * shares.mT) * scale, k_mean, v_mean)


def factors(z: Tensor, normalization: str, eps: Tensor | float) -> tuple[Tensor | float, Tensor | float]:
    """g and f of out = g·φ(q)·S + f·v̄. `eps` is what "divide" adds to z."""
    if normalization == "subtract":
        return 1.0, 1.0
    if normalization == "divide":
        g = _inverse(z + eps)
        return g, z * g
    return 1 + _inverse(z), 1.0


def _inverse(z: Tensor) -> Tensor:
    """1/z, and zero for z = 0, where φ(q) is zero or orthogonal to all keys, or a divisor at its pole"""
    return (1 / z.masked_fill(z == 0, 1)).masked_fill(z == 0, 0)


def normalised_weight(token_weight: Tensor, token_mask: Tensor | None) -> Tensor:
    """Shares of sum one over the tokens present: (B, N, heads) → (B, heads, N), at least float32"""
    weight = zero_absent(token_weight.to(accumulation_dtype(token_weight.dtype)), token_mask).permute(0, 2, 1)
    total = weight.sum(2, keepdim=True)
    return weight / total.where(total > 0, 1)


def anchor_weight(anchor: Tensor, k: Tensor, token_mask: Tensor | None, scale: float) -> Tensor:
    """softmax_j(s·a·k_j) over the tokens present: a (B, 1, heads, d), k (B, N, heads, d) → (B, heads, N)"""
    dtype = accumulation_dtype(k.dtype)
    with without_autocast(k.device):
        k = zero_absent(k.to(dtype), token_mask)
        # From the first key. Scores of keys that are all far from zero would be large and lose digits.
        scores = scale * (anchor.to(dtype) * (k - k[:, :1])).sum(-1).permute(0, 2, 1)
        if token_mask is None:
            return scores.softmax(-1)
        absent = ~token_mask[:, None]
        # Finite, because the softmax of −inf alone, where a sample has no token, is NaN.
        return scores.masked_fill(absent, torch.finfo(dtype).min).softmax(-1).masked_fill(absent, 0)


def _product_plus(rows: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    """Rows (B, heads, N, d) times their head's matrix (B, heads, d, e), plus a row (B, heads, 1, e)"""
    out = torch.baddbmm(bias.flatten(0, 1), rows.flatten(0, 1), matrix.flatten(0, 1))
    return out.unflatten(0, rows.shape[:2])


def _after_prefix(x: Tensor, num_prefix_tokens: int) -> Tensor:
    """x (B, N, …) without its prefix. A slice of everything would be an `alias` in a graph, which coremltools lacks."""
    return x if num_prefix_tokens == 0 else x[:, num_prefix_tokens:]


def _to_map(x: Tensor, token_mask: Tensor | None, *, dtype: torch.dtype, grid: Grid, num_prefix_tokens: int) -> Tensor:
    """(B, N, heads, d) without its prefix, zero where absent → (B, H, W, heads·d)"""
    rows = zero_absent(x.to(dtype), token_mask)
    return _after_prefix(rows, num_prefix_tokens).reshape(x.shape[0], *grid, x.shape[2] * x.shape[3])


def _add_map(x: Tensor, grid_map: Tensor, num_prefix_tokens: int) -> Tensor:
    """x (B, N, heads, d) plus a map (B, H, W, heads·d) on the tokens after the prefix. The map may be overwritten."""
    add = torch.add if needs_plain_operations() else Tensor.add_
    tokens = add(grid_map.flatten(1, 2).unflatten(2, x.shape[2:]), _after_prefix(x, num_prefix_tokens))
    return tokens if num_prefix_tokens == 0 else torch.cat([x[:, :num_prefix_tokens], tokens], dim=1)


def _shifted_queries(inputs: Inputs, dtype: torch.dtype) -> Tensor:
    """q less its offset, heads first"""
    q = _heads_first(inputs.q, dtype)
    return q if inputs.query_offset is None else q - inputs.query_offset.to(dtype).transpose(1, 2)


def forward(
    inputs: Inputs,
    *,
    normalization: str,
    feature_map: FeatureMap,
    scale: float,
    grid: Grid | None,
    num_prefix_tokens: int,
) -> tuple[Tensor, State]:
    """The output (B, Nq, heads, e) in q's dtype, and the state it was computed from."""
    q, k, v, local_weight, token_mask = inputs.q, inputs.k, inputs.v, inputs.local_weight, inputs.token_mask
    dtype = accumulation_dtype(q.dtype)
    with without_autocast(q.device):
        phi_q = feature_map.apply(_shifted_queries(inputs, dtype))
        phi_k = _zero_absent_heads_first(feature_map.apply(_heads_first(k, dtype)), token_mask)
        v_ = _zero_absent_heads_first(_heads_first(v, dtype), token_mask)
        state = _state(phi_k, v_, inputs, scale)
        if normalization == "subtract":
            out = _product_plus(phi_q, state.covariance, state.v_mean)
        else:
            z = scale * (phi_q @ state.k_mean.mT)
            g, f = factors(z, normalization, scale * LINEAR_EPS / token_count(v, token_mask))
            out = g * (phi_q @ state.covariance) + f * state.v_mean
        out = out.transpose(1, 2)
        if local_weight is not None:
            assert grid is not None
            v_map = _to_map(v, token_mask, dtype=dtype, grid=grid, num_prefix_tokens=num_prefix_tokens)
            out = _add_map(out, local_sum(v_map, local_weight.to(dtype).flatten(1, 2)), num_prefix_tokens)
        return zero_absent(out, inputs.query_mask).to(q.dtype), state


def backward(
    grad_out: Tensor,
    inputs: Inputs,
    state: State,
    *,
    normalization: str,
    feature_map: FeatureMap,
    scale: float,
    grid: Grid | None,
    num_prefix_tokens: int,
) -> tuple[Tensor | None, ...]:
    """Gradients of the first six tensors of `inputs`, each in its tensor's dtype."""
    q, k, v, local_weight, token_weight, query_offset, token_mask, query_mask = inputs
    dtype = accumulation_dtype(q.dtype)
    with without_autocast(q.device):
        q_, k_ = _shifted_queries(inputs, dtype), _heads_first(k, dtype)
        v_ = _zero_absent_heads_first(_heads_first(v, dtype), token_mask)
        grad = _zero_absent_heads_first(_heads_first(grad_out, dtype), query_mask)
        count = token_count(v, token_mask)
        phi_q = _zero_absent_heads_first(feature_map.apply(q_), query_mask)

        # Gradients of φ(q)·S, of v̄ and of k̄. The factor 1/n or p_j comes later.
        grad_product = grad_base = grad
        grad_k_mean = None
        if normalization != "subtract":
            eps = scale * LINEAR_EPS / count
            z = scale * (phi_q @ state.k_mean.mT)
            along = (grad * (phi_q @ state.covariance)).sum(-1, keepdim=True)
            g, f = factors(z, normalization, eps)
            grad_product, grad_base = g * grad, f * grad
            if normalization == "divide":
                grad_z = g * g * (eps * (grad @ state.v_mean.mT) - along)
            else:
                grad_z = -(_inverse(z) ** 2) * along
            grad_k_mean = scale * (grad_z.mT @ phi_q)
        grad_phi_q = grad_product @ state.covariance.mT
        if grad_k_mean is not None:
            grad_phi_q = grad_phi_q + scale * grad_z * state.k_mean
        grad_q = feature_map.backward(q_, grad_phi_q)
        grad_covariance = scale * (phi_q.mT @ grad_product)
        grad_v_mean = grad_base.sum(2, keepdim=True)
        if token_weight is None:
            grad_covariance, grad_v_mean = grad_covariance / count, grad_v_mean / count
            grad_k_mean = None if grad_k_mean is None else grad_k_mean / count

        v_centred = v_.sub_(state.v_mean)
        k_centred = feature_map.apply(k_) - state.k_mean
        grad_phi_k = v_centred @ grad_covariance.mT
        if grad_k_mean is not None:
            grad_phi_k += grad_k_mean
        grad_v = _product_plus(k_centred, grad_covariance, grad_v_mean)
        grad_weight = None
        if token_weight is not None:
            # Terms that are the same for all tokens are left out: they cancel, because the shares sum to one.
            grad_weight = (grad_phi_k * k_centred).sum(-1) + (v_centred @ grad_v_mean.mT).squeeze(-1)
            if token_mask is not None:
                grad_weight = grad_weight.masked_fill(~token_mask[:, None], 0)
            grad_weight = grad_weight.to(token_weight.dtype)
            share = token_weight.to(dtype).unsqueeze(-1)
            grad_phi_k, grad_v = grad_phi_k * share, grad_v * share
        grad_k = feature_map.backward(k_, grad_phi_k)
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in (grad_q, grad_k, grad_v))

        grad_local = None
        if local_weight is not None:
            assert grid is not None
            layout: dict[str, Any] = dict(dtype=dtype, grid=grid, num_prefix_tokens=num_prefix_tokens)
            grad_map, grad_local = local_sum_backward(
                _to_map(grad_out, query_mask, **layout),
                _to_map(v, token_mask, **layout),
                local_weight.to(dtype).flatten(1, 2),
            )
            grad_v = _add_map(grad_v, grad_map, num_prefix_tokens)
            grad_local = grad_local.unflatten(1, local_weight.shape[1:3]).to(local_weight.dtype)
        grad_q = zero_absent(grad_q, query_mask)
        grad_offset = None
        if query_offset is not None:
            grad_offset = -grad_q.sum(1, keepdim=True).to(query_offset.dtype)
        return (
            grad_q.to(q.dtype),
            zero_absent(grad_k, token_mask).to(k.dtype),
            zero_absent(grad_v, token_mask).to(v.dtype),
            grad_local,
            grad_weight,
            grad_offset,
        )


class _Attention(torch.autograd.Function):
    """Keeps the inputs and the state for the backward: nothing else of the size of the sequence."""

    @staticmethod
    def forward(ctx: Any, options: dict[str, Any], *tensors: Any) -> Tensor:
        out, state = forward(Inputs(*tensors), **options)
        ctx.save_for_backward(*tensors, *state)
        ctx.options = options
        return out.view_as(out)  # without the view, torch.compile in torch 2.11 takes all gradients for zero

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: activation checkpointing forbids a second access
        inputs = Inputs(*saved[: len(Inputs._fields)])
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grads = _differentiable_backward(grad_out, inputs, **ctx.options)
        else:
            grads = backward(grad_out, inputs, State(*saved[len(Inputs._fields) :]), **ctx.options)
        return None, *grads, None, None


def _with_zeros(inputs: Inputs) -> Inputs:
    """Zeros for absent tokens, before φ. Autograd multiplies a gradient of zero by φ', which is NaN for NaN."""
    return inputs._replace(
        q=zero_absent(inputs.q, inputs.query_mask),
        k=zero_absent(inputs.k, inputs.token_mask),
        v=zero_absent(inputs.v, inputs.token_mask),
    )


def _differentiable_backward(grad_out: Tensor, inputs: Inputs, **options: Any) -> tuple[Tensor | None, ...]:
    """The gradients as a function that autograd can differentiate again, for create_graph=True.

    `backward` treats the state as a constant. Here autograd records the forward pass, state included.
    """
    out, _ = forward(_with_zeros(inputs), **options)
    wanted = [x for x in inputs[:6] if x is not None and x.requires_grad]
    grads = iter(torch.autograd.grad(out, wanted, grad_out, create_graph=True))
    return tuple(next(grads) if x is not None and x.requires_grad else None for x in inputs[:6])


def attention(inputs: Inputs, **options: Any) -> Tensor:
    """The backend's entry. Options are those of `forward`, with the defaults filled in."""
    if needs_plain_operations() or has_tangents(*inputs):  # an exported program has no gradients
        return forward(inputs if is_exporting() else _with_zeros(inputs), **options)[0]
    # One tensor may be several inputs, as a mask of tokens and queries often is. Views make the inputs distinct: an
    # autograd function with repeated inputs breaks the graph of torch.compile, and `_differentiable_backward` needs a
    # gradient for each input.
    return _Attention.apply(options, *(None if x is None else x.view_as(x) for x in inputs))
