"""Detection over a loader, and its average precision, on one rank or many."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torchvision.ops import clip_boxes_to_image

from inline_attention.layers.mode import evaluation_mode
from inline_attention.tasks.detection.annotations import AnnotatedImage, check_objects
from inline_attention.tasks.detection.average_precision import ApResult, ImageResult, average_precision, encode_masks
from inline_attention.tasks.detection.boxes import Size, paste_masks
from inline_attention.tasks.detection.coco import Rle
from inline_attention.tasks.detection.data import DetectionEvalLoader
from inline_attention.tasks.detection.roi_heads import Detections
from inline_attention.tasks.evaluation import check_readable, over_ranks
from inline_attention.training.distributed import gathered

_NUM_EXAMPLES = 8
_PASTED_PIXELS = 2**24  # of the masks that are pasted at a time; each takes 12 bytes


@dataclass(frozen=True)
class DetectionResult:
    """The result over all ranks."""

    precision: ApResult
    examples: list[tuple[AnnotatedImage, ImageResult]]  # the first images, for a picture
    skipped: int  # images that could not be read
    seconds: float


def to_image(found: Detections, *, image_id: int, shown: Size, original: Size) -> ImageResult:
    """Detections in an image that was resized to `shown` → the same in pixels of the original image"""
    scale = found.boxes.new_tensor([original[1] / shown[1], original[0] / shown[0]]).repeat(2)
    boxes = clip_boxes_to_image(found.boxes * scale, original)
    masks = None if found.masks is None else _run_lengths(found.masks, boxes, original)
    scores, labels = found.scores.cpu().numpy(), found.labels.cpu().numpy()
    return ImageResult(image_id, boxes.cpu().numpy(), scores, labels, masks)


def _run_lengths(masks: Tensor, boxes: Tensor, size: Size) -> list[Rle]:
    """Masks (n, M, M) inside boxes (n, 4) of an image. Large images get few at a time, since pasting takes memory."""
    few = max(1, _PASTED_PIXELS // math.prod(size))
    parts = zip(masks.split(few), boxes.split(few), strict=True)
    return [runs for part, inside in parts for runs in encode_masks(paste_masks(part, inside, size))]


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
    """COCO's figures. In a process group every rank calls this and gets the result over all ranks.

    `on_images` is called with the number of images of each batch, for a progress bar.
    """
    check_objects(loader.data)
    start = time.perf_counter()
    results = []
    for result in detect(model, loader, device=torch.device(device), amp_dtype=amp_dtype):
        results.append(result)
        if on_images is not None:
            on_images(1)
    parts = over_ranks((results, len(loader.skipped)))
    seconds = time.perf_counter() - start
    skipped = sum(part[1] for part in parts)
    found = [result for part in parts for result in part[0]]
    check_readable(loader, images=len(found), skipped=skipped)
    by_id = {image.id: image for image in loader.data.images}
    examples = [(by_id[result.image_id], result) for result in found[:_NUM_EXAMPLES]]
    return DetectionResult(average_precision(loader.data, found), examples, skipped, seconds)
