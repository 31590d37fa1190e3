"""Newer members of the family that `linear_attention` computes: MALA, RALA and PolaFormer.

They are written from their papers' formulas. Each docstring says what is computed here, and
`tests/layers/test_family.py` compares it with a version written token by token. The papers' networks have further
parts, such as depthwise convolutions of v. Here `local_residual` and `position_conv` add those to any attention.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.ops import Grid, attention_matrix, linear_attention_projected
from inline_attention.ops.feature_maps import get_feature_map
from inline_attention.ops.matrix import weighted_rows
from inline_attention.ops.projections import unstack
from inline_attention.ops.reference import LINEAR_EPS, accumulation_dtype, anchor_weight, without_autocast

from .attention import Attention
from .inline import OneCallAttention
from .registry import register_attention
from .tokens import mean_of_seen, scores, softmax_of_seen

POLAFORMER_POWER = 4.0  # how much more than 1 the learned exponents can be


@register_attention
class MALAAttention(OneCallAttention):
    """Magnitude-aware linear attention: InLine's rows, plus those of linear attention, less the mean.

    With a_ij = φ(q_i)·φ(k_j) and z_i = (s/N)·Σ_t a_it, the weight of query i on token j is
    (1 + 1/z_i)·(s/N)·a_ij − z_i/N. φ is ELU + 1 by default. The paper's form has s = N, and s = d^-1/2 here: a longer
    query sharpens its row in the same way at every number of tokens. `rope=True` adds the paper's rotary positions.
    "Rectifying Magnitude Neglect in Linear Attention", ICCV 2025, arXiv 2507.00698.
    """

    kind = "mala"
    normalization = "magnitude"
    matrix_kind = "mala"

    def __init__(self, dim: int, num_heads: int, *, feature_map: str = "elu_plus_one", **kwargs: Any) -> None:
        super().__init__(dim, num_heads, feature_map=feature_map, **kwargs)


@register_attention
class RALAAttention(Attention):
    """Rank-augmented linear attention: keys count as much as the mean query attends to them, and a gate on the output.

    With the mean query q̄ of the image and head, p_j = softmax_j(s·q̄·k_j) and a_ij = φ(q_i)·φ(k_j),

        out_i = (W·x_i + b) ⊙ Σ_j α_j·a_ij·v_j / (Σ_t α_t·a_it + 1e-6),    α_j = N·p_j,

    where x is the input of the module. The gate applies to the local residual too. φ is ELU + 1 by default.
    "Breaking the Low-Rank Dilemma of Linear Attention", CVPR 2025, arXiv 2411.07635.
    """

    kind = "rala"
    follows = ("feature_map", "local_residual")

    def __init__(self, dim: int, num_heads: int, *, feature_map: str = "elu_plus_one", **kwargs: Any) -> None:
        super().__init__(dim, num_heads, feature_map=feature_map, **kwargs)
        self.gate = nn.Linear(dim, dim, **self.factory)

    def uses_mean_query(self) -> bool:
        return True

    def attend(
        self,
        projections: Sequence[Tensor],
        *,
        grid: Grid,
        token_mask: Tensor | None,
        local_weight: Tensor | None,
        mean_query: Tensor | None = None,
    ) -> Tensor:
        assert mean_query is not None
        weight = anchor_weight(mean_query, unstack(projections)[1], token_mask, self.scale)
        return linear_attention_projected(
            *projections,
            feature_map=self.feature_map,
            token_weight=weight.permute(0, 2, 1),
            **self.shared_options(grid=grid, token_mask=token_mask, local_weight=local_weight),
        )

    def weights(self, q: Tensor, k: Tensor, *, rows: slice = slice(None), mask: Tensor | None = None) -> Tensor:
        phi = get_feature_map(self.feature_map).apply
        anchors = mean_of_seen(q.transpose(1, 2), mask)
        count = k.shape[1] if mask is None else mask.sum(-1, keepdim=True).clamp(min=1)
        return weighted_rows(
            self.scale * scores(phi(q[:, rows]), phi(k), mask),
            softmax_of_seen(anchors, k, mask, self.scale),
            normalization="divide",
            eps=self.scale * LINEAR_EPS / count,
        )


@register_attention
class PolaFormerAttention(Attention):
    """Polarity-aware linear attention: products of equal and of opposite signs weigh one half of the values each.

    Let x⁺ = ReLU(x)^p and x⁻ = ReLU(−x)^p be the parts of a query or key, with learned exponents
    p = 1 + 4·sigmoid(power), one per channel. v_j has the halves v_j' and v_j''. Then

        s_ij = q_i⁺·k_j⁺ + q_i⁻·k_j⁻        o_ij = q_i⁻·k_j⁺ + q_i⁺·k_j⁻
        out_i = (W·x_i + b) ⊙ [Σ_j s_ij·v_j' / (Σ_t s_it + 1e-6), Σ_j o_ij·v_j'' / (Σ_t o_it + 1e-6)]

    where x is the input of the module, and [·, ·] joins the channels of a head. The gate, which the paper calls the
    sign-aware coefficients, applies to the local residual too. Every head is computed as two, with keys of 2·d and
    values of d/2.
    "PolaFormer: Polarity-aware Linear Attention for Vision Transformers", ICLR 2025, arXiv 2501.15061.
    """

    kind = "polaformer"
    follows = ("local_residual",)

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if self.head_dim % 2:
            raise ValueError(
                f"polaformer splits the values of a head into halves: {self.head_dim} channels, from dim={dim} and "
                f"num_heads={num_heads}, are odd; choose num_heads so that heads are even"
            )
        self.power = nn.Parameter(torch.empty(dim, **self.factory))
        self.gate = nn.Linear(dim, dim, **self.factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.power)

    def attend(
        self, projections: Sequence[Tensor], *, grid: Grid, token_mask: Tensor | None, local_weight: Tensor | None
    ) -> Tensor:
        q, k, v = self.operands(projections, grid)
        if local_weight is not None:
            local_weight = local_weight.unflatten(2, (2, -1)).flatten(1, 2)
        out = linear_attention_projected(
            *(x.to(q.dtype).unsqueeze(2) for x in (q, k, v)),
            feature_map="identity",
            **self.shared_options(grid=grid, token_mask=token_mask, local_weight=local_weight),
        )
        return out.to(v.dtype).flatten(2).unflatten(2, (self.num_heads, self.head_dim))

    def operands(self, projections: Sequence[Tensor], grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """Two heads for each, of equal and of opposite signs: q and k (B, N, 2·heads, 2·d), v (B, N, 2·heads, d/2)

        q and k are in at least float32: high powers leave the range of half precision.
        """
        q, k, v = unstack(projections)
        dtype = accumulation_dtype(q.dtype)
        with without_autocast(q.device):
            power = 1 + POLAFORMER_POWER * self.power.to(dtype).sigmoid().unflatten(0, (self.num_heads, -1))
            q_positive, q_negative, k_positive, k_negative = (
                F.relu(x).pow(power) for y in (q.to(dtype), k.to(dtype)) for x in (y, -y)
            )
            signs = (torch.cat([q_positive, q_negative], -1), torch.cat([q_negative, q_positive], -1))
            key = torch.cat([k_positive, k_negative], -1)
        return (
            torch.stack(signs, 3).flatten(2, 3),
            key.repeat_interleave(2, dim=2),
            v.unflatten(3, (2, -1)).flatten(2, 3),
        )

    def weights(self, q: Tensor, k: Tensor, *, rows: slice = slice(None), mask: Tensor | None = None) -> Tensor:
        return attention_matrix(q[:, rows], k, kind="linear", feature_map="identity", pair_mask=mask)
