"""Attention modules with one call, `attention(x, grid)`, on token rows (B, N, C). They can be used in any network.

A new attention is a registered subclass of `Attention`, which every model then takes by name. `baselines` has more.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.ops import (
    FEATURE_MAPS,
    Backend,
    Grid,
    Normalization,
    attention_matrix,
    linear_attention_packed,
    linear_attention_projected,
    local_residual,
)
from inline_attention.ops.backends import check_backend
from inline_attention.ops.checks import check_mask
from inline_attention.ops.feature_maps import get_feature_map
from inline_attention.ops.local import TAPS
from inline_attention.ops.precision import product_dtype
from inline_attention.ops.projections import unstack
from inline_attention.ops.reference import LINEAR_EPS, accumulation_dtype, factors, without_autocast, zero_absent
from inline_attention.ops.tracing import is_exporting

from .local import LocalTerm, LocalWeight, ParameterPair
from .rope import rotate
from .token_grid import ModelGrid, token_mask_of, wait_for_model
from .written_out import WrittenOut

ATTENTIONS: dict[str, type["Attention"]] = {}  # by the names that models take
AttentionT = TypeVar("AttentionT", bound="Attention")


def register_attention(cls: type[AttentionT]) -> type[AttentionT]:
    """Makes an attention known under its `kind`, for every model that takes an attention by name."""
    kind = getattr(cls, "kind", None)
    if not isinstance(kind, str) or not kind:
        raise ValueError(f"{cls.__name__}.kind is {kind!r}; expected the name to register it under, such as 'mine'")
    if kind in ATTENTIONS:
        raise ValueError(f"{cls.__name__}.kind is {kind!r}, which is {ATTENTIONS[kind].__name__}; choose another name")
    ATTENTIONS[kind] = cls
    return cls


def masked_mean(x: Tensor, token_mask: Tensor | None) -> Tensor:
    """Mean of the tokens present, its sum in at least float32: x (B, N, C), token_mask (B, N) → (B, C) in x's dtype"""
    if token_mask is None:
        return x.mean(1)  # PyTorch sums in float32 by itself here
    total = zero_absent(x, token_mask).sum(1, dtype=accumulation_dtype(x.dtype))
    return (total / token_mask.sum(1, keepdim=True).clamp(min=1)).to(x.dtype)


def token_count(x: Tensor, token_mask: Tensor | None) -> Tensor | int:
    """Tokens present of x (B, N, heads, d): N, or (B, 1, 1, 1) with a mask. A sample without any counts one."""
    if token_mask is None:
        return x.shape[1]
    return token_mask.sum(1).clamp(min=1).to(accumulation_dtype(x.dtype))[:, None, None, None]


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


def pad_images(images: Sequence[Tensor], length: int) -> Tensor:
    """Tokens of several images (n, C), n of each its own, as one batch (B, length, C) with zeros after them"""
    out = nn.utils.rnn.pad_sequence(list(images), batch_first=True)
    return F.pad(out, (0, 0, 0, length - out.shape[1]))


class AffineMap(nn.Module):
    """A learned map x → A·x + b per head, shared by queries and keys. It starts as the identity.

    (B, N, heads, d) → the same
    """

    def __init__(self, num_heads: int, head_dim: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, head_dim, head_dim, **factory))
        self.bias = nn.Parameter(torch.empty(num_heads, head_dim, **factory))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.eye(self.weight.shape[-1], device=self.weight.device))
            self.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("bnhi,hoi->bnho", x, self.weight)
        return y + self.bias.to(y.dtype)  # a float32 bias would widen autocast's dtype


