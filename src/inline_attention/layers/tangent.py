"""The tangent of softmax attention: its first-order expansion around means of the queries."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from inline_attention.ops import Grid, LocalSource, tangent_attention_projected
from inline_attention.ops.matrix import weighted_rows
from inline_attention.ops.reference import accumulation_dtype, without_autocast, zero_absent

from .attention import Attention
from .inline import OneCallAttention
from .registry import register_attention
from .tokens import mean_of_seen, softmax_of_seen

ANCHOR_STEPS = 2  # of k-means; its start matters more


@register_attention
class TangentAttention(OneCallAttention):
    """The first-order expansion of softmax attention around anchors, which are means of queries (`tangent_attention`).

    For a query q_i with the anchor a and p = softmax_j(s·a·k_j),

        out_i = Σ_j p_j·(1 + s·(q_i − a)·(k_j − k̄_p))·v_j,    k̄_p = Σ_j p_j·k_j.

    With one anchor, a is the mean query of the image and head. It comes from the mean token, which the local residual
    uses too, without a pass over the queries.

    With M anchors, a is the one nearest to q_i of M means that k-means finds among the queries of the image and head
    (`find_anchors`). Gradients flow through these means, but not through the choice of a mean. There is no kernel for
    this. The operation runs once for each anchor over all queries, and each query keeps the result of its own. So the
    cost is M times that of one anchor, plus k-means. The memory is that of one anchor, plus M states of d×d and a bit
    for each query and anchor.

    With `rope=True` queries and keys are rotated first, so the anchors are means of rotated queries.

    Args:
        anchors: M. It is an attribute, too, and may be set later.
    """

    kind = "tangent"
    normalization = "subtract"
    matrix_kind = "inline"
    follows = ("local_residual", "gain", "rope", "anchors")

    def __init__(self, dim: int, num_heads: int, *, anchors: int = 1, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if self.feature_map != "identity" or self.affine is not None:
            raise ValueError(
                f"feature_map={kwargs['feature_map']!r}: TangentAttention expands the softmax of q·k and has none"
            )
        if anchors < 1:
            raise ValueError(f"anchors={anchors}; expected 1 or more")
        self.anchors = anchors

    def uses_mean_query(self) -> bool:
        return self.anchors == 1 and not self.rope

    def attend(
        self,
        projections: Sequence[Tensor],
        *,
        grid: Grid,
        token_mask: Tensor | None,
        local_weight: Tensor | LocalSource | None,
        mean_query: Tensor | None = None,
    ) -> Tensor:
        assert not isinstance(local_weight, LocalSource)
        if self.rope:
            q, k, v = self.operands(projections, grid)
            projections = [x.to(v.dtype).unsqueeze(2) for x in (q, k, v)]
        if self.anchors > 1:
            # The base class adds the local terms, once for all anchors.
            return Attention.attend(self, projections, grid=grid, token_mask=token_mask, local_weight=local_weight)
        return tangent_attention_projected(
            *projections,
            anchor=mean_query,
            scale=self.scale,
            **self.shared_options(grid=grid, token_mask=token_mask, local_weight=local_weight),
        )

    def global_attention(self, q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, token_mask: Tensor | None) -> Tensor:
        rows = [x.unsqueeze(2) for x in (q, k, v)]
        options: dict[str, Any] = dict(scale=self.scale, token_mask=token_mask, query_mask=token_mask)

        def expand(anchor: Tensor) -> Tensor:
            return tangent_attention_projected(*rows, anchor=anchor, backend=self.backend, **options)

        return expand_at_anchors(expand, q, token_mask, count=self.anchors)

    def weights(self, q: Tensor, k: Tensor, *, rows: slice = slice(None), mask: Tensor | None = None) -> Tensor:
        q, k = (x.to(accumulation_dtype(x.dtype)) for x in (q, k))
        by_head = q.transpose(1, 2)  # (B, heads, N, d)
        anchors = anchors_of_rows(by_head, rows, mask, count=self.anchors)
        return tangent_rows(by_head[:, :, rows], k, anchors, mask=mask, scale=self.scale)


def expand_at_anchors(
    expand: Callable[[Tensor], Tensor], q: Tensor, query_mask: Tensor | None, *, count: int
) -> Tensor:
    """Expands all queries around M anchors, one after the other, and keeps each query's result of its nearest anchor.

    Args:
        expand: an anchor (B, 1, heads, d), in at least float32 → all queries expanded around it (B, N, heads, e)
        q: (B, N, heads, d)
        query_mask: (B, N) bool, False for queries that are absent. No anchor depends on them.
        count: M.
    """
    mask = None if query_mask is None else query_mask[:, None]
    with without_autocast(q.device):
        queries = zero_absent(q, query_mask).to(accumulation_dtype(q.dtype)).transpose(1, 2)
        anchors, nearest = find_anchors(queries, mask, count=count)
    out = expand(anchors[:, None, :, 0])
    for m in range(1, count):
        out = torch.where((nearest == m).transpose(1, 2)[..., None], expand(anchors[:, None, :, m]), out)
    return out


def anchors_of_rows(q: Tensor, rows: slice, mask: Tensor | None, *, count: int) -> Tensor:
    """The anchor of each chosen query, among the queries that it sees: q (B, heads, N, d) → (B, heads, rows or 1, d)"""
    if count == 1:
        return mean_of_seen(q, mask)
    if mask is None:
        found, nearest = find_anchors(q, None, count=count)
        return take_rows(found, nearest[..., rows])
    found, _ = find_anchors(q[:, :, None], mask, count=count)  # (B, heads, rows or 1, M, d)
    return take_rows(found, nearest_rows(q[:, :, rows].unsqueeze(3), found)).squeeze(3)


def nearest_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Which of the rows (…, M, d) each x (…, N, d) is nearest to → (…, N), the first of equally near ones"""
    centre = rows.mean(-2, keepdim=True)  # far from zero, the differences of products would be lost in rounding
    x, rows = x - centre, rows - centre
    return (rows.square().sum(-1).unsqueeze(-2) - 2 * x @ rows.mT).argmin(-1)


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Rows (…, M, d) by their numbers (…, N) → (…, N, d)"""
    rows = rows.expand(*index.shape[:-1], *rows.shape[-2:])
    return rows.gather(-2, index.unsqueeze(-1).expand(*index.shape, rows.shape[-1]))


def find_anchors(q: Tensor, mask: Tensor | None, *, count: int) -> tuple[Tensor, Tensor]:
    """k-means of queries, deterministic.

    It starts from the query nearest to the mean of all, and then takes the query farthest from the anchors that it has,
    until there are M. So a query that is unlike the others, such as that of a class token, gets an anchor near it. Each
    step gives every query to its nearest anchor and moves the anchors to the means of their queries. An anchor without
    queries stays. Autograd sees the last step alone: there an anchor is the mean of a fixed set of queries.

    Args:
        q: (…, N, d)
        mask: (…, N) bool, False for a query that is absent, which must be finite. The dimensions before N broadcast
            with q's.
        count: M.

    Returns:
        The anchors (…, M, d), and which of them is nearest to each query, (…, N).
    """
    shape = q.shape[:-1] if mask is None else torch.broadcast_shapes(q.shape[:-1], mask.shape)
    present = q.new_ones(shape, dtype=torch.bool) if mask is None else mask.expand(shape)
    points = q.detach()
    share = present.to(q.dtype) / present.sum(-1, keepdim=True).clamp(min=1)
    from_mean = (points - share.unsqueeze(-2) @ points).square().sum(-1)
    index = from_mean.masked_fill(~present, torch.inf).argmin(-1, keepdim=True)
    distance, chosen = torch.full_like(from_mean, torch.inf), []
    for _ in range(count):
        chosen.append(take_rows(points, index))
        distance = torch.minimum(distance, (points - chosen[-1]).square().sum(-1))
        index = distance.masked_fill(~present, -1).argmax(-1, keepdim=True)
    anchors = torch.cat(chosen, -2)
    for step in range(ANCHOR_STEPS):
        queries = q if step == ANCHOR_STEPS - 1 else points
        members = F.one_hot(nearest_rows(points, anchors), count).to(q.dtype) * present.unsqueeze(-1)
        sizes = members.sum(-2).unsqueeze(-1)
        anchors = torch.where(sizes > 0, members.mT @ queries / sizes.clamp(min=1), anchors)
    return anchors, nearest_rows(points, anchors.detach())


def tangent_rows(q: Tensor, k: Tensor, anchors: Tensor, *, mask: Tensor | None, scale: float) -> Tensor:
    """The rows of `TangentAttention` with given anchors, over the keys that each row of a mask sees.

    q (B, heads, rows, d), k (B, N, heads, d), anchors (B, heads, rows or 1, d) → (B, heads, rows, N)
    """
    products = scale * ((q - anchors) @ k.permute(0, 2, 3, 1))
    return weighted_rows(products, softmax_of_seen(anchors, k, mask, scale), normalization="subtract")
