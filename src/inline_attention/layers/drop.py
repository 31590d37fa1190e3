"""Stochastic depth and channel dropout whose random draws a training loop can provide.

`timm.layers.DropPath` draws from the global generator, so its masks change with the number of ranks, with gradient
checkpointing and with a restart. For masks that depend on (seed, step, sample) alone, a training loop calls
`SampledDepth(model)` once and `draw` before each forward pass. Models are built with timm's layer as usual. `DropPath`
below behaves like it until its draws are set.
"""

import timm.layers
import torch
from torch import Tensor, nn


class DropPath(timm.layers.DropPath):
    """timm's DropPath, except that `keep` (B,), if set, replaces the random draw.

    0 drops a sample's branch, 1/(1−p) keeps it. The forward pass only reads `keep`, so it compiles without a graph
    break and recomputes exactly under gradient checkpointing.
    """

    keep: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.keep is None or not self.training:
            return super().forward(x)
        return x * self.keep.to(x.dtype).view(-1, *(1,) * (x.ndim - 1))


class ChannelDrop(nn.Dropout2d):
    """nn.Dropout2d on (B, channels, H, W), except that `keep` (B, channels), if set, replaces the random draw."""

    keep: Tensor | None = None

    def __init__(self, p: float, channels: int) -> None:
        super().__init__(p)
        self.channels = channels

    def forward(self, x: Tensor) -> Tensor:
        if self.keep is None or not self.training:
            return super().forward(x)
        return x * self.keep.to(x.dtype)[:, :, None, None]


class SampledDepth:
    """Draws for every DropPath and ChannelDrop of a model, a function of (key of the step, layer, sample)"""

    def __init__(self, model: nn.Module, *, device: torch.device | str) -> None:
        self.layers = [
            _sampled(model, name, layer)
            for name, layer in list(model.named_modules())
            if isinstance(layer, timm.layers.DropPath) and layer.drop_prob > 0
        ]
        column = torch.tensor([layer.drop_prob for layer in self.layers], dtype=torch.float32).unsqueeze(1)
        kept = torch.tensor([layer.scale_by_keep for layer in self.layers], dtype=torch.bool).unsqueeze(1)
        self.drop_prob = column.to(device)
        # A rate of 1 keeps nothing, so there is nothing to scale, here and in `draw`.
        self.scale = torch.where(kept & (column < 1), 1 / (1 - column), 1.0).to(device)
        self.places = torch.arange(1, len(self.layers) + 1, device=device).unsqueeze(1)
        self.keep = self.scale.new_empty(len(self.layers), 0)
        self.channel_layers = [layer for layer in model.modules() if isinstance(layer, ChannelDrop) and layer.p > 0]
        # Places after those of the DropPaths, far enough apart for the channels of one layer.
        starts = [(len(self.layers) + 1 + i) << 16 for i in range(len(self.channel_layers))]
        self.channel_places = [
            torch.arange(start, start + layer.channels, device=device)
            for start, layer in zip(starts, self.channel_layers, strict=True)
        ]

    def draw(self, sample_ids: Tensor, *, key: int) -> None:
        """Sets the masks of one forward pass. Call it again only after that pass's backward: masks share one buffer.

        Args:
            sample_ids: (B,) integers on the model's device.
            key: any integer that names the step.
        """
        samples = scramble(scramble(sample_ids.long()) ^ (key & 0xFFFFFFFF))
        for layer, places in zip(self.channel_layers, self.channel_places, strict=True):
            kept = _uniform(samples.unsqueeze(1), places, key) >= layer.p  # (B, channels)
            if layer.keep is None or layer.keep.shape[0] != len(sample_ids):
                layer.keep = self.scale.new_empty(kept.shape)
            torch.mul(kept, 1 / (1 - layer.p) if layer.p < 1 else 1.0, out=layer.keep)
        if not self.layers:
            return
        if self.keep.shape[1] != len(sample_ids):
            self.keep = self.scale.new_empty(len(self.layers), len(sample_ids))
            for depth_layer, row in zip(self.layers, self.keep, strict=True):
                depth_layer.keep = row
        torch.mul(_uniform(samples, self.places, key) >= self.drop_prob, self.scale, out=self.keep)  # (layers, B)


def _uniform(samples: Tensor, places: Tensor, key: int) -> Tensor:
    """Numbers in [0, 1), one for each scrambled sample and place."""
    bits = scramble(samples ^ scramble(places ^ (key >> 32 & 0xFFFFFFFF)))
    return (bits >> 8).float() * 2.0**-24


def _sampled(model: nn.Module, name: str, layer: timm.layers.DropPath) -> DropPath:
    """The layer itself, or the DropPath that replaces timm's own in the model"""
    if isinstance(layer, DropPath):
        return layer
    replacement = DropPath(layer.drop_prob, layer.scale_by_keep)
    replacement.train(layer.training)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, replacement)
    return replacement


def scramble(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers (held in int64) whose output bits each depend on all input bits.

    Multiply and xor-shift with the constants of C. Wellons' search for low bias ("lowbias32").
    """
    x = x & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16
