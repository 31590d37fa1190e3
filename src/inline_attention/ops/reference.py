"""InLine attention in plain PyTorch. It runs on a CPU, it is what exporters see, and the kernels are compared with it.

Everything is computed in at least float32, for every input dtype and under autocast. Sums over an image of products of
keys and values leave the range of half precision, and centring them in half precision loses the signal.

q, k and v come as (B, N, heads, d). They are copied once to (B, heads, N, d), the layout of batched products, so that
every later pass reads contiguous memory. The state S is (B, heads, d, d), token means are (B, heads, 1, d).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .feature_maps import FeatureMap
from .local import Grid, local_sum, local_sum_backward
from .precision import is_autocast_on
from .tracing import is_exporting

# Vanilla linear attention divides by a sum that can be zero.
LINEAR_EPS = 1e-6


class State(NamedTuple):
    """What all queries of a sample share: out = φ(q)·covariance + v_mean."""

    covariance: Tensor  # (B, heads, d, d): (s/n) Σ_j (φ(k_j) − k̄)(v_j − v̄)ᵀ
    k_mean: Tensor  # (B, heads, 1, d)
    v_mean: Tensor  # (B, heads, 1, d)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switches autocast off. Where it is off nothing is entered, so that exported graphs carry no such region."""
    if is_autocast_on(device):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, N, heads, d) → (B, heads, N, d), contiguous. It is always a copy, so that it may be overwritten."""
    return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format, copy=True)


def zero_absent(x: Tensor, mask: Tensor | None) -> Tensor:
    """x (B, N, …) with zeros for the tokens that a mask (B, N) says are absent, whatever x holds there."""
    return x if mask is None else x.masked_fill(~mask.view(*mask.shape, *(1,) * (x.ndim - 2)), 0)


def _zero_absent_heads_first(x: Tensor, mask: Tensor | None) -> Tensor:
    """`zero_absent` of x (B, heads, N, d)"""
    return x if mask is None else x.masked_fill(~mask[:, None, :, None], 0)


def _token_count(x: Tensor, token_mask: Tensor | None) -> Tensor | int:
    """Tokens present: N, or (B, 1, 1, 1) with a mask. A sample without any counts one, so that its sums stay zero."""
    if token_mask is None:
        return x.shape[2]
    return token_mask.sum(1).clamp(min=1).to(x.dtype)[:, None, None, None]


def _state(k: Tensor, v: Tensor, token_mask: Tensor | None, scale: float) -> State:
    """k (after φ) and v, heads first, zero where absent. They are overwritten, unless something records this."""
    count = _token_count(k, token_mask)
    k_mean = k.sum(2, keepdim=True) / count
    v_mean = v.sum(2, keepdim=True) / count
    subtract = torch.sub if torch.is_grad_enabled() or is_exporting() else Tensor.sub_
    k_centred = _zero_absent_heads_first(subtract(k, k_mean), token_mask)
    v_centred = _zero_absent_heads_first(subtract(v, v_mean), token_mask)
    return State(k_centred.mT @ v_centred * (scale / count), k_mean, v_mean)


def _product_plus(rows: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    """Rows (B, heads, N, d) times their head's matrix (B, heads, d, e), plus a row (B, heads, 1, e)"""
    out = torch.baddbmm(bias.flatten(0, 1), rows.flatten(0, 1), matrix.flatten(0, 1))
    return out.unflatten(0, rows.shape[:2])


def _to_map(x: Tensor, token_mask: Tensor | None, *, dtype: torch.dtype, grid: Grid, num_prefix_tokens: int) -> Tensor:
    """(B, N, heads, d) without its prefix, zero where absent → (B, H, W, heads·d)"""
    rows = zero_absent(x.to(dtype), token_mask)
    return rows[:, num_prefix_tokens:].reshape(x.shape[0], *grid, x.shape[2] * x.shape[3])


