"""What a converted attention module gains: a linear form of its softmax, a local residual, a gain for every head.

A converted module stays the object that it was. Its parameters keep their values, their names and their identity, so
optimizers, hooks and checkpoints that refer to them stay valid. Only its class changes, to a subclass of its own class
and of `LinearizedAttention`, whose `forward` computes the linear form instead of softmax.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inline_attention.layers import LocalWeight
from inline_attention.layers.local import LocalTerm
from inline_attention.layers.tangent import anchors_of_rows, expand_at_anchors, tangent_rows
from inline_attention.layers.token_grid import GridSource, TokenGrid
from inline_attention.layers.tokens import softmax_of_seen
from inline_attention.layers.written_out import WrittenOut
from inline_attention.ops import (
    FEATURE_MAPS,
    Grid,
    Normalization,
    attention_matrix,
    linear_attention_projected,
    local_residual,
    tangent_attention_projected,
)
from inline_attention.ops.precision import product_dtype
from inline_attention.ops.projections import unstack
from inline_attention.ops.reference import accumulation_dtype, anchor_weight, masked_mean, zero_absent

MAX_REGIONS = 4  # a cyclic shift brings at most two bands of rows and two of columns into one window

# The linear forms that have a φ: how they normalise, and the φ that they are published with.
_FORMS: dict[str, tuple[Normalization, str]] = {
    "inline": ("subtract", "identity"),
    "linear": ("divide", "relu"),
    "mala": ("magnitude", "elu_plus_one"),
}
TANGENT = "tangent"
FORMS = (TANGENT, *_FORMS)


class LinearForm(NamedTuple):
    """Which attention takes the place of softmax."""

    attention: str  # one of FORMS
    feature_map: str = "identity"
    anchors: int = 1  # queries around which "tangent" expands; all other forms have one

    @classmethod
    def parse(cls, attention: str, feature_map: str | None, anchors: int = 1) -> "LinearForm":
        if attention not in FORMS:
            raise ValueError(f"attention={attention!r} is unknown; expected one of {', '.join(FORMS)}")
        if type(anchors) is not int or anchors < 1:  # not bool
            raise ValueError(f"anchors={anchors}; expected 1 or more, an integer")
        if anchors > 1 and attention != TANGENT:
            raise ValueError(f"anchors={anchors}: attention={attention!r} has none. Choose attention='tangent'")
        if attention == TANGENT:
            if feature_map not in (None, "identity"):
                raise ValueError(
                    f"feature_map={feature_map!r}: the tangent of softmax has none. "
                    "Leave it out, or choose attention='inline'"
                )
            return cls(attention, anchors=anchors)
        if feature_map is not None and feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map={feature_map!r} is unknown; expected one of {', '.join(FEATURE_MAPS)}")
        return cls(attention, feature_map or _FORMS[attention][1])

    def __str__(self) -> str:
        words = [self.attention]
        if self.feature_map != "identity":
            words.append(f"φ {self.feature_map}")
        if self.anchors > 1:
            words.append(f"{self.anchors} anchors")
        return ", ".join(words)


@dataclass(frozen=True)
class Call:
    """One call of an attention: everything but the form that it is computed in."""

    projections: Sequence[Tensor]  # q, k and v as `linear_attention_projected` takes them
    scale: float
    local_weight: Tensor | None = None  # (B, heads, d, 9)
    grid: Grid | None = None
    num_prefix_tokens: int = 0
    token_mask: Tensor | None = None  # (B, N) bool, of keys
    query_mask: Tensor | None = None  # (B, Nq) bool
    bias: Tensor | None = None  # (heads, N, N), added to the logits
    regions: Tensor | None = None  # (B, N) integers below MAX_REGIONS: different ones do not attend to each other
    mean_query: Tensor | None = None  # (B, 1, heads, d), if it is known without a pass over the queries

    def in_region(self, region: int) -> "Call":
        assert self.regions is not None
        inside = self.regions == region
        tokens = inside if self.token_mask is None else inside & self.token_mask
        queries = inside if self.query_mask is None else inside & self.query_mask
        return replace(self, regions=None, token_mask=tokens, query_mask=queries, mean_query=None)

    def without_residual(self) -> "Call":
        return replace(self, local_weight=None, grid=None, num_prefix_tokens=0)

    def add_residual(self, out: Tensor) -> Tensor:
        """An output (B, Nq, heads, d) with the local residual of this call, if there is one."""
        if self.local_weight is None:
            return out
        assert self.grid is not None
        options: dict[str, Any] = dict(grid=self.grid, num_prefix_tokens=self.num_prefix_tokens)
        local = local_residual(unstack(self.projections)[2], self.local_weight, token_mask=self.token_mask, **options)
        return zero_absent(out + local, self.query_mask)


class Removable(Protocol):
    """A change of a model that can be undone, such as a hook."""

    def remove(self) -> None: ...


class LinearizedAttention(nn.Module):
    """The base of all converted modules. A subclass projects, calls `attend_linearly`, and projects back.

    A subclass also derives from the class that it converts, and has no `__init__` of its own: a conversion changes the
    class of a module that exists.
    """

    form: LinearForm
    local: LocalWeight | None
    local_before: str  # whether the attribute was "absent", "none" or "present" before the conversion
    gain: nn.Parameter | None  # (heads,): factor of the query's deviation from the anchor; see `calibrate`
    token_grid: TokenGrid | None
    # Replaces the computation, for measurements: (module, call) → what `attend_linearly` returns.
    observer: "Callable[[LinearizedAttention, Call], Tensor] | None"

    gets_grid: ClassVar[bool] = False  # True: `forward` gets the grid; False: the patch embedding has it
    has_bias: ClassVar[bool] = False  # whether a bias (heads, N, N) is added to the logits
    is_written_out: ClassVar[bool] = True  # False: where the tokens of a call are on the model's map is not known

    # About a module that is not yet converted.

    @classmethod
    def why_not(cls, module: nn.Module, parent: nn.Module) -> str | None:
        """Why this module cannot be converted; None if it can."""
        return None

    @classmethod
    def heads(cls, module: Any) -> tuple[int, int]:
        """(heads, channels of a head)"""
        return module.num_heads, module.head_dim

    @classmethod
    def num_gains(cls, module: Any) -> int:
        """The heads of one call, each of which can have a gain."""
        return cls.heads(module)[0]

    @classmethod
    def has_map(cls, module: nn.Module) -> bool:
        """Whether queries and keys are the same tokens of one map, so that there can be a local residual."""
        return True

    @classmethod
    def num_tokens(cls, module: nn.Module) -> int | None:
        """The keys of one call, if the module itself knows."""
        return None

    @classmethod
    def maps(cls, module: Any, *args: Any) -> tuple[Grid, Grid] | None:
        """The (height, width) of the queries' map and of the keys', from the arguments of `forward`, if they say so."""
        return None

    @classmethod
    def grid_source(cls, ancestor: Any) -> GridSource | None:
        """The patch embedding, if `ancestor`, a module around the attention, is the model that has it."""
        return None

    # A module that has just been converted, or is about to be restored.

    @classmethod
    def around(cls, model: nn.Module, converted: Sequence[nn.Module]) -> list[Removable]:
        """Changes what is around the converted modules of this class in a model. `restore` removes the changes."""
        return []

    def converted(self) -> None:
        """Called after a conversion."""

    def restored(self) -> None:
        """Called before a restoration."""

    # The linear form.

    def attend_linearly(
        self,
        *projections: Tensor,
        scale: float,
        x: Tensor | None = None,
        grid: Grid | None = None,
        token_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        bias: Tensor | None = None,
        regions: Tensor | None = None,
        mean_query: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """The replacement of softmax(scale·q·kᵀ + bias)·v, with the local residual if there is one.

        Args:
            projections: (B, N, m, heads, d) tensors that hold q, k and v in this order, m of them each.
            scale: of the logits.
            x: (B, N, C), the module's input. The local weight is made from its mean, or from that of v without it.
            grid: (height, width) of the token map, if the caller knows it.
            token_mask: (B, N) bool, True for keys that are present.
            query_mask: (B, Nq) bool, True for queries that are present.
            bias: (heads, N, N), added to the logits, such as a bias of relative positions. It is kept to first order.
            regions: (B, N) integers below MAX_REGIONS. Tokens of different regions do not attend to each other.
            mean_query: makes the mean query (B, 1, heads, d) from the mean of x over the present keys (B, C), if that
                is the mean of x over the present queries too, and queries are an affine function of x.

        Returns:
            (B, Nq, heads, d)
        """
        num_prefix_tokens, local_weight, anchor = 0, None, None
        if self.local is not None:
            if grid is None:
                assert self.token_grid is not None
                measured, num_prefix_tokens = self.token_grid.grid, self.token_grid.num_prefix_tokens
                if isinstance(measured, list):
                    raise ValueError(
                        "images of different sizes in one batch have no common token map for the local residual: "
                        "convert the model with local_residual=False"
                    )
                grid = measured
                if grid is None:
                    raise ValueError(
                        "the patch embedding was not called before the attention, so the token map's size is not "
                        "known: call the whole model, or convert it with local_residual=False"
                    )
            tokens = unstack(projections)[2].flatten(2)
            is_of_input = x is not None and x.shape[-1] == tokens.shape[-1]
            if x is not None and is_of_input:
                tokens = x.to(product_dtype(x))
            mean = masked_mean(tokens, token_mask)
            local_weight = self.local(mean)
            if mean_query is not None and is_of_input and self.form == LinearForm(TANGENT):
                anchor = mean_query(mean)
        return self.compute(
            Call(
                projections=projections,
                scale=scale,
                local_weight=local_weight,
                grid=grid if self.local is not None else None,
                num_prefix_tokens=num_prefix_tokens,
                token_mask=token_mask,
                query_mask=query_mask,
                bias=bias,
                regions=regions,
                mean_query=anchor,
            )
        )

    def compute(self, call: Call) -> Tensor:
        """A call in the linear form with the module's gain, unless an observer replaces it."""
        return self.linear_form(call, self.gain) if self.observer is None else self.observer(self, call)

    def linear_form(self, call: Call, gain: Tensor | None = None) -> Tensor:
        """A call in the linear form; `gain` (heads,), None for one."""
        if call.regions is not None:
            parts = [self.linear_form(call.in_region(region), gain) for region in range(MAX_REGIONS)]
            return torch.stack(parts).sum(0)  # each is zero outside its region
        if self.form.anchors > 1:
            return self.piecewise_form(call, gain)
        return self.one_expansion(call, gain)

    def piecewise_form(self, call: Call, gain: Tensor | None) -> Tensor:
        """The tangent around several anchors. The local residual is added once for all of them."""
        bare, q = call.without_residual(), unstack(call.projections)[0]
        out = expand_at_anchors(
            lambda anchor: self.one_expansion(bare, gain, anchor), q, call.query_mask, count=self.form.anchors
        )
        return call.add_residual(out)

    def one_expansion(self, call: Call, gain: Tensor | None, anchor: Tensor | None = None) -> Tensor:
        """A call without regions, of all queries around one anchor (B, 1, heads, d); None: the form's own."""
        projections = tuple(call.projections)
        options: dict[str, Any] = dict(
            scale=call.scale,
            local_weight=call.local_weight,
            grid=call.grid,
            num_prefix_tokens=call.num_prefix_tokens,
            token_mask=call.token_mask,
            query_mask=call.query_mask,
        )
        shares = None
        if self.form.attention == TANGENT:
            anchor = call.mean_query if anchor is None else anchor
            if anchor is not None or gain is not None or call.bias is not None:
                q, k, v = unstack(projections)
                options["anchor"] = anchor = mean_of_rows(q, call.query_mask) if anchor is None else anchor
                if gain is not None:
                    q = (anchor + gain.to(q.dtype)[:, None] * (q - anchor)).to(q.dtype)
                    projections = tuple(rows.unsqueeze(2) for rows in (q, k, v))
                if call.bias is not None:
                    shares = anchor_weight(anchor, k, call.token_mask, call.scale)
            out = tangent_attention_projected(*projections, **options)
        else:
            normalization, _ = _FORMS[self.form.attention]
            if gain is not None:  # rows sum to one, so this is the gain of the output's deviation from the mean
                q, k, v = unstack(projections)
                mean = mean_of_rows(v, call.token_mask)
                v = mean + gain.to(v.dtype)[:, None] * (v - mean)
                projections = tuple(rows.unsqueeze(2) for rows in (q, k, v))
            options.update(normalization=normalization, feature_map=self.form.feature_map)
            out = linear_attention_projected(*projections, **options)
        if call.bias is not None:
            out = out + bias_term(call.bias, unstack(projections)[2], shares, call)
        return out

    def softmax_form(self, call: Call) -> Tensor:
        """The same call as the module computed it before it was converted. It may have had a local residual then."""
        q, k, v = (rows.transpose(1, 2) for rows in unstack(call.projections))
        mask: Tensor | None = None
        if call.token_mask is not None:
            mask = call.token_mask[:, None, None, :]
        if call.regions is not None:
            same = call.regions[:, None, :, None] == call.regions[:, None, None, :]
            mask = same if mask is None else mask & same
        if call.bias is not None:
            bias = call.bias[None].to(q.dtype)
            mask = bias if mask is None else bias.masked_fill(~mask, torch.finfo(q.dtype).min)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale).transpose(1, 2)
        out = zero_absent(out, call.query_mask)
        return call.add_residual(out) if self.local_before == "present" else out

    # The linear form written out as a matrix, O(N²). Analyses and tests use it; models do not.

    def write_out(self, *args: Any, token_map: tuple[Grid, int] | None = None, **kwargs: Any) -> WrittenOut:
        """What `forward` computes from the same arguments, as a matrix of weights and a local term.

        Args:
            token_map: the size of the map and the number of prefix tokens, for a module that does not know them.
        """
        calls: list[Call] = []

        def record(module: LinearizedAttention, call: Call) -> Tensor:
            calls.append(call)
            return module.linear_form(call, module.gain)

        self._observed_by(record, *args, **kwargs)
        call, gain = calls[0], self.gain
        q, k, v = unstack(call.projections)
        maps, reduced = self.maps(self, *args), q.shape[1] != k.shape[1]
        moves_residual = gain is not None and self.form.attention != TANGENT and call.local_weight is not None
        is_known = not reduced or (maps is not None and call.token_mask is None)
        if len(calls) > 1 or not (self.is_written_out and is_known) or (moves_residual and call.regions is not None):
            softmax = next(cls for cls, adapter in REGISTRY.items() if adapter is type(self))
            raise ValueError(
                f"a linearised {softmax.__name__} is not written out in this case; analyse the original model"
            )
        grid, num_prefix_tokens = call.grid, call.num_prefix_tokens
        if grid is None and maps is not None:
            grid = maps[0]
        if grid is None:
            if token_map is None:
                raise ValueError(
                    "a linearised attention without a local residual does not know its token map; convert the model "
                    "with local_residual=True, or analyse the original model"
                )
            grid, num_prefix_tokens = token_map

        local: tuple[LocalTerm, ...] = ()
        of_mean: Tensor | float = 0.0  # the residual of the part of v that the gain removes
        if call.local_weight is not None:
            taps = call.local_weight
            if gain is not None and self.form.attention != TANGENT:
                rest = (1 - gain)[:, None] * mean_of_rows(v, call.token_mask)
                options: dict[str, Any] = dict(grid=grid, num_prefix_tokens=num_prefix_tokens)
                of_mean = local_residual(rest.expand_as(v), taps, token_mask=call.token_mask, **options)
                taps = gain[:, None, None] * taps
            local = (LocalTerm(taps.flatten(1, 2).unflatten(2, (3, 3)), sample_regions=call.regions),)

        def matrix(rows: slice, samples: slice, heads: slice, mask: Tensor | None) -> Tensor:
            chosen, bias = (None if x is None else x[heads] for x in (gain, call.bias))
            if call.regions is not None:
                regions = call.regions[samples, None]
                same = regions[:, :, rows, None] == regions[:, :, None]
                mask = same if mask is None else mask & same
            return self.rows_of_weights(
                q[samples, :, heads],
                k[samples, :, heads],
                rows=rows,
                mask=mask,
                scale=call.scale,
                gain=chosen,
                bias=None if bias is None else bias[:, rows],
            )

        def finish(attended: Tensor, local_sum: Tensor) -> Tensor:
            out = (attended + local_sum + of_mean).to(v.dtype)
            return self._observed_by(lambda module, call: out, *args, **kwargs)

        return WrittenOut(
            kind=self.form.attention,
            grid=grid,
            num_prefix_tokens=num_prefix_tokens,
            q=q,
            k=k,
            v=zero_absent(v, call.token_mask),
            local=local,
            token_mask=call.token_mask,
            key_grid=maps[1] if reduced and maps is not None else None,
            matrix=matrix,
            finish=finish,
        )

    def rows_of_weights(
        self,
        q: Tensor,
        k: Tensor,
        *,
        rows: slice,
        mask: Tensor | None,
        scale: float,
        gain: Tensor | None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Rows of the matrix whose product with v is the linear form of a call, without the local residual.

        Args:
            q: (B, Nq, heads, d), all tokens.
            k: (B, N, heads, d), of the same tokens unless N is another number
            rows: the queries whose rows are returned.
            mask: bool, broadcasts to the result. False where a token is as if absent for a query.
            scale: of the logits.
            gain: (heads,), None for one.
            bias: (heads, rows, N) of the logits.

        Returns:
            (B, heads, rows, N)
        """

        def of_bias(shares: Tensor) -> Tensor | float:
            """p_j·(b_ij − Σ_t p_t·b_it), as `bias_term`"""
            return 0.0 if bias is None else shares * (bias - (shares * bias).sum(-1, keepdim=True))

        if self.form.attention == TANGENT:
            q, k = (x.to(accumulation_dtype(x.dtype)) for x in (q, k))
            by_head = q.transpose(1, 2)
            of_queries = mask if q.shape[1] == k.shape[1] else None  # reduced keys are no queries
            anchors, own = anchors_of_rows(by_head, rows, of_queries, count=self.form.anchors), by_head[:, :, rows]
            if gain is not None:
                own = anchors + gain.to(q.dtype)[:, None, None] * (own - anchors)
            weights = tangent_rows(own, k, anchors, mask=mask, scale=scale)
            return weights if bias is None else weights + of_bias(softmax_of_seen(anchors, k, mask, scale))
        weights = attention_matrix(
            q[:, rows],
            k,
            kind=self.form.attention,  # type: ignore[arg-type]  # one of _FORMS
            feature_map=self.form.feature_map,
            scale=scale,
            pair_mask=mask,
        )
        if gain is None and bias is None:
            return weights
        seen = torch.ones_like(weights) if mask is None else mask.to(weights.dtype).expand_as(weights)
        shares = seen / seen.sum(-1, keepdim=True).clamp(min=1)
        weights = weights + of_bias(shares)
        if gain is not None:  # a gain of v's deviation from its mean over the tokens that a query sees
            mean = weights.sum(-1, keepdim=True) * shares
            weights = mean + gain.to(weights.dtype)[:, None, None] * (weights - mean)
        return weights

    def _observed_by(
        self, observer: "Callable[[LinearizedAttention, Call], Tensor]", *args: Any, **kwargs: Any
    ) -> Tensor:
        """The output of `forward` with another observer. Modules that also return weights have it first."""
        before, self.observer = self.observer, observer
        try:
            out = self.forward(*args, **kwargs)
        finally:
            self.observer = before
        return out if isinstance(out, Tensor) else out[0]


def mean_of_rows(rows: Tensor, mask: Tensor | None) -> Tensor:
    """(B, N, heads, d) → (B, 1, heads, d)"""
    return masked_mean(rows.flatten(2), mask).unflatten(1, rows.shape[2:])[:, None]


def number_regions(same: Tensor) -> Tensor:
    """Numbers the regions of each window from zero: same (windows, N, N) bool, of pairs of tokens → (windows, N)"""
    first = same.int().argmax(2)  # the first token of each token's region
    is_first = first == torch.arange(first.shape[1], device=first.device)
    return is_first.cumsum(1).gather(1, first) - 1


def bias_term(bias: Tensor, v: Tensor, shares: Tensor | None, call: Call) -> Tensor:
    """What a bias of the logits adds to the output, to first order: Σ_j p_j·(b_ij − Σ_t p_t·b_it)·v_j.

    bias (heads, N, N), v (B, N, heads, d), shares p (B, heads, N) or None for equal ones → (B, N, heads, d)
    """
    mask = call.token_mask
    if shares is None:
        present = torch.ones_like(v[:, :, 0, 0]) if mask is None else mask.to(v.dtype)
        shares = (present / present.sum(1, keepdim=True).clamp(min=1))[:, None].expand(-1, v.shape[2], -1)
    values = zero_absent(v, mask).transpose(1, 2)  # (B, heads, N, d)
    shares = shares.to(v.dtype)
    centred = shares[..., None] * (values - shares[:, :, None] @ values)
    return zero_absent((bias.to(v.dtype) @ centred).transpose(1, 2), call.query_mask)


# The modules that are known.

REGISTRY: dict[type[nn.Module], type[LinearizedAttention]] = {}
# Why attentions of a class and its subclasses are not replaced. None: subclasses that are not registered are unknown.
LEFT_ALONE: dict[type[nn.Module], str | None] = {}
# Why attentions of a class and its subclasses have no linear form.
REFUSED: dict[type[nn.Module], str] = {}

LinearizedT = TypeVar("LinearizedT", bound=type[LinearizedAttention])


def register(softmax: type[nn.Module]) -> Callable[[LinearizedT], LinearizedT]:
    """Makes a softmax attention module known to `linearize`.

    Decorate a class that derives from `LinearizedAttention` and from `softmax`, in this order. Modules of exactly the
    class `softmax` are converted to it.
    """

    def decorate(cls: LinearizedT) -> LinearizedT:
        if not (issubclass(cls, LinearizedAttention) and issubclass(cls, softmax)):
            raise ValueError(f"{cls.__name__} must derive from LinearizedAttention and from {softmax.__name__}")
        if softmax in REGISTRY:
            raise ValueError(f"{softmax.__name__} is already converted to {REGISTRY[softmax].__name__}")
        REGISTRY[softmax] = cls
        return cls

    return decorate
