"""Detection over a loader, and its average precision, on one rank or many."""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torchvision.ops import clip_boxes_to_image

from inline_attention.layers.mode import evaluation_mode
from inline_attention.tasks.detection.average_precision import ApResult, ImageResult, average_precision, encode_masks
from inline_attention.tasks.detection.boxes import Size, paste_masks
from inline_attention.tasks.detection.data import DetectionEvalLoader
from inline_attention.tasks.detection.roi_heads import Detections
from inline_attention.training.distributed import gathered, is_distributed

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DetectionResult:
    """The result over all ranks."""

    precision: ApResult
    skipped: int  # images that could not be read
    seconds: float


def to_image(found: Detections, *, image_id: int, shown: Size, original: Size) -> ImageResult:
    """Detections in an image that was resized to `shown`, in pixels of the original"""
    scale = found.boxes.new_tensor([original[1] / shown[1], original[0] / shown[0]]).repeat(2)
    boxes = clip_boxes_to_image(found.boxes * scale, original)
    masks = None if found.masks is None else encode_masks(paste_masks(found.masks, boxes, original))
    scores, labels = found.scores.cpu().numpy(), found.labels.cpu().numpy()
    return ImageResult(image_id, boxes.cpu().numpy(), scores, labels, masks)


@torch.no_grad()
def detect(
    model: nn.Module, loader: DetectionEvalLoader, *, device: torch.device, amp_dtype: torch.dtype | None = None
) -> Iterator[ImageResult]:
    """Run the model in evaluation mode over this rank's images; every module's mode is restored afterwards."""
    loader.to(device)
    images = loader.data.images
    with evaluation_mode(model), gathered(model):
        for batch in loader:
            with torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
                found = model(batch.images, batch.sizes)
            for detections, sample, size in zip(found, batch.sample_ids.tolist(), batch.sizes, strict=True):
                image = images[sample]
                yield to_image(detections, image_id=image.id, shown=size, original=image.size)


def evaluate(
    model: nn.Module,
    loader: DetectionEvalLoader,
    *,
    device: torch.device | str,
    amp_dtype: torch.dtype | None = None,
    on_images: Callable[[int], None] | None = None,
) -> DetectionResult:
    """COCO's figures. If torch.distributed is initialised, every rank calls this and gets the result of all ranks.

    `on_images` is called with the number of images done, for a progress bar.
    """
    start = time.perf_counter()
    results = []
    for result in detect(model, loader, device=torch.device(device), amp_dtype=amp_dtype):
        results.append(result)
        if on_images is not None:
            on_images(1)
    parts = _gathered((results, len(loader.skipped)))
    seconds = time.perf_counter() - start
    skipped = sum(part[1] for part in parts)
    found = [result for part in parts for result in part[0]]
    if skipped and (not is_distributed() or dist.get_rank() == 0):
        _logger.warning("%d unreadable images are left out: precision is over the other %d", skipped, len(found))
    precision = average_precision(loader.data, found)
    return DetectionResult(precision, skipped, seconds)


def _gathered(value: tuple[list[ImageResult], int]) -> list[tuple[list[ImageResult], int]]:
    if not is_distributed():
        return [value]
    values: list[tuple[list[ImageResult], int]] = [([], 0)] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
