"""One attention layer of a running model, with its weights written out on demand."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from inline_attention.layers.local import LocalTerm
from inline_attention.layers.windows import WindowPlan
from inline_attention.layers.written_out import WrittenOut
from inline_attention.ops import Grid

from .neighbours import neighbours

DEFAULT_CHUNK_BYTES = 64 * 2**20  # of weights at a time


@dataclass(frozen=True, eq=False, kw_only=True)
class LayerAttention(WrittenOut):
    """One attention layer with its inputs and output, for S samples: the images, or the windows of all images.

    The weights (S, heads, N, N) are never in memory as a whole. `weights` computes chosen rows of them.
    """

    name: str  # of the module in the model
    output: Tensor  # (S, N, C), what the module returned
    windows: WindowPlan | None = None  # how the map was cut

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
            mask: bool, broadcasts to the result; False where a token counts as absent for a query.

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
        """All rows, in slices whose weights take at most this many bytes. A single row may take more."""
        tokens, keys = self.q.shape[1], self.k.shape[1]
        row_bytes = self.q.shape[0] * self.num_heads * keys * torch.float32.itemsize
        size = max(1, max_bytes // row_bytes)
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))

    @torch.no_grad()
    def local_weights(self, rows: slice = slice(None), *, channel: int | None = None) -> Tensor:
        """The contribution of the local terms to chosen rows: their taps, of one channel of each head or averaged.

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
            groups = heads // reached.shape[1]
            values = chosen[:, :, None] * reached.repeat_interleave(groups, 1)  # (S or 1, heads, rows, taps)
            shape = (samples, heads, *at.shape)
            out.scatter_add_(3, at.clamp(min=0).expand(shape), values.expand(shape))
        return out

    @torch.no_grad()
    def recompute_output(self, *, mask: Callable[[slice], Tensor] | None = None, mask_local: bool = True) -> Tensor:
        """The module's output computed from the written-out weights: matrix @ v, local terms, projection.

        Args:
            mask: gives for chosen rows which tokens they see, bool (rows, keys) or (S, rows, keys); None for all.
            mask_local: set the taps of local terms on masked tokens to zero.

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
        """The largest error of `recompute_output`, relative to the largest value that the module returned."""
        difference = (self.recompute_output() - self.output).abs()
        if self.token_mask is not None:
            difference = difference.masked_fill(~self.token_mask[:, :, None], 0)
        return float(difference.max() / self.output.abs().max())

    def row(
        self, image: int, query: tuple[int, int] | int, *, local: bool = False, channel: int | None = None
    ) -> Tensor:
        """The weights of one query of one image on every position of the token map.

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
        """The token at each tap of chosen rows, (rows, taps), −1 for none, and which taps reach one

        The latter is (S or 1, groups, rows, taps).
        """
        side = (term.weight.shape[2], term.weight.shape[3])
        grid, prefix = (self.grid, self.num_prefix_tokens) if term.on_map else ((1, self.q.shape[1]), 0)
        at = neighbours(grid, side, num_prefix_tokens=prefix, device=self.v.device)[rows]
        reached = (at >= 0)[None, None]
        for regions, dim in ((term.regions, 0), (term.sample_regions, 1)):
            if regions is not None:
                reached = reached & (regions[:, at.clamp(min=0)] == regions[:, rows, None]).unsqueeze(dim)
        return at, reached

    def _local_sum(self, rows: slice, seen: Tensor | None) -> Tensor:
        """The local terms of chosen rows, tap by tap. seen (S or 1, 1, rows, keys) → (S, rows, heads, d)"""
        samples, _, heads, d = self.v.shape
        v = self.v.flatten(2)
        index = torch.arange(self.q.shape[1], device=v.device)[rows]
        out = v.new_zeros(samples, len(index), heads * d)
        for term in self.local:
            at, reached = self._taps(term, index)
            by_channel = reached.repeat_interleave(heads * d // reached.shape[1], 1)  # (S or 1, C, rows, taps)
            if seen is not None:
                by_channel = by_channel & seen.gather(3, at.clamp(min=0).expand(*seen.shape[:2], -1, -1))
            for tap in range(at.shape[1]):
                weight = term.weight.flatten(2)[:, None, :, tap] * by_channel[..., tap].mT  # (S or 1, rows, C)
                out += weight * v[:, at[:, tap].clamp(min=0)]
            if term.bias is not None:
                out += term.bias * (index >= (self.num_prefix_tokens if term.on_map else 0))[:, None]
        return out.unflatten(2, (heads, d))