def _add_map(x: Tensor, grid_map: Tensor, num_prefix_tokens: int) -> Tensor:
    """x (B, N, heads, d) plus a map (B, H, W, heads·d) on the tokens after the prefix. The map is overwritten."""
    tokens = grid_map.flatten(1, 2).unflatten(2, x.shape[2:]).add_(x[:, num_prefix_tokens:])
    return tokens if num_prefix_tokens == 0 else torch.cat([x[:, :num_prefix_tokens], tokens], dim=1)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    query_mask: Tensor | None,
    *,
    feature_map: FeatureMap,
    scale: float,
    grid: Grid | None,
    num_prefix_tokens: int,
) -> tuple[Tensor, State]:
    """The output (B, Nq, heads, d) in q's dtype, and the state it was computed from."""
    dtype = accumulation_dtype(q.dtype)
    with without_autocast(q.device):
        phi_q = feature_map.apply(_heads_first(q, dtype))
        phi_k = _zero_absent_heads_first(feature_map.apply(_heads_first(k, dtype)), token_mask)
        v_ = _zero_absent_heads_first(_heads_first(v, dtype), token_mask)
        state = _state(phi_k, v_, token_mask, scale)
        out = _product_plus(phi_q, state.covariance, state.v_mean).transpose(1, 2)
        if local_weight is not None:
            assert grid is not None
            v_map = _to_map(v, token_mask, dtype=dtype, grid=grid, num_prefix_tokens=num_prefix_tokens)
            out = _add_map(out, local_sum(v_map, local_weight.to(dtype).flatten(1, 2)), num_prefix_tokens)
        return zero_absent(out, query_mask).to(q.dtype), state


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    query_mask: Tensor | None,
    state: State,
    *,
    feature_map: FeatureMap,
    scale: float,
    grid: Grid | None,
    num_prefix_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and local_weight, each in its tensor's dtype."""
    dtype = accumulation_dtype(q.dtype)
    with without_autocast(q.device):
        q_, k_ = _heads_first(q, dtype), _heads_first(k, dtype)
        v_ = _zero_absent_heads_first(_heads_first(v, dtype), token_mask)
        grad = _zero_absent_heads_first(_heads_first(grad_out, dtype), query_mask)
        count = _token_count(v_, token_mask)

        phi_q = _zero_absent_heads_first(feature_map.apply(q_), query_mask)
        grad_covariance = phi_q.mT @ grad * (scale / count)
        grad_q = feature_map.backward(q_, grad @ state.covariance.mT)
        grad_k = feature_map.backward(k_, v_.sub_(state.v_mean) @ grad_covariance.mT)
        mean_grad = grad.sum(2, keepdim=True) / count
        k_centred = feature_map.apply(k_).sub_(state.k_mean)  # overwrites k_ for the identity
        grad_v = _product_plus(k_centred, grad_covariance, mean_grad)
        grad_q, grad_k, grad_v = (x.transpose(1, 2) for x in (grad_q, grad_k, grad_v))

        grad_weight = None
        if local_weight is not None:
            assert grid is not None
            layout: dict[str, Any] = dict(dtype=dtype, grid=grid, num_prefix_tokens=num_prefix_tokens)
            grad_map, grad_weight = local_sum_backward(
                _to_map(grad_out, query_mask, **layout),
                _to_map(v, token_mask, **layout),
                local_weight.to(dtype).flatten(1, 2),
            )
            grad_v = _add_map(grad_v, grad_map, num_prefix_tokens)
            grad_weight = grad_weight.unflatten(1, local_weight.shape[1:3]).to(local_weight.dtype)
        return (
            zero_absent(grad_q, query_mask).to(q.dtype),
            zero_absent(grad_k, token_mask).to(k.dtype),
            zero_absent(grad_v, token_mask).to(v.dtype),
            grad_weight,
        )


class _InLineAttention(torch.autograd.Function):
    """Keeps the inputs and the state for the backward: nothing else of the size of the sequence."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        local_weight: Tensor | None,
        token_mask: Tensor | None,
        query_mask: Tensor | None,
        options: dict[str, Any],
    ) -> Tensor:
        out, state = forward(q, k, v, local_weight, token_mask, query_mask, **options)
        ctx.save_for_backward(q, k, v, local_weight, token_mask, query_mask, *state)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, local_weight, token_mask, query_mask, *state = ctx.saved_tensors
        inputs = (grad_out, q, k, v, local_weight, token_mask, query_mask)
        grads: tuple[Tensor | None, ...]
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            grads = _differentiable_backward(*inputs, **ctx.options)
        else:
            grads = backward(*inputs, State(*state), **ctx.options)
        return *grads, None, None, None


def _differentiable_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    query_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """The gradients as a function that autograd can differentiate again, for create_graph=True.

    `backward` treats the state as a constant. Here autograd records the forward pass, state included.
    """
    # Views, so that one tensor given as q and as k gets the gradient of each.
    q, k, v = (x.view_as(x) for x in (q, k, v))
    local_weight = None if local_weight is None else local_weight.view_as(local_weight)
    inputs = (q, k, v, local_weight)
    # Zeros before φ: autograd multiplies a gradient of zero by φ', which is NaN where an absent token is.
    cleaned = (zero_absent(q, query_mask), zero_absent(k, token_mask), zero_absent(v, token_mask), local_weight)
    out, _ = forward(*cleaned, token_mask, query_mask, **options)
    wanted = [x for x in inputs if x is not None and x.requires_grad]
    grads = iter(torch.autograd.grad(out, wanted, grad_out, create_graph=True))
    return tuple(next(grads) if x is not None and x.requires_grad else None for x in inputs)


def inline_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    query_mask: Tensor | None,
    *,
    feature_map: FeatureMap,
    scale: float,
    grid: Grid | None,
    num_prefix_tokens: int,
) -> Tensor:
    """The backend's entry. Inputs are checked and defaults filled in."""
    options: dict[str, Any] = dict(feature_map=feature_map, scale=scale, grid=grid, num_prefix_tokens=num_prefix_tokens)
    if is_exporting():  # exporters trace operations, not autograd functions
        return forward(q, k, v, local_weight, token_mask, query_mask, **options)[0]
    return _InLineAttention.apply(q, k, v, local_weight, token_mask, query_mask, options)


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    token_mask: Tensor | None,
    query_mask: Tensor | None,
    *,
    feature_map: FeatureMap,
) -> Tensor:
    """Vanilla linear attention: φ(q_i)·(Σ_j φ(k_j)v_jᵀ) / (φ(q_i)·Σ_j φ(k_j) + 1e-6)"""
    dtype = accumulation_dtype(q.dtype)
    with without_autocast(q.device):
        # Zeros before φ, because autograd multiplies by φ' of what an absent token holds; after it, for φ(0) ≠ 0.
        q_, k_, v_ = (zero_absent(x.to(dtype), m) for x, m in ((q, query_mask), (k, token_mask), (v, token_mask)))
        q_, k_ = feature_map.apply(q_), zero_absent(feature_map.apply(k_), token_mask)
        state = k_.permute(0, 2, 3, 1) @ v_.transpose(1, 2)  # (B, heads, d, d)
        out = (q_.transpose(1, 2) @ state).transpose(1, 2)
        out = out / ((q_ * k_.sum(1, keepdim=True)).sum(-1, keepdim=True) + LINEAR_EPS)
        return zero_absent(out, query_mask).to(q.dtype)
