"""InLine attention, and linear attention, which differs from it in the normalisation alone."""

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from inline_attention.ops import (
    Grid,
    LocalSource,
    Normalization,
    attention_matrix,
    linear_attention_packed,
    linear_attention_projected,
    local_residual,
)
from inline_attention.ops.feature_maps import get_feature_map
from inline_attention.ops.precision import product_dtype
from inline_attention.ops.projections import unstack
from inline_attention.ops.reference import (
    LINEAR_EPS,
    accumulation_dtype,
    factors,
    token_count,
    without_autocast,
    zero_absent,
)
from inline_attention.ops.tracing import needs_plain_operations

from .attention import Attention
from .local import LocalWeight
from .mode import asked_once, is_plain
from .registry import register_attention
from .rope import rotate
from .tokens import pad_images, scores, through_state


class OneCallAttention(Attention):
    """An attention that is one call of `linear_attention`, its local residual included. A subclass names its kind.

    Args:
        rope: rotate φ(q) and φ(k) by the positions of their tokens (`rotate`) before they are compared.

    With `rope`, an attention that normalises keeps the normaliser of the vectors that are not rotated, since the sum of
    rotated ones can be zero. Let a_ij be the product of φ(q_i) and φ(k_j), and r_ij that of the rotated ones. Then
    z_i = (s/N)·Σ_j a_ij as without `rope`, and the weight of query i on token j is

    | normalization | weight | known as |
    |---|---|---|
    | divide | r_ij / (Σ_t a_it + 1e-6) | MLLA |
    | magnitude | (1 + 1/z_i)·(s/N)·r_ij − z_i/N | MALA |
    | subtract | (s/N)·r_ij − (s/N²)·Σ_t r_it + 1/N | InLine attention of rotated vectors |

    In the form g·φ(q_i)·S + f·v̄ the state S is that of the rotated keys. With z_r,i = (s/N)·Σ_j r_ij, the factor f of v̄
    is z_r/z for "divide" and z_r + z_r/z − z for "magnitude", where it is 1 without `rope`. Rows then do not sum to
    one. PyTorch composes these two, without a kernel of their own. "subtract" is one call of the operation.
    """

    normalization: ClassVar[Normalization]
    matrix_kind: ClassVar[Literal["inline", "linear", "mala"]]  # of `attention_matrix`
    follows: ClassVar[tuple[str, ...]] = ("feature_map", "local_residual", "gain", "rope")
    # Whether `attend` is the one below, and `local_weight` that of `Attention`: the operation may then do both.
    has_plain_attend: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.has_plain_attend = cls.attend is OneCallAttention.attend and cls.local_weight is Attention.local_weight

    def __init__(self, dim: int, num_heads: int, *, rope: bool = False, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if rope and self.head_dim % 4:
            raise ValueError(
                f"rope=True rotates pairs of channels on two axes: heads of {self.head_dim} channels are not a "
                f"multiple of 4; choose num_heads so that dim={dim} makes such heads"
            )
        self.rope = rope

    def is_one_call(self) -> bool:
        """Whether `attend` is one call of the operation, and its local weight is what `local` makes."""
        return self.has_plain_attend and "attend" not in vars(self) and not self.rope and self.position is None

    @asked_once
    def has_plain_local(self) -> bool:
        """Whether the operation may make the local weight itself."""
        return self.is_one_call() and self.local is not None and is_plain(self.local, LocalWeight)

    def forward_each(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """The images end to end, without their padding, in one call of the operation"""
        if not self.is_one_call():
            return super().forward_each(x, grids)
        lengths = self.lengths(grids)
        own = [x[i, :n].to(product_dtype(x)) for i, n in enumerate(lengths)]
        together = torch.cat(own)[None]
        q, k, v = (y[0] for y in unstack(self.project(together, (1, sum(lengths)))))
        local_weight = None
        if self.local is not None:
            local_weight = self.local(torch.stack([image.mean(0) for image in own]), backend=self.backend)
        out = linear_attention_packed(
            q,
            k,
            v,
            cu_seqlens=[0, *itertools.accumulate(lengths)],
            grids=grids,
            normalization=self.normalization,
            feature_map=self.feature_map,
            scale=self.scale,
            local_weight=local_weight,
            num_prefix_tokens=self.num_prefix_tokens,
            backend=self.backend,
        )
        return pad_images(self.merge(self.apply_gate(out[None], together))[0].split(lengths), x.shape[1])

    def local_input(
        self, x: Tensor, token_mean: Tensor | None, token_mask: Tensor | None
    ) -> Tensor | LocalSource | None:
        """In inference, what the weight is made from: the operation may make it in the same launch."""
        if (
            self.local is None
            or token_mean is not None
            or not self.has_plain_local()
            or torch.is_grad_enabled()
            or needs_plain_operations()  # a program recorded without gradients may be used with them
        ):
            return super().local_input(x, token_mean, token_mask)
        return self.local.source(x)

    def attend(
        self,
        projections: Sequence[Tensor],
        *,
        grid: Grid,
        token_mask: Tensor | None,
        local_weight: Tensor | LocalSource | None,
    ) -> Tensor:
        if self.rope:
            assert not isinstance(local_weight, LocalSource)
            return self.attend_rotated(projections, grid=grid, token_mask=token_mask, local_weight=local_weight)
        return linear_attention_projected(
            *projections,
            normalization=self.normalization,
            feature_map=self.feature_map,
            scale=self.scale,
            **self.shared_options(grid=grid, token_mask=token_mask, local_weight=local_weight),
        )

    def rotate_features(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """φ(q) and φ(k), then the same rotated: (B, N, heads, d) each, in at least float32"""
        phi, dtype = get_feature_map(self.feature_map).apply, accumulation_dtype(q.dtype)
        q_, k_ = phi(q.to(dtype)), phi(k.to(dtype))
        rotated_q, rotated_k = (rotate(x, grid, num_prefix_tokens=self.num_prefix_tokens) for x in (q_, k_))
        return q_, k_, rotated_q, rotated_k

    def attend_rotated(
        self, projections: Sequence[Tensor], *, grid: Grid, token_mask: Tensor | None, local_weight: Tensor | None
    ) -> Tensor:
        """`attend` with `rope`; the docstring of the class derives it."""
        q, k, v = unstack(projections)
        with without_autocast(q.device):
            q_, k_, rotated_q, rotated_k = self.rotate_features(q, k, grid)
            v_ = v.to(q_.dtype)
            if self.normalization == "subtract":
                return linear_attention_projected(
                    *(x.unsqueeze(2) for x in (rotated_q, rotated_k, v_)),
                    normalization="subtract",
                    feature_map="identity",
                    scale=self.scale,
                    **self.shared_options(grid=grid, token_mask=token_mask, local_weight=local_weight),
                ).to(v.dtype)
            count = token_count(k, token_mask)
            k_mean, rotated_k_mean, v_mean = (
                zero_absent(x, token_mask).sum(1, keepdim=True) / count for x in (k_, rotated_k, v_)
            )
            z, rotated_z = (
                self.scale * (x * mean).sum(-1, keepdim=True) for x, mean in ((q_, k_mean), (rotated_q, rotated_k_mean))
            )
            centred = (zero_absent(x, token_mask) for x in (rotated_k - rotated_k_mean, v_ - v_mean))
            g, _ = factors(z, self.normalization, self.scale * LINEAR_EPS / count)
            out = g * (self.scale / count) * through_state(rotated_q, *centred)
            out = out + self.rotated_factor(g, z, rotated_z) * v_mean
            if local_weight is not None:
                out = out + local_residual(
                    v_, local_weight, grid=grid, num_prefix_tokens=self.num_prefix_tokens, token_mask=token_mask
                )
            return zero_absent(out, token_mask).to(v.dtype)

    def rotated_factor(self, g: Tensor | float, z: Tensor, rotated_z: Tensor) -> Tensor:
        """f of g·φ(q)·S + f·v̄. With r_ij in the place of z_r, it is N times the weight of token j."""
        return g * rotated_z if self.normalization == "divide" else g * rotated_z - z

    def operands(self, projections: Sequence[Tensor], grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """With `rope` φ is inside, and an attention that normalises has the rotated vectors before the others, 2·d."""
        q, k, v = unstack(projections)
        if not self.rope:
            return q, k, v
        q_, k_, rotated_q, rotated_k = self.rotate_features(q, k, grid)
        if self.normalization == "subtract":
            return rotated_q, rotated_k, v
        return torch.cat([rotated_q, q_], -1), torch.cat([rotated_k, k_], -1), v

    def weights(self, q: Tensor, k: Tensor, *, rows: slice = slice(None), mask: Tensor | None = None) -> Tensor:
        if self.rope and self.normalization != "subtract":
            return self.rotated_weights(q, k, rows=rows, mask=mask)
        feature_map = "identity" if self.rope else self.feature_map
        options: dict[str, Any] = dict(kind=self.matrix_kind, feature_map=feature_map, scale=self.scale)
        return attention_matrix(q[:, rows], k, pair_mask=mask, **options)

    def rotated_weights(self, q: Tensor, k: Tensor, *, rows: slice, mask: Tensor | None) -> Tensor:
        rotated, plain = (
            self.scale * scores(x, y, mask) for x, y in zip(q[:, rows].chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        count = k.shape[1] if mask is None else mask.sum(-1, keepdim=True).clamp(min=1)
        z = plain.sum(-1, keepdim=True) / count
        g, _ = factors(z, self.normalization, self.scale * LINEAR_EPS / count)
        weights = self.rotated_factor(g, z, rotated) / count
        return weights if mask is None else weights.masked_fill(~mask, 0)


@register_attention
class InLineAttention(OneCallAttention):
    """InLine attention, by default with its local residual. See `Attention` for the arguments."""

    kind = "inline"
    normalization = "subtract"
    matrix_kind = "inline"

    def __init__(self, dim: int, num_heads: int, *, local_residual: bool = True, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, local_residual=local_residual, **kwargs)


@register_attention
class LinearAttention(OneCallAttention):
    """Vanilla linear attention, which divides where InLine subtracts. φ is ReLU by default.

    With a φ that can be negative ("identity", "leaky_relu") the divisor passes through zero, and outputs grow without
    bound. Nothing clips them. Training stops at the first non-finite gradient, and analyses count such rows.
    """

    kind = "linear"
    follows = ("feature_map", "local_residual", "rope")
    normalization = "divide"
    matrix_kind = "linear"

    def __init__(self, dim: int, num_heads: int, *, feature_map: str = "relu", **kwargs: Any) -> None:
        super().__init__(dim, num_heads, feature_map=feature_map, **kwargs)
