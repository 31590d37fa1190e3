"""Attention maps and predictions of a picture: what a token of a model attends to, and what the model sees."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from inline_attention.analysis import LayerAttention, capture, layer_names
from inline_attention.tasks.classification.classifier import class_descriptions
from inline_attention.tasks.classification.prediction import Guess, best_guesses

from .subjects import Subject

CACHED_LAYERS, CACHED_PREDICTIONS = 32, 256
GUESSES = 3  # classes of a prediction


@dataclass(frozen=True)
class AttentionMap:
    """Weights on the token map, row by row; None outside the query's window."""

    layer: str  # name of the module
    kind: str  # its attention; models may have several
    grid: tuple[int, int]  # (height, width) of the keys' map
    query_grid: tuple[int, int]
    query: tuple[int, int]  # (row, column)
    heads: int
    head: int | None  # its number; None: the mean of all
    tokens: int  # N of the weights' mean 1/N
    weights: list[float | None]
    with_local: list[float | None] | None  # the same with the local terms; None if the layer has none


def prepare(image: Image.Image, subject: Subject, *, device: torch.device) -> Tensor:
    """The picture scaled to the model's size and normalised, (1, channels, H, W)"""
    data = subject.data
    mean, std = data.statistics
    scaled = image.convert("L" if data.in_chans == 1 else "RGB").resize(data.size[::-1], Image.Resampling.BICUBIC)
    pixels = F.to_dtype(F.pil_to_tensor(scaled), torch.float32, scale=True)
    return F.normalize(pixels, list(mean), list(std))[None].to(device)


class Maps:
    """Maps of pictures, for one caller at a time.

    The most recent layers are cached, so another query or head of them does not run the model again.
    """

    def __init__(self, subjects: Sequence[Subject], *, device: torch.device) -> None:
        self._subjects, self._device = subjects, device
        self._layers: OrderedDict[tuple[str, int, int], LayerAttention] = OrderedDict()
        self._predictions: OrderedDict[tuple[str, int], list[Guess]] = OrderedDict()
        self.layer_counts = [len(layer_names(subject.model)) for subject in subjects]

    def attention_map(
        self, name: str, image: Image.Image, *, model: int, layer: int, head: int | None, x: float, y: float
    ) -> AttentionMap:
        """The weights of the token at a point of a picture on the others.

        Args:
            name: name of the picture, which identifies it.
            model: its index.
            layer: its index.
            head: its index, limited to the heads of the layer; None for the mean of all.
            x: position of the query across the picture, from 0 to 1.
            y: the same down the picture.
        """
        attention = self._layer(name, image, model, layer)
        height, width = attention.map_grid
        query = (min(int(y * height), height - 1), min(int(x * width), width - 1))
        if head is not None:
            head = min(head, attention.num_heads - 1)
        by_head = [attention.row(0, query, local=local) for local in (False, True)]  # (heads, H, W) each
        rows = [row.mean(0) if head is None else row[head] for row in by_head]
        return AttentionMap(
            layer=attention.name,
            kind=attention.kind,
            grid=(rows[0].shape[0], rows[0].shape[1]),
            query_grid=(height, width),
            query=query,
            heads=attention.num_heads,
            head=head,
            tokens=attention.k.shape[1],
            weights=_numbers(rows[0]),
            with_local=_numbers(rows[1]) if attention.local else None,
        )

    def prediction(self, name: str, image: Image.Image, *, model: int) -> list[Guess]:
        """The most probable classes of a picture, the first of them first. Empty for a model with random weights."""
        subject = self._subjects[model]
        if subject.weights is None:
            return []
        key = (name, model)
        if key not in self._predictions:
            with torch.no_grad():
                logits = subject.model(prepare(image, subject, device=self._device))
            names = subject.class_names or [f"class {label}" for label in range(logits.shape[1])]
            (self._predictions[key],) = best_guesses(
                logits, names, class_descriptions(names), topk=GUESSES, multi_label=subject.multi_label
            )
            if len(self._predictions) > CACHED_PREDICTIONS:
                self._predictions.popitem(last=False)
        return self._predictions[key]

    def _layer(self, name: str, image: Image.Image, model: int, layer: int) -> LayerAttention:
        key = (name, model, layer)
        if key not in self._layers:
            subject = self._subjects[model]
            (attention,) = capture(subject.model, prepare(image, subject, device=self._device), layers=[layer])
            self._layers[key] = attention
            if len(self._layers) > CACHED_LAYERS:
                self._layers.popitem(last=False)
        self._layers.move_to_end(key)
        return self._layers[key]


def _numbers(row: Tensor) -> list[float | None]:
    """JSON has no NaN; five digits are more than a picture shows."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in row.flatten().tolist()]