class HeadGain(nn.Module):
    """A learned factor of the queries of each head.

    It multiplies the rows of the projection that make the queries. These are few compared with the tokens, and the
    operation stays as it is.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        start: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0 < start < math.inf:
            raise ValueError(f"gain={start!r}; expected True, or the positive number that it starts at")
        self.start = start
        self.weight = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, self.start)

    def project(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """`linear`, whose first C outputs are the queries, with the gains: (…, C) → (…, its outputs)"""
        queries = x.shape[-1]
        factor = self.weight.repeat_interleave(queries // len(self.weight))
        # An adapter, a quantised layer or a layer with hooks computes something else than its weight says.
        if type(linear) is not nn.Linear or linear._forward_hooks or linear._forward_pre_hooks:
            y = linear(x)
            return y * F.pad(factor, (0, y.shape[-1] - queries), value=1.0).to(y.dtype)
        factor = F.pad(factor, (0, linear.out_features - queries), value=1.0)
        bias = None if linear.bias is None else factor * linear.bias
        return F.linear(x, factor[:, None] * linear.weight, bias)


class Attention(nn.Module):
    """The projections, heads and local terms that all attentions share. A subclass defines `global_attention`.

    Args:
        dim: channels C.
        num_heads: heads; each has C / num_heads contiguous channels of q, k and v.
        feature_map: φ of linear attentions: "identity", "relu", "leaky_relu", "exp" or "relu_affine" (learned).
        local_residual: add the input-dependent 3×3 residual (`LocalWeight`) on the token map.
        position_conv: add a 3×3 depthwise convolution of v, the positional term of CSwin.
        num_prefix_tokens: tokens before the map, such as a class token. They take no part in the local terms.
        grid: (height, width) of the token map that the module is built for. Only attentions with learned positions
            need it.
        qkv_bias: bias of the q, k, v projections.
        gain: multiply the queries of each head by a learned number, which starts at 1, or at `gain` if that is a
            number. In InLine attention this is the size of a row's deviation from the mean; in softmax attention, and
            with φ = exp, it is a temperature. Attentions that divide by a sum linear in the query do not depend on it.
        fused_qkv: one projection `qkv`. Otherwise there are two, `q` and `kv`, as in PVT.
        proj_drop: dropout after the output projection.
        backend: of operations that have several, as for `inline_attention`. It is an attribute too, to be set later.
        qk_norm: a norm of every query and every key, over the channels of a head.
        scale_norm: a norm of the heads' outputs before the projection.
        proj_bias: bias of the output projection.
        attn_drop: must be 0. Dropout of weights needs the matrix of weights, which is never formed.
        norm_layer: the class of these norms. timm's blocks always name one, and no token map: see `wait_for_model`.
        device: of the parameters.
        dtype: of the parameters.

    Names are timm's, if timm has one. The last seven arguments are for `timm.create_model(…, attn_layer=…)`.
    """

    kind: str  # the name that models take
    # The model-wide choices (feature_map, local_residual, gain) that apply to this attention.
    follows: ClassVar[tuple[str, ...]] = ()
    # Whether a token mask is enough for the images of a padded batch. It is not if a term depends on the layout of the
    # tokens, such as a learned position. Blocks then run images one by one.
    masks_padding: ClassVar[bool] = True
    # Whether `attend` takes `mean_query` too.
    uses_mean_query: bool = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        feature_map: str = "identity",
        local_residual: bool = False,
        position_conv: bool = False,
        num_prefix_tokens: int = 0,
        grid: Grid | None = None,
        qkv_bias: bool = True,
        gain: bool | float = False,
        fused_qkv: bool = True,
        proj_drop: float = 0.0,
        backend: Backend = "auto",
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_backend(backend)
        self.backend = backend
        if dim % num_heads:
            raise ValueError(f"dim={dim} is not a multiple of num_heads={num_heads}")
        if attn_drop:
            raise ValueError(
                f"attn_drop={attn_drop} drops single weights, and the matrix of weights is never formed; "
                "expected 0. Dropout of the outputs is proj_drop"
            )
        if (qk_norm or scale_norm) and norm_layer is None:
            raise ValueError("qk_norm and scale_norm need norm_layer, the class of the norms, such as nn.LayerNorm")
        if gain and qk_norm:
            raise ValueError(f"gain={gain} with qk_norm: the norm of the queries undoes it; expected one of them")
        self.factory: dict[str, Any] = dict(device=device, dtype=dtype)
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.num_prefix_tokens = num_prefix_tokens
        if fused_qkv:
            self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **self.factory)
        else:
            self.q = nn.Linear(dim, dim, bias=qkv_bias, **self.factory)
            self.kv = nn.Linear(dim, 2 * dim, bias=qkv_bias, **self.factory)
        self.fused_qkv = fused_qkv
        self.q_norm = self.k_norm = None
        if norm_layer is not None and qk_norm:
            self.q_norm = norm_layer(self.head_dim, **self.factory)
            self.k_norm = norm_layer(self.head_dim, **self.factory)
        self.query_gain = HeadGain(num_heads, start=float(gain), **self.factory) if gain else None
        self.affine = None
        if feature_map == "relu_affine":
            self.affine = AffineMap(num_heads, self.head_dim, **self.factory)
            feature_map = "relu"
        elif feature_map not in FEATURE_MAPS:
            names = ", ".join([*FEATURE_MAPS, "relu_affine"])
            raise ValueError(f"feature_map={feature_map!r} is unknown; expected one of {names}")
        self.feature_map = feature_map
        self.local = LocalWeight(dim, num_heads, **self.factory) if local_residual else None
        # The weight and bias of a depthwise 3×3 convolution. It is computed with the local residual, in one pass.
        self.position = None
        if position_conv:
            self.position = ParameterPair((dim, 1, 3, 3), (dim,), fan_in=TAPS, **self.factory)
        self.gate: nn.Module | None = None  # set by subclasses: tokens → a factor of the output
        self.scale_norm = scale_norm
        if norm_layer is not None and scale_norm:
            self.norm = norm_layer(dim, **self.factory)  # timm's name; PVT's attention has another norm of this name
        self.proj = nn.Linear(dim, dim, bias=proj_bias, **self.factory)
        self.proj_drop = nn.Dropout(proj_drop)
        self.model_grid: ModelGrid | None = None
        if norm_layer is not None:
            wait_for_model(self)

    def set_grid(self, grid: Grid) -> None:
        """Resizes parameters that depend on the size of the map. Other sizes run without it too."""

    def project(self, x: Tensor, grid: Grid) -> tuple[Tensor, ...]:
        """x (B, N, C) → q, k and v as the projections return them: tensors (B, N, m, heads, d) of m of them each"""
        heads = (self.num_heads, self.head_dim)
        if self.fused_qkv:
            projections: tuple[Tensor, ...] = (self.project_queries(x, self.qkv).unflatten(-1, (3, *heads)),)
        else:
            q = self.project_queries(x, self.q).unflatten(-1, (1, *heads))
            projections = q, self.kv(x).unflatten(-1, (2, *heads))
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = unstack(projections)
            projections = tuple(y.unsqueeze(2) for y in (self.q_norm(q).type_as(v), self.k_norm(k).type_as(v), v))
        if self.affine is not None:
            q, k, v = unstack(projections)
            projections = tuple(y.unsqueeze(2) for y in (self.affine(q), self.affine(k), v))
        return projections

    def project_queries(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """A projection whose first C outputs are the queries, with their gains: (B, N, C) → (B, N, its outputs)"""
        return linear(x) if self.query_gain is None else self.query_gain.project(x, linear)

    def mean_query(self, token_mean: Tensor) -> Tensor:
        """The mean of the queries, from the mean of the tokens: (B, C) → (B, 1, heads, d)

        A query is an affine function of its token, so that this needs no pass over the queries.
        """
        return unstack(self.project(token_mean.unsqueeze(1), (1, 1)))[0]

    def local_weight(self, x: Tensor, token_mean: Tensor | None, token_mask: Tensor | None) -> Tensor | None:
        """The sum of all 3×3 kernels on v, generated and positional → (B, heads, d, 9)"""
        weight = None
        if self.local is not None:
            mean = masked_mean(x, token_mask) if token_mean is None else token_mean
            weight = self.local(mean, backend=self.backend)
        if self.position is not None:
            static = self.position.weight.view(1, self.num_heads, self.head_dim, TAPS)
            weight = static.expand(x.shape[0], -1, -1, -1) if weight is None else weight + static
        return weight

    def attend(
        self,
        projections: Sequence[Tensor],
        *,
        grid: Grid,
        token_mask: Tensor | None,
        local_weight: Tensor | None,
    ) -> Tensor:
        """q, k and v from `project` → (B, N, heads, d), the local terms included, zeros for absent tokens"""
        q, k, v = unstack(projections)
        out = self.global_attention(q, k, v, grid=grid, token_mask=token_mask)
        if local_weight is not None:
            out = out + local_residual(
                v, local_weight, grid=grid, num_prefix_tokens=self.num_prefix_tokens, token_mask=token_mask
            )
        return zero_absent(out, token_mask)

    def global_attention(self, q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, token_mask: Tensor | None) -> Tensor:
        """The attention without local terms: q (B, Nq, heads, d), k and v (B, N, heads, d) → as q

        Absent tokens are zero in the module's input, but not in q, k and v. The output of an absent token is ignored.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither attend nor global_attention")

    @property
    def uses_grid(self) -> bool:
        """Whether the output depends on how the tokens are laid out on a map."""
        return self.local is not None or self.position is not None

    def find_grid(self, x: Tensor) -> Grid | list[Grid]:
        """The grid of the model around, for a call without one: (height, width), or a list of one for every image."""
        if self.model_grid is not None:
            if self.num_prefix_tokens != self.model_grid.num_prefix_tokens:
                self.num_prefix_tokens = self.model_grid.num_prefix_tokens
            if self.uses_grid and self.model_grid.grid is not None:
                return self.model_grid.grid
        if self.uses_grid:
            raise ValueError(
                f"{type(self).__name__} acts on the token map, and grid is missing: pass grid=(height, width), or call "
                "the whole timm model that it was built in. Without a local residual (local_residual=False) "
                "InLine and linear attention need none"
            )
        return 1, x.shape[1] - self.num_prefix_tokens  # not used

    def forward(
        self,
        x: Tensor,
        grid: Grid | None = None,
        *,
        token_mean: Tensor | None = None,
        token_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """
        Args:
            x: tokens (B, N, C), prefix tokens first, then the map row by row.
            grid: (height, width) of the map. Inside a model of timm it is known, and elsewhere an attention without
                local terms needs none.
            token_mean: (B, C), what the local weight is made from. Default: the mean of x.
            token_mask: (B, N) bool, True for a token that is present. The others may hold anything, NaN included: they
                change no output and no gradient of the ones present. Their own outputs are what the output projection
                makes of zeros.
            attn_mask: the same mask as timm's blocks pass it, (B, 1, 1, N), bool or 0 and −inf. Any other is refused.
            is_causal: must be False.

        Returns:
            (B, N, C)
        """
        if attn_mask is not None or is_causal:
            token_mask = token_mask_of(attn_mask, is_causal, x)
        if grid is None:
            found = self.find_grid(x)
            if isinstance(found, list):
                return self.forward_each(x, found)
            grid = found
        check_mask("token_mask", token_mask, x)
        x = zero_absent(x, token_mask)  # or the projections' gradients would be sums over absent tokens too
        x = x.to(product_dtype(x))  # before the mean token is taken, so that a compiled norm writes one output
        projections = self.project(x, grid)
        more: dict[str, Any] = {}
        local_mean = token_mean
        if self.uses_mean_query:
            mean = masked_mean(x, token_mask)
            if self.q_norm is None:
                more["mean_query"] = self.mean_query(mean)
            else:  # a normed query is not an affine function of its token
                q = unstack(projections)[0]
                more["mean_query"] = masked_mean(q.flatten(2), token_mask).unflatten(1, q.shape[2:])[:, None]
            local_mean = mean if token_mean is None else token_mean
        local_weight = self.local_weight(x, local_mean, token_mask)
        out = self.attend(projections, grid=grid, token_mask=token_mask, local_weight=local_weight, **more)
        return self.merge(self.apply_gate(self.add_position_bias(out, token_mask), x))

    def forward_each(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Images of different sizes in one batch, every one with its own map: (B, N, C) → (B, N, C), padding zero"""
        lengths = self.lengths(grids)
        outs = [self.forward(x[i : i + 1, :n], grid)[0] for i, (n, grid) in enumerate(zip(lengths, grids, strict=True))]
        return pad_images(outs, x.shape[1])

    def lengths(self, grids: Sequence[Grid]) -> list[int]:
        """The tokens of images of different sizes"""
        return [self.num_prefix_tokens + height * width for height, width in grids]

    def add_position_bias(self, out: Tensor, token_mask: Tensor | None) -> Tensor:
        """Adds the bias of the positional convolution to the map's tokens: (B, N, heads, d) → the same"""
        if self.position is None:
            return out
        # In out's dtype, because a float32 bias would widen autocast's.
        bias = self.position.bias.to(out.dtype).unflatten(0, out.shape[2:])
        if self.num_prefix_tokens:
            bias = bias.expand(out.shape[1] - self.num_prefix_tokens, -1, -1)
            bias = F.pad(bias, (0, 0, 0, 0, self.num_prefix_tokens, 0))
        return zero_absent(out + bias, token_mask)

    def apply_gate(self, out: Tensor, x: Tensor) -> Tensor:
        """The output, local terms included, times the gate of its token: (B, N, heads, d), x (B, N, C) → the same"""
        return out if self.gate is None else out * self.gate(x).view_as(out)

    def merge(self, out: Tensor) -> Tensor:
        """Heads (B, N, heads, d), local terms included, through the output projection → (B, N, C)"""
        out = out.flatten(2)
        return self.proj_drop(self.proj(self.norm(out) if self.scale_norm else out))

    # The same attention written out as a matrix, O(N²). Analyses and tests use it; models do not.

    def write_out(
        self, x: Tensor, grid: Grid, *, token_mean: Tensor | None = None, token_mask: Tensor | None = None
    ) -> WrittenOut:
        """What `forward` computes from the same arguments, as a matrix of weights and local terms."""
        x = zero_absent(x, token_mask)
        q, k, v = self.operands(self.project(x, grid), grid)

        def matrix(rows: slice, samples: slice, heads: slice, mask: Tensor | None) -> Tensor:
            return self.weights(q[samples, :, heads], k[samples, :, heads], rows=rows, mask=mask)

        return WrittenOut(
            kind=self.kind,
            grid=grid,
            num_prefix_tokens=self.num_prefix_tokens,
            q=q,
            k=k,
            v=zero_absent(v, token_mask),
            local=tuple(self.local_terms(self.local_weight(x, token_mean, token_mask))),
            token_mask=token_mask,
            matrix=matrix,
            finish=lambda attended, local: self.merge(self.apply_gate(self.normalise(attended) + local, x)),
        )

    def write_out_call(
        self,
        x: Tensor,
        grid: Grid | None = None,
        *,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        **options: Any,
    ) -> WrittenOut:
        """`write_out` with the arguments of any call of `forward`, those of timm's blocks included."""
        if attn_mask is not None or is_causal:
            options["token_mask"] = token_mask_of(attn_mask, is_causal, x)
        if grid is None:
            found = self.find_grid(x) if self.model_grid is None else self.model_grid.grid
            if found is None or isinstance(found, list):
                raise ValueError("images of different sizes in one batch are not written out; pass them one by one")
            grid = found
        return self.write_out(x, grid, **options)

    def operands(self, projections: Sequence[Tensor], grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v from `project` as `weights` takes them, (B, N, heads, d) each"""
        return unstack(projections)

    def weights(self, q: Tensor, k: Tensor, *, rows: slice = slice(None), mask: Tensor | None = None) -> Tensor:
        """Rows of the attention matrix of each head. Its product with v is the attention without local terms.

        Args:
            q: (B, N, heads, d) from `operands`, all tokens.
            k: (B, N, heads, d) from `operands`, all tokens.
            rows: the queries whose rows are returned.
            mask: bool, broadcasts to the result. False where a key counts as absent for a query.

        Returns:
            (B, heads, rows, N)
        """
        raise NotImplementedError(f"{type(self).__name__} does not define weights, its attention matrix")

    def normalise(self, out: Tensor) -> Tensor:
        """What is done to weights @ v, (B, N, heads, d), before the local terms are added. By default nothing."""
        return out

    def local_terms(self, local_weight: Tensor | None) -> list[LocalTerm]:
        """All that is added to the weights' product with v; `local_weight` is what the method of that name returns."""
        if local_weight is None:
            return []
        bias = None if self.position is None else self.position.bias
        return [LocalTerm(local_weight.flatten(1, 2).unflatten(2, (3, 3)), bias)]


class FusedAttention(Attention):
    """An attention that is one call of `linear_attention`, its local residual included. A subclass names its kind.

    Args:
        rope: turn φ(q) and φ(k) by the positions of their tokens (`rotate`) before they are compared.

    With `rope`, an attention that normalises keeps the normaliser of the vectors that are not turned, since the sum of
    turned ones can be zero. Let a_ij be the product of φ(q_i) and φ(k_j), and r_ij that of the turned ones. Then
    z_i = (s/N)·Σ_j a_ij as without `rope`, and the weight of query i on token j is

    | normalization | weight | known as |
    |---|---|---|
    | divide | r_ij / (Σ_t a_it + 1e-6) | MLLA |
    | magnitude | (1 + 1/z_i)·(s/N)·r_ij − z_i/N | MALA |
    | subtract | (s/N)·r_ij − (s/N²)·Σ_t r_it + 1/N | InLine attention of turned vectors |

    In the form g·φ(q_i)·S + f·v̄ the state S is that of the turned keys. With z_r,i = (s/N)·Σ_j r_ij, the factor f of v̄
    is z_r/z for "divide" and z_r + z_r/z − z for "magnitude", where it is 1 without `rope`. Rows then do not sum to
    one. PyTorch composes these two, without a kernel of their own. "subtract" is one call of the operation.
    """

    normalization: ClassVar[Normalization]
    matrix_kind: ClassVar[Literal["inline", "linear", "mala"]]  # of `attention_matrix`
    follows: ClassVar[tuple[str, ...]] = ("feature_map", "local_residual", "gain")

    def __init__(self, dim: int, num_heads: int, *, rope: bool = False, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if rope and self.head_dim % 4:
            raise ValueError(
                f"rope=True turns pairs of channels on two axes: heads of {self.head_dim} channels are not a multiple "
                f"of 4; choose num_heads so that dim={dim} makes such heads"
            )
        self.rope = rope

    @property
    def uses_grid(self) -> bool:
        return self.rope or super().uses_grid

    def forward_each(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """The images end to end, without their padding, in one call of the operation"""
        if type(self).attend is not FusedAttention.attend or self.rope or self.position is not None:
            return super().forward_each(x, grids)
        lengths = self.lengths(grids)
        own = [x[i, :n].to(product_dtype(x)) for i, n in enumerate(lengths)]
        q, k, v = (y[0] for y in unstack(self.project(torch.cat(own)[None], (1, sum(lengths)))))
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
        return pad_images(self.merge(out[None])[0].split(lengths), x.shape[1])

    def attend(
        self,
        projections: Sequence[Tensor],
        *,
        grid: Grid,
        token_mask: Tensor | None,
        local_weight: Tensor | None,
    ) -> Tensor:
        if self.rope:
            return self.attend_rotated(projections, grid=grid, token_mask=token_mask, local_weight=local_weight)
        return linear_attention_projected(
            *projections,
            normalization=self.normalization,
            feature_map=self.feature_map,
            scale=self.scale,
            local_weight=local_weight,
            grid=grid,
            num_prefix_tokens=self.num_prefix_tokens,
            token_mask=token_mask,
            query_mask=token_mask,
            backend=self.backend,
        )

    def rotate_features(self, q: Tensor, k: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """φ(q) and φ(k), then the same turned: (B, N, heads, d) each, in at least float32"""
        phi, dtype = get_feature_map(self.feature_map).apply, accumulation_dtype(q.dtype)
        q_, k_ = phi(q.to(dtype)), phi(k.to(dtype))
        turned_q, turned_k = (rotate(x, grid, num_prefix_tokens=self.num_prefix_tokens) for x in (q_, k_))
        return q_, k_, turned_q, turned_k

    def attend_rotated(
        self, projections: Sequence[Tensor], *, grid: Grid, token_mask: Tensor | None, local_weight: Tensor | None
    ) -> Tensor:
        """`attend` with `rope`; the docstring of the class derives it."""
        q, k, v = unstack(projections)
        layout: dict[str, Any] = dict(grid=grid, num_prefix_tokens=self.num_prefix_tokens, token_mask=token_mask)
        with without_autocast(q.device):
            q_, k_, turned_q, turned_k = self.rotate_features(q, k, grid)
            v_ = v.to(q_.dtype)
            if self.normalization == "subtract":
                return linear_attention_projected(
                    *(x.unsqueeze(2) for x in (turned_q, turned_k, v_)),
                    normalization="subtract",
                    feature_map="identity",
                    scale=self.scale,
                    local_weight=local_weight,
                    query_mask=token_mask,
                    backend=self.backend,
                    **layout,
                ).to(v.dtype)
            count = token_count(k, token_mask)
            k_mean, turned_k_mean, v_mean = (
                zero_absent(x, token_mask).sum(1, keepdim=True) / count for x in (k_, turned_k, v_)
            )
            z, turned_z = (
                self.scale * (x * mean).sum(-1, keepdim=True) for x, mean in ((q_, k_mean), (turned_q, turned_k_mean))
            )
            centred = (zero_absent(x, token_mask) for x in (turned_k - turned_k_mean, v_ - v_mean))
            g, _ = factors(z, self.normalization, self.scale * LINEAR_EPS / count)
            out = g * (self.scale / count) * through_state(turned_q, *centred)
            out = out + self.turned_factor(g, z, turned_z) * v_mean
            if local_weight is not None:
                out = out + local_residual(v_, local_weight, **layout)
            return zero_absent(out, token_mask).to(v.dtype)

    def turned_factor(self, g: Tensor | float, z: Tensor, turned_z: Tensor) -> Tensor:
        """f of g·φ(q)·S + f·v̄. With r_ij in the place of z_r, it is N times the weight of token j."""
        return g * turned_z if self.normalization == "divide" else g * turned_z - z

    def operands(self, projections: Sequence[Tensor], grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
        """With `rope` φ is inside, and an attention that normalises has the turned vectors before the others, 2·d."""
        q, k, v = unstack(projections)
        if not self.rope:
            return q, k, v
        q_, k_, turned_q, turned_k = self.rotate_features(q, k, grid)
        if self.normalization == "subtract":
            return turned_q, turned_k, v
        return torch.cat([turned_q, q_], -1), torch.cat([turned_k, k_], -1), v

    def weights(self, q: Tensor, k: Tensor, *, rows: slice = slice(None), mask: Tensor | None = None) -> Tensor:
        if self.rope and self.normalization != "subtract":
            return self.rotated_weights(q, k, rows=rows, mask=mask)
        feature_map = "identity" if self.rope else self.feature_map
        options: dict[str, Any] = dict(kind=self.matrix_kind, feature_map=feature_map, scale=self.scale)
        return attention_matrix(q[:, rows], k, pair_mask=mask, **options)

    def rotated_weights(self, q: Tensor, k: Tensor, *, rows: slice, mask: Tensor | None) -> Tensor:
        turned, plain = (
            self.scale * scores(x, y, mask) for x, y in zip(q[:, rows].chunk(2, -1), k.chunk(2, -1), strict=True)
        )
        count = k.shape[1] if mask is None else mask.sum(-1, keepdim=True).clamp(min=1)
        z = plain.sum(-1, keepdim=True) / count
        g, _ = factors(z, self.normalization, self.scale * LINEAR_EPS / count)
        weights = self.turned_factor(g, z, turned) / count
        return weights if mask is None else weights.masked_fill(~mask, 0)


@register_attention
class InLineAttention(FusedAttention):
    """InLine attention, by default with its local residual. See `Attention` for the arguments."""

    kind = "inline"
    normalization = "subtract"
    matrix_kind = "inline"

    def __init__(self, dim: int, num_heads: int, *, local_residual: bool = True, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, local_residual=local_residual, **kwargs)


@register_attention
class LinearAttention(FusedAttention):
    """Vanilla linear attention, which divides where InLine subtracts. φ is ReLU by default.

    With a φ that can be negative ("identity", "leaky_relu") the divisor passes through zero, and outputs grow without
    bound. Nothing clips them. Training stops at the first non-finite gradient, and analyses count such rows.
    """

    kind = "linear"
    follows = ("feature_map", "local_residual")
    normalization = "divide"
    matrix_kind = "linear"

    def __init__(self, dim: int, num_heads: int, *, feature_map: str = "relu", **kwargs: Any) -> None:
        super().__init__(dim, num_heads, feature_map=feature_map, **kwargs)


@register_attention
class SoftmaxAttention(Attention):
    """Softmax attention through PyTorch's scaled_dot_product_attention."""

    kind = "softmax"
    follows: ClassVar[tuple[str, ...]] = ("gain",)

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if self.feature_map != "identity" and self.kind != MappedSoftmaxAttention.kind:
            raise ValueError(
                f"feature_map={self.feature_map!r}: {type(self).__name__} has none. "
                f"MappedSoftmaxAttention ({MappedSoftmaxAttention.kind!r}) applies one to q and k before the softmax"
            )

    def global_attention(self, q: Tensor, k: Tensor, v: Tensor, *, grid: Grid, token_mask: Tensor | None) -> Tensor:
        return self.softmax_rows(q, k, v, mask=None if token_mask is None else token_mask[:, None, None, :])

    def weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        rows: slice = slice(None),
        mask: Tensor | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        options: dict[str, Any] = dict(kind="softmax", feature_map=self.feature_map, scale=self.scale)
        return attention_matrix(q[:, rows], k, pair_mask=mask, bias=bias, **options)

    def softmax_rows(self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None) -> Tensor:
        """Softmax attention of rows (B, N, heads, d) → the same; mask broadcasts to (B, heads, Nq, N)"""
        phi = get_feature_map(self.feature_map).apply
        q, k, v = (x.transpose(1, 2) for x in (phi(q), phi(k), v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale).transpose(1, 2)
        if is_exporting():
            # Its strides depend on the kernel that PyTorch picks. An exported graph must not depend on them.
            out = out.clone(memory_format=torch.contiguous_format)
        return out


@register_attention
class MappedSoftmaxAttention(SoftmaxAttention):
    """Softmax attention with φ applied to q and k before it. The default, ReLU, makes it non-injective."""

    kind = "mapped_softmax"
    follows = ("feature_map", "gain")

    def __init__(self, dim: int, num_heads: int, *, feature_map: str = "relu", **kwargs: Any) -> None:
        super().__init__(dim, num_heads, feature_map=feature_map, **kwargs)


@register_attention
class LocalSoftmaxAttention(SoftmaxAttention):
    """Softmax attention with InLine's local residual, for comparisons with the same parts."""

    kind = "local_softmax"
    follows = ("local_residual", "gain")

    def __init__(self, dim: int, num_heads: int, *, local_residual: bool = True, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, local_residual=local_residual, **kwargs)


def softmax_feature_map(name: str, feature_map: str | None) -> str | None:
    """φ of a softmax attention, by its name, for families with softmax attentions of their own.

    None for an attention that is not softmax. `feature_map` is the model-wide choice.
    """
    if name == MappedSoftmaxAttention.kind:
        return feature_map or "relu"
    return "identity" if name == SoftmaxAttention.kind else None


LETTERS = {"I": "inline", "S": "softmax", "L": "linear"}

AttentionSpec = str | Sequence[str]


def parse_attention(spec: AttentionSpec, depths: Sequence[int]) -> list[list[str]]:
    """The attention of every block, by stage.

    Args:
        spec: letters per stage ("IIIS": I InLine, S softmax, L linear), a sequence of names per stage, or one name for
            all stages. "inline:2" is a stage whose first two blocks are InLine and whose others are softmax.
        depths: blocks per stage.
    """
    if not isinstance(spec, str):
        stages = list(spec)
    elif spec.partition(":")[0] in ATTENTIONS:
        stages = [spec] * len(depths)
    else:
        stages = list(spec)
    if len(stages) != len(depths):
        raise ValueError(
            f"attention={spec!r} names {len(stages)} stages but the model has {len(depths)}; "
            f"expected a letter ({', '.join(LETTERS)}) or a name ({', '.join(ATTENTIONS)}) for each"
        )
    return [_parse_stage(stage, depth, spec) for stage, depth in zip(stages, depths, strict=True)]


def _parse_stage(stage: str, depth: int, spec: AttentionSpec) -> list[str]:
    name, colon, count = LETTERS.get(stage, stage).partition(":")
    if name not in ATTENTIONS or (colon and not count.isdecimal()):
        raise ValueError(
            f"attention={spec!r}: {stage!r} is unknown; expected a letter ({', '.join(LETTERS)}), "
            f"a name ({', '.join(ATTENTIONS)}) or a name with a count of blocks, such as 'inline:2'"
        )
    first = int(count) if colon else depth
    if first > depth:
        raise ValueError(f"attention={spec!r}: {stage!r} asks for {first} blocks of a stage that has {depth}")
    return [name] * first + ["softmax"] * (depth - first)


def describe_attention(stages: Sequence[Sequence[str]]) -> str:
    """The short form of what `parse_attention` returned: "IIIS", or "I I I:2 S" if a stage is mixed"""
    letters = {name: letter for letter, name in LETTERS.items()}
    words = []
    for blocks in stages:
        first = sum(name == blocks[0] for name in blocks)
        word = letters.get(blocks[0], blocks[0])
        words.append(word if first == len(blocks) else f"{word}:{first}")
    return "".join(words) if all(len(word) == 1 for word in words) else " ".join(words)


def build_attention(
    name: str,
    dim: int,
    num_heads: int,
    *,
    feature_map: str | None = None,
    local_residual: bool | None = None,
    gain: bool | float = False,
    **kwargs: Any,
) -> Attention:
    """An attention by name. Model-wide choices apply if its `follows` names them; None keeps the default."""
    cls = ATTENTIONS[name]
    choices: dict[str, Any] = dict(feature_map=feature_map, local_residual=local_residual, gain=gain)
    chosen = {key: value for key, value in choices.items() if value is not None and key in cls.follows}
    return cls(dim, num_heads, **chosen, **kwargs)
