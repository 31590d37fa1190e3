"""Functions of token rows that several attentions share. With a mask, only the tokens present count."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.ops.reference import accumulation_dtype, without_autocast


def through_state(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q_i (Σ_j k_j v_jᵀ) with the sum in at least float32: (B, N, heads, d) each → the shape of q"""
    dtype = accumulation_dtype(q.dtype)
    with without_autocast(q.device):
        q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
        return (q @ (k.mT @ v)).transpose(1, 2)


def scores(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor:
    """q_i·k_j, zero where masked: q (B, rows, heads, d), k (B, N, heads, d) → (B, heads, rows, N)"""
    products = torch.einsum("bihd,bjhd->bhij", q, k)
    return products if mask is None else products.masked_fill(~mask, 0)


def mean_of_seen(q: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of the queries (B, heads, N, d) of the tokens that each row of a mask sees → (B, heads, rows or 1, d)"""
    if mask is None:
        return q.mean(2, keepdim=True)
    return (mask.to(q.dtype) @ q) / mask.sum(-1, keepdim=True).clamp(min=1)


def softmax_of_seen(anchors: Tensor, k: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax_j(s·a·k_j): anchors (B, heads, rows or 1, d), k (B, N, heads, d) → (B, heads, rows or 1, N)"""
    products = scale * (anchors @ k.permute(0, 2, 3, 1))
    if mask is None:
        return products.softmax(-1)
    return products.masked_fill(~mask, torch.finfo(products.dtype).min).softmax(-1).masked_fill(~mask, 0)


def pad_images(images: Sequence[Tensor], length: int) -> Tensor:
    """Tokens of several images (n, C), n of each its own, as one batch (B, length, C) with zeros after them"""
    out = nn.utils.rnn.pad_sequence(list(images), batch_first=True)
    return F.pad(out, (0, 0, 0, length - out.shape[1]))
