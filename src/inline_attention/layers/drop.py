"""Stochastic depth whose draws can be given from outside.

`timm.layers.DropPath` draws from the global generator, so its masks change with the number of ranks, with gradient
checkpointing and with a restart. A training loop that wants masks which depend on (seed, step, sample) alone calls
`SampledDepth(model)` once and `draw` before each forward pass. A model needs to know nothing about it: it is built
with timm's layer (or with `DropPath` below, which behaves the same until somebody sets its draws).
"""

import timm.layers
import torch
from torch import Tensor, nn


class DropPath(timm.layers.DropPath):
    """timm's DropPath, except that `keep` (B,), where set, replaces the random draw.

    0 drops a sample's branch, 1/(1−p) keeps it.
    `keep` is read, never written, so that the forward pass compiles without a graph break and recomputes exactly under
    gradient checkpointing.
    """

    keep: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.keep is None or not self.training:
            return super().forward(x)
        return x * self.keep.to(x.dtype).view(-1, *(1,) * (x.ndim - 1))


class SampledDepth:
    """Draws for every DropPath of a model as a function of (key of the step, place in the model, sample)."""

    def __init__(self, model: nn.Module, *, device: torch.device | str) -> None:
        self.layers = [
            _sampled(model, name, layer)
            for name, layer in list(model.named_modules())
            if isinstance(layer, timm.layers.DropPath) and layer.drop_prob > 0
        ]
        column = torch.tensor([layer.drop_prob for layer in self.layers], dtype=torch.float32).unsqueeze(1)
        kept = torch.tensor([layer.scale_by_keep for layer in self.layers], dtype=torch.bool).unsqueeze(1)
        self.drop_prob = column.to(device)
        # A rate of 1 keeps nothing, so that there is nothing to scale.
        self.scale = torch.where(kept & (column < 1), 1 / (1 - column), 1.0).to(device)
        self.places = torch.arange(1, len(self.layers) + 1, device=device).unsqueeze(1)
        self.keep = self.scale.new_empty(len(self.layers), 0)

    def draw(self, sample_ids: Tensor, *, key: int) -> None:
        """Set the masks of one forward pass.

        sample_ids: (B,) integers on the model's device; key: any integer that names the step. Written into one buffer,
        so that the next backward pass must be over before the next draw.
        """
        if not self.layers:
            return
        if self.keep.shape[1] != len(sample_ids):
            self.keep = self.scale.new_empty(len(self.layers), len(sample_ids))
            for layer, row in zip(self.layers, self.keep, strict=True):
                layer.keep = row
        samples = _scramble(_scramble(sample_ids.long()) ^ (key & 0xFFFFFFFF))
        bits = _scramble(samples ^ _scramble(self.places ^ (key >> 32 & 0xFFFFFFFF)))  # (layers, B)
        uniform = (bits >> 8).float() * 2.0**-24
        torch.mul(uniform >= self.drop_prob, self.scale, out=self.keep)


def _sampled(model: nn.Module, name: str, layer: timm.layers.DropPath) -> DropPath:
    """The layer itself, or for timm's own the DropPath that takes its place in the model."""
    if isinstance(layer, DropPath):
        return layer
    replacement = DropPath(layer.drop_prob, layer.scale_by_keep)
    replacement.train(layer.training)
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, replacement)
    return replacement


def _scramble(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers (held in int64) whose output bits each depend on all input bits.

    Multiply and xor-shift with the constants of C. Wellons' search for low bias ("lowbias32").
    """
    x = x & 0xFFFFFFFF
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16
