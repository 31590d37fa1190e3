"""mIoU of a segmenter over the images of a split, on one rank or many."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from inline_attention.data.prefetcher import Normalise
from inline_attention.layers.mode import evaluation_mode
from inline_attention.tasks.evaluation import check_readable, over_ranks
from inline_attention.tasks.segmentation.config import SegmentDataConfig
from inline_attention.tasks.segmentation.data import EvalImages
from inline_attention.tasks.segmentation.inference import Inference, segment_images
from inline_attention.tasks.segmentation.metrics import Confusion, Scores
from inline_attention.tasks.segmentation.model import Segmenter
from inline_attention.tasks.segmentation.pictures import Example
from inline_attention.training.distributed import gathered


@dataclass(frozen=True)
class SegmentResult:
    """The result over all ranks."""

    scores: Scores
    images: int
    skipped: int  # images that could not be read
    seconds: float
    examples: list[Example]  # of this rank


@torch.no_grad()
def evaluate(
    model: Segmenter,
    images: EvalImages,
    *,
    config: SegmentDataConfig,
    device: torch.device | str,
    amp_dtype: torch.dtype | None = None,
    examples: int = 0,
    on_images: Callable[[int], None] | None = None,
) -> SegmentResult:
    """Compare predictions with the masks, at the masks' own size.

    The model runs in evaluation mode, and every module's mode is restored afterwards. In a process group every rank
    calls this and gets the result over all ranks. `examples` is the number of images to keep with their predictions.
    `on_images` is called with the number of images of each batch, for a progress bar.
    """
    confusion = Confusion(model.num_classes, device=device)
    predictor = Predictor(model, config=config, device=torch.device(device), amp_dtype=amp_dtype)
    kept: list[Example] = []
    seen = 0
    start = time.perf_counter()
    with evaluation_mode(model), gathered(model):
        for batch in images:
            predictions = predictor([image.pixels for image in batch], [image.size for image in batch])
            for image, predicted in zip(batch, predictions, strict=True):
                assert image.mask is not None
                confusion.add(predicted, image.mask.to(device))
                if len(kept) < examples:
                    pixels, classes = image.pixels.permute(1, 2, 0).numpy(), predicted.cpu().numpy().astype(np.uint8)
                    kept.append(Example(pixels, classes, image.mask.numpy()))
            seen += len(batch)
            if on_images is not None:
                on_images(len(batch))
    counts = confusion.over_ranks()
    total, skipped = map(sum, zip(*over_ranks((seen, len(images.skipped))), strict=True))
    seconds = time.perf_counter() - start
    check_readable(images, images=total, skipped=skipped)
    return SegmentResult(Scores.of(counts), total, skipped, seconds, kept)


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
