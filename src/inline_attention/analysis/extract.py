"""The attention of a running model, layer by layer, written out on demand.

Nothing in a model is changed: hooks hear what goes into its attention modules and what comes out, and the weights are
computed again from it. Known are the attentions of this library in all its families, and the softmax attention of
timm's vision transformers and Swins.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import timm.layers
import torch
from timm.models import swin_transformer
from torch import Tensor, nn

from inline_attention.layers.attention import Attention, Grid, SoftmaxAttention
from inline_attention.layers.local import LocalTerm
from inline_attention.layers.mode import evaluation_mode
from inline_attention.layers.windows import WindowPlan, ceil_div
from inline_attention.models.cswin import StripeAttention
from inline_attention.models.pvt import ReducedSoftmaxAttention
from inline_attention.models.swin import OTHER_REGION, SwinBlock, WindowSoftmaxAttention
from inline_attention.ops import attention_matrix

from .neighbours import neighbours

DEFAULT_CHUNK_BYTES = 64 * 2**20  # of weights at a time
Matrix = Callable[[slice, slice, slice, Tensor | None], Tensor]  # of rows, samples, heads and a mask


@dataclass(frozen=True, eq=False)
class LayerAttention:
    """One attention layer and what passed through it, for S samples: the images, or the windows of all images.

    Its weights (S, heads, N, N) are never held whole: `weights` gives chosen rows of them, computed anew.
    """

    name: str  # of the module in the model
    kind: str  # "inline", "linear", "softmax", …
    grid: Grid  # (height, width) of the tokens that attend to each other: the map, or a window of it
    num_prefix_tokens: int
    q: Tensor  # (S, N, heads, d), as the attention compares them; φ of linear attentions is yet to come
    k: Tensor  # (S, keys, heads, d)
    v: Tensor  # (S, keys, heads, d)
    output: Tensor  # (S, N, C), what the module returned
    local: tuple[LocalTerm, ...]  # what is added to weights @ v
    token_mask: Tensor | None  # (S, N), False on the padding of windows
    key_grid: Grid | None  # where the keys are a reduced map; None: keys and queries are the same tokens
    windows: WindowPlan | None  # how the map was cut
    stripes: bool  # heads attend in stripes of the map
    matrix: Matrix  # `weights` without the token mask
    finish: Callable[[Tensor, Tensor], Tensor]  # (weights @ v, local terms), (S, N, heads, d) each → output (S, N, C)

    @property
    def map_grid(self) -> Grid:
        """(height, width) of the layer's whole token map."""
        return self.grid if self.windows is None else self.windows.size

    @property
    def num_heads(self) -> int:
        return self.q.shape[2]

    @torch.no_grad()
    def weights(
        self,
        rows: slice = slice(None),
        *,
        samples: slice = slice(None),
        heads: slice = slice(None),
        mask: Tensor | None = None,
    ) -> Tensor:
        """Chosen rows of the attention matrices, of chosen samples and heads.

        Args:
            rows: the queries, prefix tokens first.
            mask: bool, broadcasts to the result; False where a token is as if absent for a query.

        Returns:
            (S, heads, rows, keys). Rows and columns of absent tokens are zero.
        """
        if self.token_mask is None:
            return self.matrix(rows, samples, heads, mask)
        token_mask = self.token_mask[samples]
        present = token_mask[:, None, None, :]
        weights = self.matrix(rows, samples, heads, present if mask is None else present & mask)
        return weights.masked_fill(~token_mask[:, None, rows, None], 0)

    def row_chunks(self, max_bytes: int = DEFAULT_CHUNK_BYTES) -> Iterator[slice]:
        """All rows, in slices whose weights take no more than this (a single row may)."""
        tokens, keys = self.q.shape[1], self.k.shape[1]
        row_bytes = self.q.shape[0] * self.num_heads * keys * torch.float32.itemsize
        size = max(1, max_bytes // row_bytes)
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))

    @torch.no_grad()
    def local_weights(self, rows: slice = slice(None), *, channel: int | None = None) -> Tensor:
        """What the local terms add to chosen rows: their taps, of one channel of each head or averaged over them.

        Returns:
            (S, heads, rows, keys)
        """
        samples, tokens, heads, d = self.v.shape
        index = torch.arange(self.q.shape[1], device=self.v.device)[rows]
        out = self.v.new_zeros(samples, heads, len(index), tokens)
        for term in self.local:
            at, reached = self._taps(term, index)
            taps = term.weight.flatten(2).unflatten(1, (heads, d))  # (S or 1, heads, d, taps)
            chosen = taps.mean(2) if channel is None else taps[:, :, channel]
            groups = heads // reached.shape[0]
            values = chosen[:, :, None] * reached.repeat_interleave(groups, 0)  # (S or 1, heads, rows, taps)
            shape = (samples, heads, *at.shape)
            out.scatter_add_(3, at.clamp(min=0).expand(shape), values.expand(shape))
        return out

    @torch.no_grad()
    def attend(self, *, mask: Callable[[slice], Tensor] | None = None, mask_local: bool = True) -> Tensor:
        """The module's output computed from the written-out weights: matrix @ v, local terms, projection.

        Args:
            mask: gives for chosen rows which tokens they see, bool (rows, keys) or (S, rows, keys); None for all.
            mask_local: taps of the local terms on tokens that a query does not see are zero; else they stay.

        Returns:
            (S, N, C)
        """
        attended, local = [], []
        for rows in self.row_chunks():
            seen = None if mask is None else mask(rows)
            if seen is not None:
                seen = seen.unflatten(0, (-1, 1)) if seen.ndim == 3 else seen[None, None]  # (S or 1, 1, rows, keys)
            attended.append(torch.einsum("shij,sjhd->sihd", self.weights(rows, mask=seen), self.v))
            local.append(self._local_sum(rows, seen if mask_local else None))
        return self.finish(torch.cat(attended, 1), torch.cat(local, 1))

    def error(self) -> float:
        """How far `attend` is from what the module returned, relative to the largest value of that."""
        difference = (self.attend() - self.output).abs()
        if self.token_mask is not None:
            difference = difference.masked_fill(~self.token_mask[:, :, None], 0)
        return float(difference.max() / self.output.abs().max())

    def row(
        self, image: int, query: tuple[int, int] | int, *, local: bool = False, channel: int | None = None
    ) -> Tensor:
        """What one query of one image gives to every position of the token map.

        Args:
            image: which of the batch.
            query: (row, column) on the token map, or the number of a prefix token.
            local: add the local terms, of one `channel` of each head or averaged over them.

        Returns:
            (heads, height, width) of the keys' map; NaN outside the query's window.
        """
        token = query if isinstance(query, int) else self.token(query)
        sample, place = image, token
        if self.windows is not None:
            positions = self._window_positions()
            window, place = (positions == token).nonzero()[0].tolist()
            sample = image * len(positions) + window
        rows = slice(place, place + 1)
        weights = self.weights(rows, samples=slice(sample, sample + 1))[0, :, 0]
        if local:
            weights = weights + self.local_weights(rows, channel=channel)[sample, :, 0]
        if self.windows is None:
            return weights[:, self.num_prefix_tokens :].unflatten(1, self.key_grid or self.grid)
        height, width = self.map_grid
        out = weights.new_full((self.num_heads, height * width), torch.nan)
        inside = positions[window] >= 0
        out[:, positions[window][inside]] = weights[:, inside]
        return out.unflatten(1, (height, width))

    def token(self, query: tuple[int, int]) -> int:
        """The number of a position of the map among the tokens."""
        (y, x), (height, width) = query, self.map_grid
        if not (0 <= y < height and 0 <= x < width):
            raise ValueError(f"query {y}, {x} is not on the {height}×{width} map of {self.name}")
        return self.num_prefix_tokens + y * width + x

    def _window_positions(self) -> Tensor:
        """Which token of the map each token of a window is, −1 for padding → (windows, N)"""
        assert self.windows is not None
        height, width = self.windows.size
        index = torch.arange(1, height * width + 1, device=self.q.device).view(1, height, width, 1)
        return self.windows.cut(self.windows.pad_and_shift(index))[..., 0] - 1

    def _taps(self, term: LocalTerm, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The token at each tap of chosen rows, (rows, taps), −1 for none; which are reached, (groups, rows, taps)"""
        side = (term.weight.shape[2], term.weight.shape[3])
        grid, prefix = (self.grid, self.num_prefix_tokens) if term.on_map else ((1, self.q.shape[1]), 0)
        at = neighbours(grid, side, num_prefix_tokens=prefix, device=self.v.device)[rows]
        reached = (at >= 0)[None]
        if term.regions is not None:
            reached = reached & (term.regions[:, at.clamp(min=0)] == term.regions[:, rows, None])
        return at, reached

    def _local_sum(self, rows: slice, seen: Tensor | None) -> Tensor:
        """The local terms of chosen rows, tap by tap. seen (S or 1, 1, rows, keys) → (S, rows, heads, d)"""
        samples, _, heads, d = self.v.shape
        v = self.v.flatten(2)
        index = torch.arange(self.q.shape[1], device=v.device)[rows]
        out = v.new_zeros(samples, len(index), heads * d)
        for term in self.local:
            at, reached = self._taps(term, index)
            by_channel = reached.repeat_interleave(heads * d // reached.shape[0], 0)[None]  # (1, C, rows, taps)
            if seen is not None:
                by_channel = by_channel & seen.gather(3, at.clamp(min=0).expand(*seen.shape[:2], -1, -1))
            for tap in range(at.shape[1]):
                weight = term.weight.flatten(2)[:, None, :, tap] * by_channel[..., tap].mT  # (S or 1, rows, C)
                out += weight * v[:, at[:, tap].clamp(min=0)]
            if term.bias is not None:
                out += term.bias * (index >= (self.num_prefix_tokens if term.on_map else 0))[:, None]
        return out.unflatten(2, (heads, d))


def layer_names(model: nn.Module) -> list[str]:
    """The attention modules of a model whose weights can be written out, in order."""
    return [name for name, module in model.named_modules() if _recorder(module) is not None]


def attention_kinds(model: nn.Module) -> list[str]:
    """The different attentions of a model, in the order of its layers."""
    modules = (model.get_submodule(name) for name in layer_names(model))
    return list(dict.fromkeys(m.kind if isinstance(m, Attention) else SoftmaxAttention.kind for m in modules))


@torch.no_grad()
def capture(model: nn.Module, images: Tensor, *, layers: Sequence[str | int] | None = None) -> list[LayerAttention]:
    """The attention layers of a model as it sees these images.

    Args:
        model: of this library, or a softmax ViT or Swin of timm; on the images' device.
        images: (B, channels, H, W), normalised.
        layers: names (see `layer_names`) or places among them, negative ones from the end; None for all.
    """
    records: list[LayerAttention] = []
    observe(model, images, records.append, layers=layers)
    return records


@torch.no_grad()
def observe(
    model: nn.Module,
    images: Tensor,
    on_layer: Callable[[LayerAttention], Tensor | None],
    *,
    layers: Sequence[str | int] | None = None,
) -> Tensor:
    """Runs a model and hands over each attention layer when it has run, so that no more than one need be held.

    A tensor that `on_layer` returns takes the place of the module's output in this run. The model is in evaluation
    mode meanwhile; then every module has the mode that it had. Arguments as for `capture`; returns the model's output.
    """
    chosen = resolve_layers(model, layers)
    with evaluation_mode(model), _hooks(model, chosen, on_layer):
        return model(images)


def resolve_layers(model: nn.Module, layers: Sequence[str | int] | None) -> list[str]:
    """Names of the layers meant."""
    names = layer_names(model)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no attention that is known here; expected a model of this library, "
            "or a ViT or Swin of timm with softmax attention"
        )
    if layers is None:
        return names
    chosen = []
    for layer in layers:
        if isinstance(layer, int) and -len(names) <= layer < len(names):
            chosen.append(names[layer])
        elif isinstance(layer, str) and layer in names:
            chosen.append(layer)
        else:
            raise ValueError(f"there is no layer {layer!r}; expected 0 to {len(names) - 1}, or one of {names}")
    return chosen


@contextmanager
def _hooks(
    model: nn.Module, names: Sequence[str], on_layer: Callable[[LayerAttention], Tensor | None]
) -> Iterator[None]:
    context = _Context()

    def hear_images(module: nn.Module, args: tuple[Any, ...]) -> None:
        context.read_images(module, args[0])

    def hear_block(module: nn.Module, args: tuple[Any, ...]) -> None:
        context.read_block(module, *args)

    def hear_attention(name: str) -> Callable[..., Tensor | None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
            record = _recorder(module)
            assert record is not None
            return on_layer(record(module, *args, context=context, name=name, output=output, **kwargs))

        return hook

    with ExitStack() as stack:
        handles = [model.register_forward_pre_hook(hear_images)]
        for module in model.modules():
            if isinstance(module, (SwinBlock, swin_transformer.SwinTransformerBlock)):
                handles.append(module.register_forward_pre_hook(hear_block))
        for name in names:
            handles.append(model.get_submodule(name).register_forward_hook(hear_attention(name), with_kwargs=True))
        for handle in handles:
            stack.callback(handle.remove)
        yield


class _Context:
    """What an attention module is not told itself: the grid of a timm ViT, and how the map around a window was cut."""

    vit_grid: Grid | None = None
    num_prefix_tokens: int = 0

    def __init__(self) -> None:
        self.windows: dict[nn.Module, WindowPlan] = {}

    def read_images(self, model: nn.Module, images: Tensor) -> None:
        if isinstance(model, timm.models.VisionTransformer):
            self.vit_grid = model.patch_embed.dynamic_feat_size((images.shape[2], images.shape[3]))
            self.num_prefix_tokens = model.num_prefix_tokens

    def read_block(self, block: nn.Module, x: Tensor, grid: Grid | None = None) -> None:
        if isinstance(block, SwinBlock):
            assert grid is not None
            self.windows[block.attn] = WindowPlan.fit(grid, block.window, shifted=block.shifted)
            return
        assert isinstance(block, swin_transformer.SwinTransformerBlock)
        size, window = (x.shape[1], x.shape[2]), (block.window_size[0], block.window_size[1])
        counts = (ceil_div(size[0], window[0]), ceil_div(size[1], window[1]))
        plan = WindowPlan(size, window, counts, shift=(block.shift_size[0], block.shift_size[1]))
        if plan.padding != (0, 0):
            raise ValueError(
                f"windows of {window[0]}×{window[1]} do not divide the map of {size[0]}×{size[1]}, which timm "
                "pads with tokens of its own; choose an image size that they divide"
            )
        self.windows[block.attn] = plan


Recorder = Callable[..., LayerAttention]


def _recorder(module: nn.Module) -> Recorder | None:
    return next((record for cls, record in _RECORDERS if isinstance(module, cls)), None)


def _record_own(
    module: Attention,
    x: Tensor,
    grid: Grid,
    *,
    context: _Context,
    name: str,
    output: Tensor,
    token_mean: Tensor | None = None,
    token_mask: Tensor | None = None,
    bias: Tensor | None = None,
    regions: Tensor | None = None,
    local: Sequence[LocalTerm] = (),
    key_grid: Grid | None = None,
    stripes: bool = False,
) -> LayerAttention:
    """Softmax attentions of the families add a `bias` (S or 1, heads, N, N) to their scores, or keep to `regions`
    (heads, N) of the map, and may have further `local` terms."""
    q, k, v = module.operands(module.project(x, grid), grid)
    if token_mask is not None:
        v = v.masked_fill(~token_mask[:, :, None, None], 0)
    terms = module.local_terms(module.local_weight(x, token_mean, token_mask))
    windows = context.windows.get(module)

    def matrix(rows: slice, samples: slice, heads: slice, mask: Tensor | None) -> Tensor:
        if regions is not None:
            together = regions[None, heads, rows, None] == regions[None, heads, None, :]
            mask = together if mask is None else together & mask
        options = {} if bias is None else dict(bias=_chosen(bias, samples)[:, heads, rows])
        return module.weights(q[samples, :, heads], k[samples, :, heads], rows=rows, mask=mask, **options)

    return LayerAttention(
        name=name,
        kind=module.kind,
        grid=grid,
        num_prefix_tokens=module.num_prefix_tokens,
        q=q,
        k=k,
        v=v,
        output=output,
        local=(*terms, *local),
        token_mask=token_mask,
        key_grid=key_grid,
        windows=None if windows is None or windows.counts == (1, 1) else windows,
        stripes=stripes,
        matrix=matrix,
        finish=lambda attended, added: module.merge(module.normalise(attended) + added),
    )


def _record_reduced(module: ReducedSoftmaxAttention, x: Tensor, grid: Grid, **options: Any) -> LayerAttention:
    stride = module.reduction
    key_grid = None if stride == 1 else (grid[0] // stride, grid[1] // stride)
    return _record_own(module, x, grid, key_grid=key_grid, **options)


def _record_window(
    module: WindowSoftmaxAttention, x: Tensor, grid: Grid, *, regions: Tensor | None = None, **options: Any
) -> LayerAttention:
    bias = module.position_bias(grid)[None]
    if regions is not None:
        bias = bias + OTHER_REGION * (regions[:, None, :, None] != regions[:, None, None, :])
    return _record_own(module, x, grid, bias=bias, **options)


def _record_stripes(module: StripeAttention, x: Tensor, grid: Grid, **options: Any) -> LayerAttention:
    position = torch.arange(grid[0] * grid[1], device=x.device)
    if module.stripe is None:
        regions = torch.zeros_like(position)[None]
    else:  # the first half of the heads in vertical stripes, the second in horizontal ones
        regions = torch.stack([position % grid[1] // module.stripe, position // grid[1] // module.stripe])
    convolutions = [conv for conv in module.positions if isinstance(conv, nn.Conv2d)]
    weight = torch.cat([conv.weight for conv in convolutions])[:, 0][None]
    bias = torch.cat([conv.bias for conv in convolutions if conv.bias is not None])
    local = [LocalTerm(weight, bias, regions=regions)]
    by_head = regions.repeat_interleave(module.num_heads // len(regions), 0)
    options.update(regions=by_head, local=local, stripes=module.stripe is not None)
    return _record_own(module, x, grid, **options)


def _record_timm(
    module: timm.layers.Attention,
    x: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    *,
    context: _Context,
    name: str,
    output: Tensor,
) -> LayerAttention:
    if context.vit_grid is None or getattr(module, "gate", None) is not None or is_causal or attn_mask is not None:
        raise ValueError(f"{name} is gated, masked or not in a VisionTransformer of timm: not known here")
    q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, module.head_dim)).unbind(2)
    q, k = module.q_norm(q), module.k_norm(k)
    return _softmax_record(
        module,
        (q, k, v),
        bias=None,
        grid=context.vit_grid,
        num_prefix_tokens=context.num_prefix_tokens,
        finish=lambda out: module.proj(module.norm(out.flatten(2))),
        name=name,
        output=output,
    )


def _record_timm_window(
    module: swin_transformer.WindowAttention,
    x: Tensor,
    mask: Tensor | None = None,
    *,
    context: _Context,
    name: str,
    output: Tensor,
) -> LayerAttention:
    q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).unbind(2)
    bias = module._get_rel_pos_bias()
    if mask is not None:
        bias = bias + mask.repeat(x.shape[0] // len(mask), 1, 1)[:, None]
    plan = context.windows[module]
    return _softmax_record(
        module,
        (q, k, v),
        bias=bias,
        grid=plan.window,
        num_prefix_tokens=0,
        finish=lambda out: module.proj(out.flatten(2)),
        name=name,
        output=output,
        windows=None if plan.counts == (1, 1) else plan,
    )


def _softmax_record(
    module: Any,
    qkv: tuple[Tensor, Tensor, Tensor],
    *,
    bias: Tensor | None,
    grid: Grid,
    num_prefix_tokens: int,
    finish: Callable[[Tensor], Tensor],
    name: str,
    output: Tensor,
    windows: WindowPlan | None = None,
) -> LayerAttention:
    """Of timm's softmax attentions, which are modules of different shapes with the same mathematics."""
    q, k, v = qkv

    def matrix(rows: slice, samples: slice, heads: slice, mask: Tensor | None) -> Tensor:
        options: dict[str, Any] = dict(kind=SoftmaxAttention.kind, scale=module.scale, pair_mask=mask)
        if bias is not None:
            options["bias"] = _chosen(bias, samples)[:, heads, rows]
        return attention_matrix(q[samples, rows, heads], k[samples, :, heads], **options)

    return LayerAttention(
        name=name,
        kind=SoftmaxAttention.kind,
        grid=grid,
        num_prefix_tokens=num_prefix_tokens,
        q=q,
        k=k,
        v=v,
        output=output,
        local=(),
        token_mask=None,
        key_grid=None,
        windows=windows,
        stripes=False,
        matrix=matrix,
        finish=lambda attended, added: finish(attended),
    )


def _chosen(bias: Tensor, samples: slice) -> Tensor:
    return bias if len(bias) == 1 else bias[samples]


# The first class that fits.
_RECORDERS: tuple[tuple[type[nn.Module], Recorder], ...] = (
    (WindowSoftmaxAttention, _record_window),
    (StripeAttention, _record_stripes),
    (ReducedSoftmaxAttention, _record_reduced),
    (Attention, _record_own),
    (timm.layers.Attention, _record_timm),
    (swin_transformer.WindowAttention, _record_timm_window),
)
