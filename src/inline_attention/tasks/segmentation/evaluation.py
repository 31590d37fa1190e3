"""mIoU of a segmenter over the images of a split, on one rank or many."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inline_attention.layers.mode import evaluation_mode
from inline_attention.tasks.dense.images import Normalise
from inline_attention.tasks.segmentation.config import SegmentDataConfig
from inline_attention.tasks.segmentation.data import EvalImages
from inline_attention.tasks.segmentation.inference import Inference, segment_images
from inline_attention.tasks.segmentation.metrics import Confusion, Scores
from inline_attention.tasks.segmentation.model import Segmenter
from inline_attention.tasks.segmentation.pictures import Example
from inline_attention.training.distributed import gathered, is_distributed


@dataclass(frozen=True)
class SegmentResult:
    """The result over all ranks; `examples` are this rank's"""

    scores: Scores
    images: int
    skipped: int  # images of this rank that could not be read
    seconds: float
    examples: list[Example]


@torch.no_grad()
def evaluate(
    model: Segmenter,
    images: EvalImages,
    *,
    config: SegmentDataConfig,
    device: torch.device,
    amp_dtype: torch.dtype | None = None,
    examples: int = 0,
    on_images: Callable[[int], None] | None = None,
) -> SegmentResult:
    """Run the model in evaluation mode over every image once; every module's mode is restored afterwards.

    Predictions are compared with the masks at the masks' own size. If torch.distributed is initialised, every rank
    calls this. `examples` is the number of images to keep with their predictions. `on_images` is called with the number
    of images done.
    """
    confusion = Confusion(model.num_classes, device=device)
    predictor = Predictor(model, config=config, device=device, amp_dtype=amp_dtype)
    kept: list[Example] = []
    seen = torch.zeros((), dtype=torch.int64, device=device)
    start = time.perf_counter()
    with evaluation_mode(model), gathered(model):
        for batch in images:
            predictions = predictor([image.pixels for image in batch], [image.size for image in batch])
            for image, predicted in zip(batch, predictions, strict=True):
                assert image.mask is not None
                confusion.add(predicted, image.mask.to(device))
                if len(kept) < examples:
                    kept.append(_example(image.pixels, predicted, image.mask))
            seen += len(batch)
            if on_images is not None:
                on_images(len(batch))
    scores = Scores.of(confusion.over_ranks())
    if is_distributed():
        torch.distributed.all_reduce(seen)
    seconds = time.perf_counter() - start
    return SegmentResult(scores, int(seen), len(images.skipped), seconds, kept)


class Predictor:
    """Pixels (3, h, w) uint8 and output sizes → classes of each image, on the device."""

    def __init__(
        self, model: Segmenter, *, config: SegmentDataConfig, device: torch.device, amp_dtype: torch.dtype | None
    ) -> None:
        self._model, self._device, self._amp_dtype = model, device, amp_dtype
        self._inference = Inference.of(config)
        self._normalise = Normalise()

    def __call__(self, pixels: list[Tensor], sizes: list[tuple[int, int]]) -> list[Tensor]:
        images = [self._normalise(p.to(self._device)[None])[0] for p in pixels]
        return segment_images(self._segment, images, sizes, inference=self._inference)

    def _segment(self, images: Tensor) -> Tensor:
        with torch.autocast(self._device.type, dtype=self._amp_dtype, enabled=self._amp_dtype is not None):
            return self._model.segment(images)


def _example(pixels: Tensor, predicted: Tensor, mask: Tensor) -> Example:
    return Example(pixels.permute(1, 2, 0).numpy(), predicted.cpu().numpy().astype(np.uint8), mask.numpy())
