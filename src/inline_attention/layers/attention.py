"""The base of all attention modules. They have one call, `attention(x, grid)`, on token rows (B, N, C).

A new attention is a subclass of `Attention`. With `@register_attention`, every model takes it by name.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.ops import FEATURE_MAPS, Backend, Grid, LocalSource, local_residual
from inline_attention.ops.backends import check_backend
from inline_attention.ops.checks import check_grid, check_mask, check_rows
from inline_attention.ops.local import TAPS
from inline_attention.ops.precision import product_dtype
from inline_attention.ops.projections import unstack
from inline_attention.ops.reference import masked_mean, mean_of_rows, zero_absent

from .local import LocalTerm, LocalWeight, ParameterPair
from .mode import asked_once, is_changed, is_plain
from .queries import AffineMap, HeadGain
from .token_grid import TokenGrid, find_grid, token_mask_of, wait_for_model
from .tokens import pad_images
from .written_out import WrittenOut


class Attention(nn.Module):
    """The projections, heads and local terms that all attentions share. A subclass defines `global_attention`.

    Args:
        dim: channels C.
        num_heads: heads; each has C / num_heads contiguous channels of q, k and v.
        feature_map: φ of linear attentions, as for `linear_attention`, or "relu_affine": ReLU(A·x + b), learned.
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
        backend: as for `inline_attention`. It is an attribute, too, and may be set later.
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
    # Whether queries and keys are rotated by the positions of their tokens.
    rope: bool = False
    # Whether `forward` and `project`, and `forward` and `merge`, are those below. A call asks for this and not for its
    # class, which torch.compile would check in every call.
    has_plain_start: ClassVar[bool] = True
    has_plain_end: ClassVar[bool] = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        is_plain_forward = cls.forward is Attention.forward
        cls.has_plain_start = is_plain_forward and cls.project is Attention.project
        cls.has_plain_end = is_plain_forward and cls.merge is Attention.merge

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
        if num_heads < 1 or dim % num_heads:
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
        self.model_grid: TokenGrid | None = None
        if norm_layer is not None:
            wait_for_model(self)

    def set_grid(self, grid: Grid) -> None:
        """Resizes parameters that depend on the size of the map. Other sizes run without it too."""

    # These two are no properties: torch.compile would check the class of every attention in every call.
    def uses_grid(self) -> bool:
        """Whether the output depends on how the tokens are laid out on a map."""
        return self.local is not None or self.position is not None or self.rope

    def uses_mean_query(self) -> bool:
        """Whether `attend` takes `mean_query` too."""
        return False

    def forward(
        self,
        x: Tensor,
        grid: Grid | None = None,
        *,
        token_mean: Tensor | None = None,
        token_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        project: bool = True,
        qkv: Tensor | None = None,
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
            project: False returns the outputs of the heads, for a block that computes `proj` itself. Needs `grid`.
            qkv: what the linear layer of this name makes of x, from a block that has computed it. Needs `grid`.

        Returns:
            (B, N, C)
        """
        check_rows("x", x, layout="(B, N, C)")
        if attn_mask is not None and token_mask is not None:
            raise ValueError("token_mask and attn_mask are two forms of the same mask; pass one of them")
        if attn_mask is not None or is_causal:
            token_mask = token_mask_of(attn_mask, is_causal, x)
        if grid is None:
            found = find_grid(self, x)
            if isinstance(found, list):
                return self.forward_each(x, found)
            grid = found
        if self.uses_grid():
            check_grid(grid, tokens=x.shape[1], num_prefix_tokens=self.num_prefix_tokens)
        check_mask("token_mask", token_mask, x)
        x = zero_absent(x, token_mask)  # absent tokens must not reach the gradients of the projections
        x = x.to(product_dtype(x))  # before the mean token is taken, so that a compiled norm writes one output
        projections = self.project(x, grid) if qkv is None else self.split(qkv)
        options: dict[str, Any] = {}
        if self.uses_mean_query():
            mean = masked_mean(x, token_mask)
            if self.has_affine_queries():
                options["mean_query"] = self.mean_query(mean)
            else:
                options["mean_query"] = mean_of_rows(unstack(projections)[0], token_mask)
            token_mean = mean if token_mean is None else token_mean
        options["local_weight"] = self.local_input(x, token_mean, token_mask)
        out = self.attend(projections, grid=grid, token_mask=token_mask, **options)
        out = self.apply_gate(self.add_position_bias(out, token_mask), x)
        return self.merge(out) if project else out.flatten(2)

    def has_plain_qkv(self) -> bool:
        """Whether the queries, keys and values are what one linear layer makes of the tokens."""
        return (
            self.has_plain_start
            and not is_changed(self)
            and self.fused_qkv
            and self.query_gain is None
            and is_plain(self.qkv, nn.Linear)
            and self.qkv.bias is not None
        )

    @asked_once
    def has_affine_queries(self) -> bool:
        """Whether a query is an affine function of its token, and nothing else sees the calls that make it.

        A norm is not affine. An adapter may draw dropout, and a hook would count one call more.
        """
        linears = (self.qkv,) if self.fused_qkv else (self.q, self.kv)
        return (
            self.has_plain_start
            and self.q_norm is None
            and (self.affine is None or is_plain(self.affine, AffineMap))
            and all(is_plain(linear, nn.Linear) for linear in linears)
        )

    def has_plain_projection(self) -> bool:
        """Whether `proj` is all that inference adds to `forward` with `project=False`."""
        return (
            self.has_plain_end
            and not is_changed(self)
            and is_plain(self.proj, nn.Linear)
            and self.proj.bias is not None
            and is_plain(self.proj_drop, nn.Dropout)
            and not self.scale_norm
        )

    def forward_each(self, x: Tensor, grids: Sequence[Grid]) -> Tensor:
        """Images of different sizes in one batch, every one with its own map: (B, N, C) → (B, N, C), padding zero"""
        lengths = self.lengths(grids)
        outs = [self.forward(x[i : i + 1, :n], grid)[0] for i, (n, grid) in enumerate(zip(lengths, grids, strict=True))]
        return pad_images(outs, x.shape[1])

    def lengths(self, grids: Sequence[Grid]) -> list[int]:
        """The tokens of images of different sizes"""
        return [self.num_prefix_tokens + height * width for height, width in grids]

    def project(self, x: Tensor, grid: Grid) -> tuple[Tensor, ...]:
        """x (B, N, C) → q, k and v as `linear_attention_projected` takes them: tensors (B, N, m, heads, d)"""
        if self.fused_qkv:
            return self.split(self.project_queries(x, self.qkv))
        return self.split(self.project_queries(x, self.q), self.kv(x))

    def split(self, *projected: Tensor) -> tuple[Tensor, ...]:
        """The outputs of `qkv`, or of `q` and `kv`, by heads, and what follows: norms and an affine φ"""
        projections = tuple(y.unflatten(-1, (-1, self.num_heads, self.head_dim)) for y in projected)
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

        It needs no pass over the queries, and `has_affine_queries`.
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

    def local_input(
        self, x: Tensor, token_mean: Tensor | None, token_mask: Tensor | None
    ) -> Tensor | LocalSource | None:
        """What `attend` takes as the local weight. A `LocalSource` only if the operation takes one."""
        return self.local_weight(x, token_mean, token_mask)

    def attend(
        self, projections: Sequence[Tensor], *, grid: Grid, token_mask: Tensor | None, local_weight: Tensor | None
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

    def shared_options(
        self, *, grid: Grid, token_mask: Tensor | None, local_weight: Tensor | LocalSource | None
    ) -> dict[str, Any]:
        """The arguments that `attend` passes to any operation, besides those of its own"""
        return dict(
            local_weight=local_weight,
            grid=None if local_weight is None else grid,  # `find_grid` makes one up where nothing needs it
            num_prefix_tokens=self.num_prefix_tokens,
            token_mask=token_mask,
            query_mask=token_mask,
            backend=self.backend,
        )

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
            found: Grid | list[Grid] | None = find_grid(self, x)
            if self.model_grid is not None:
                found = self.model_grid.grid
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
        """All that is added to weights @ v. `local_weight` is the result of the method of that name."""
        if local_weight is None:
            return []
        bias = None if self.position is None else self.position.bias
        return [LocalTerm(local_weight.flatten(1, 2).unflatten(2, (3, 3)), bias)]
