"""InLine attention in plain PyTorch: what runs on a CPU, what exporters see, and what kernels are compared with.

Everything is computed in at least float32, whatever the inputs and whatever autocast says: products of keys and values
summed over an image leave the range of half precision, and centring them in it loses the signal.
Shapes: q, k, v come as (B, N, heads, d) and are computed with as (B, heads, N, d), heads first, which batched products
need anyway: brought there once, every later pass runs over contiguous memory. The state S is (B, heads, d, d), token
means are (B, heads, 1, d).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .feature_maps import FeatureMap, get_feature_map
from .local import local_sum, local_sum_backward
from .precision import is_autocast_on
from .tracing import is_exporting


class State(NamedTuple):
    """What all queries of a sample share: out = φ(q)·covariance + v_mean."""

    covariance: Tensor  # (B, heads, d, d): (s/n) Σ_j (φ(k_j) − k̄)(v_j − v̄)ᵀ
    k_mean: Tensor  # (B, heads, 1, d)
    v_mean: Tensor  # (B, heads, 1, d)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Nothing to switch off where autocast is off: a graph exported there carries no such region."""
    if is_autocast_on(device):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def _heads_first(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, N, heads, d) → (B, heads, N, d), contiguous, always a copy: it may be written to"""
    return x.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format, copy=True)


def _zero_masked(x: Tensor, token_mask: Tensor | None, *, heads_first: bool = True) -> Tensor:
    """x (B, heads, N, d), or (B, N, heads, d), with the rows of absent tokens at zero, whatever they held."""
    if token_mask is None:
        return x
    absent = ~token_mask[:, :, None, None]
    return x.masked_fill(absent.transpose(1, 2) if heads_first else absent, 0)


def _token_count(x: Tensor, token_mask: Tensor | None) -> Tensor | int:
    """Tokens present: N, or (B, 1, 1, 1) of them; a sample without any counts 1, so that its zeros stay zeros."""
    if token_mask is None:
        return x.shape[2]
    return token_mask.sum(1).clamp(min=1).to(x.dtype)[:, None, None, None]


def _state(k: Tensor, v: Tensor, token_mask: Tensor | None, scale: float) -> State:
    """k (after φ) and v, heads first, zeroed where absent. They are overwritten."""
    count = _token_count(k, token_mask)
    k_mean = k.sum(2, keepdim=True) / count
    v_mean = v.sum(2, keepdim=True) / count
    k_centred = _zero_masked(k.sub_(k_mean), token_mask)
    v_centred = _zero_masked(v.sub_(v_mean), token_mask)
    return State(k_centred.mT @ v_centred * (scale / count), k_mean, v_mean)


def _product_plus(rows: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
    """Rows (B, heads, N, d) times their head's matrix (B, heads, d, e), plus a row (B, heads, 1, e)"""
    out = torch.baddbmm(bias.flatten(0, 1), rows.flatten(0, 1), matrix.flatten(0, 1))
    return out.unflatten(0, rows.shape[:2])


def _to_map(
    x: Tensor, token_mask: Tensor | None, *, dtype: torch.dtype, grid: tuple[int, int], num_prefix_tokens: int
) -> Tensor:
    """(B, N, heads, d) without its prefix, zero where absent → (B, H, W, heads·d)"""
    rows = _zero_masked(x.to(dtype), token_mask, heads_first=False)
    return rows[:, num_prefix_tokens:].reshape(x.shape[0], *grid, x.shape[2] * x.shape[3])


def _add_map(x: Tensor, grid_map: Tensor, num_prefix_tokens: int) -> Tensor:
    """x (B, N, heads, d) plus a map (B, H, W, heads·d), which is overwritten, on the tokens behind the prefix."""
    tokens = grid_map.flatten(1, 2).unflatten(2, x.shape[2:]).add_(x[:, num_prefix_tokens:])
    return tokens if num_prefix_tokens == 0 else torch.cat([x[:, :num_prefix_tokens], tokens], dim=1)


def _query_mask(q: Tensor, k: Tensor, token_mask: Tensor | None) -> Tensor | None:
    """The mask speaks of the keys' tokens; of the queries only where they are the same tokens."""
    return token_mask if q.shape[1] == k.shape[1] else None


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    *,
    feature_map: FeatureMap,
    scale: float,
    grid: tuple[int, int] | None,
    num_prefix_tokens: int,
) -> tuple[Tensor, State]:
    """The output (B, Nq, heads, d) in q's dtype, and the state it was computed from."""
    dtype = accumulation_dtype(q.dtype)
    query_mask = _query_mask(q, k, token_mask)
    with without_autocast(q.device):
        phi_q = feature_map.apply(_heads_first(q, dtype))
        phi_k = _zero_masked(feature_map.apply(_heads_first(k, dtype)), token_mask)
        v_ = _zero_masked(_heads_first(v, dtype), token_mask)
        state = _state(phi_k, v_, token_mask, scale)
        out = _product_plus(phi_q, state.covariance, state.v_mean).transpose(1, 2)
        if local_weight is not None:
            assert grid is not None
            v_map = _to_map(v, token_mask, dtype=dtype, grid=grid, num_prefix_tokens=num_prefix_tokens)
            out = _add_map(out, local_sum(v_map, local_weight.to(dtype).flatten(1, 2)), num_prefix_tokens)
        return _zero_masked(out, query_mask, heads_first=False).to(q.dtype), state


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    state: State,
    *,
    feature_map: FeatureMap,
    scale: float,
    grid: tuple[int, int] | None,
    num_prefix_tokens: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v and local_weight, each in its tensor's dtype."""
    dtype = accumulation_dtype(q.dtype)
    query_mask = _query_mask(q, k, token_mask)
    with without_autocast(q.device):
        q_, k_ = _heads_first(q, dtype), _heads_first(k, dtype)
        v_ = _zero_masked(_heads_first(v, dtype), token_mask)
        grad = _zero_masked(_heads_first(grad_out, dtype), query_mask)
        count = _token_count(v_, token_mask)

        phi_q = _zero_masked(feature_map.apply(q_), query_mask)
        grad_covariance = phi_q.mT @ grad * (scale / count)
        grad_q = feature_map.backward(q_, grad @ state.covariance.mT)
        grad_k = feature_map.backward(k_, v_.sub_(state.v_mean) @ grad_covariance.mT)
        mean_grad = grad.sum(2, keepdim=True) / count
        k_centred = feature_map.apply(k_).sub_(state.k_mean)  # perhaps k_ itself, which nobody needs any more
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
            _zero_masked(grad_q, query_mask, heads_first=False).to(q.dtype),
            _zero_masked(grad_k, token_mask, heads_first=False).to(k.dtype),
            _zero_masked(grad_v, token_mask, heads_first=False).to(v.dtype),
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
        options: dict[str, Any],
    ) -> Tensor:
        out, state = forward(q, k, v, local_weight, token_mask, **options)
        ctx.save_for_backward(q, k, v, local_weight, token_mask, *state)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, local_weight, token_mask, *state = ctx.saved_tensors
        grads = backward(grad_out, q, k, v, local_weight, token_mask, State(*state), **ctx.options)
        return *grads, None, None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    local_weight: Tensor | None,
    token_mask: Tensor | None,
    *,
    feature_map: str,
    scale: float,
    grid: tuple[int, int] | None,
    num_prefix_tokens: int,
) -> Tensor:
    """The backend's entry: inputs are checked, defaults filled in."""
    options: dict[str, Any] = dict(
        feature_map=get_feature_map(feature_map), scale=scale, grid=grid, num_prefix_tokens=num_prefix_tokens
    )
    if is_exporting():  # exporters trace operations, not autograd functions
        return forward(q, k, v, local_weight, token_mask, **options)[0]
    return _InLineAttention.apply(q, k, v, local_weight, token_mask, options)
