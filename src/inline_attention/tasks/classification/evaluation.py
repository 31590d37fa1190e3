"""Accuracy and loss of a classifier over an evaluation loader, on one rank or several."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.data import ImageNetInfo, RealLabelsImagenet
from torch import Tensor, nn

from inline_attention.data import Batch, EvalLoader
from inline_attention.data.collate import as_targets
from inline_attention.layers.mode import evaluation_mode
from inline_attention.training.distributed import is_distributed

MAX_CONFUSION_CLASSES = 256
CALIBRATION_BINS = 15

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvalResult:
    """Result over all ranks. Accuracies are in per cent of the images that could be read."""

    top1: float
    top5: float  # 100 with five classes or fewer
    loss: float
    ece: float  # expected calibration error in per cent: |accuracy − confidence|, averaged over 15 bins of confidence
    images: int
    skipped: int  # images that could not be read
    seconds: float
    images_per_second: float
    per_class: Tensor  # (classes, 2) int64: correct, total
    confusion: Tensor | None  # (classes, classes) int64: true, predicted; None for more than MAX_CONFUSION_CLASSES
    real_top1: float | None = None  # by ImageNet's reassessed labels, over images that have any; None: not counted


@torch.no_grad()
def evaluate(
    model: nn.Module,
    loader: EvalLoader,
    *,
    device: torch.device | str,
    amp_dtype: torch.dtype | None = None,
    on_images: Callable[[int], None] | None = None,
    real_labels: bool = False,
) -> EvalResult:
    """Run the model in evaluation mode over the loader; every module's mode is restored afterwards.

    Counts stay on the device and are read once, at the end. In a process group every rank calls this and gets the
    result over all ranks. `on_images` is called with the number of images of each batch, for a progress bar.
    `real_labels` also counts by the reassessed labels of ImageNet's validation images (ReaL, arXiv:2006.07159).
    """
    loader.check_one_label("accuracy")
    device = torch.device(device)
    loader.to(device)
    counts = _Counts(len(loader.class_names), device=device)
    real = _RealCounts(loader, device=device) if real_labels else None
    start = time.perf_counter()
    with evaluation_mode(model):
        for images, batch in padded_batches(loader, device=device):
            with torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
                logits = model(images)
            check_classes(logits, loader)
            logits = logits[: len(batch.images)].float()
            counts.add(logits, batch.targets)
            if real is not None:
                real.add(logits, batch.sample_ids)
            if on_images is not None:
                on_images(len(batch.images))
    result = counts.result(loader, start=start)
    return result if real is None else replace(result, real_top1=real.top1())


class _Counts:
    """Counts and sums over batches, on the device."""

    def __init__(self, num_classes: int, *, device: torch.device) -> None:
        wide = torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64
        self._loss = torch.zeros((), dtype=wide, device=device)
        self._calibration = torch.zeros((CALIBRATION_BINS, 2), dtype=wide, device=device)  # sums: confidence, hits
        self._top5 = torch.zeros((), dtype=torch.int64, device=device)
        self._top = min(5, num_classes)
        self._num_classes = num_classes
        self._per_class = torch.zeros((num_classes, 2), dtype=torch.int64, device=device)
        with_confusion = num_classes <= MAX_CONFUSION_CLASSES
        self._confusion = torch.zeros(num_classes**2, dtype=torch.int64, device=device) if with_confusion else None

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """logits (n, classes), targets (n,); n may be 0."""
        best = logits.topk(self._top, dim=1).indices  # (n, 5)
        hits = best == targets.unsqueeze(1)
        self._loss += F.cross_entropy(logits, targets, reduction="sum")
        self._top5 += hits.sum()
        confidence = logits.softmax(dim=1).gather(1, best[:, :1]).squeeze(1).to(self._calibration.dtype)  # (n,)
        bins = (confidence * CALIBRATION_BINS).ceil().long().clamp(1, CALIBRATION_BINS) - 1  # of the form (low, high]
        self._calibration.index_add_(0, bins, torch.stack([confidence, hits[:, 0].to(confidence.dtype)], dim=1))
        correct_and_total = torch.stack([hits[:, 0], torch.ones_like(hits[:, 0])], dim=1).long()  # (n, 2)
        self._per_class.index_add_(0, targets, correct_and_total)
        if self._confusion is not None:
            cells = targets * self._num_classes + best[:, 0]
            self._confusion.index_add_(0, cells, torch.ones_like(cells))

    def result(self, loader: EvalLoader, *, start: float) -> EvalResult:
        skipped = torch.tensor(len(loader.skipped), device=self._loss.device)
        sums = [self._loss, self._top5, self._calibration, self._per_class, skipped]
        if self._confusion is not None:
            sums.append(self._confusion)
        if is_distributed():
            for value in sums:
                dist.all_reduce(value)
        per_class = self._per_class.cpu()  # waits for the device
        correct, images = per_class.sum(0).tolist()
        seconds = time.perf_counter() - start
        if images == 0:
            raise ValueError(f"nothing to evaluate: none of the {loader.num_images} images could be read")
        loader.skipped.check_limit(int(skipped))
        if skipped and (not is_distributed() or dist.get_rank() == 0):
            _logger.warning("%d unreadable images are left out: accuracy is over the other %d", int(skipped), images)
        shape = (self._num_classes, self._num_classes)
        return EvalResult(
            top1=100 * correct / images,
            top5=100 * int(self._top5) / images,
            loss=float(self._loss) / images,
            ece=100 * float((self._calibration[:, 0] - self._calibration[:, 1]).abs().sum()) / images,
            images=images,
            skipped=int(skipped),
            seconds=seconds,
            images_per_second=images / seconds,
            per_class=per_class,
            confusion=None if self._confusion is None else self._confusion.cpu().view(shape),
        )


def padded_batches(loader: EvalLoader, *, device: torch.device) -> Iterator[tuple[Tensor, Batch]]:
    """Yield the images of each batch, padded to one shape, and the batch. Every rank gets as many batches."""
    for batch in _in_step(loader, device=device):
        yield _padded(batch.images, to=_batch_shape(loader)), batch


class _RealCounts:
    """Hits among the reassessed labels, for images with the names of ImageNet's validation split."""

    def __init__(self, loader: EvalLoader, *, device: torch.device) -> None:
        if loader.class_names != ImageNetInfo().label_names():
            raise ValueError("ReaL labels are for ImageNet's thousand classes; leave out --real")
        labels = RealLabelsImagenet(range(50_000)).real_labels  # by file name; only the argument's length counts
        names = [os.path.basename(loader.path(index)) for index in range(loader.num_images)] if loader.path else []
        unknown = [name for name in names if name not in labels]
        if unknown or not names:
            example = repr(unknown[0]) if unknown else "a stream"
            raise ValueError(f"ReaL labels are for images called ILSVRC2012_val_00000001.JPEG and so on, not {example}")
        self._allowed = torch.zeros((len(names), len(loader.class_names)), dtype=torch.bool, device=device)
        for row, name in enumerate(names):
            self._allowed[row, labels[name]] = True
        self._counts = torch.zeros(2, dtype=torch.int64, device=device)  # hits, images with a label

    def add(self, logits: Tensor, sample_ids: Tensor) -> None:
        allowed = self._allowed[sample_ids]
        hits = allowed.gather(1, logits.argmax(dim=1, keepdim=True))
        self._counts += torch.stack([hits.sum(), allowed.any(dim=1).sum()])

    def top1(self) -> float:
        if is_distributed():
            dist.all_reduce(self._counts)
        hits, images = self._counts.tolist()
        return 100 * hits / max(1, images)


def _in_step(loader: EvalLoader, *, device: torch.device) -> Iterator[Batch]:
    """The batches of the loader, then empty ones until every rank has had the same number.

    A sharded model communicates in its forward pass, so all ranks must call it equally often.
    """
    batches = iter(loader)
    if not is_distributed():
        yield from batches
        return
    empty = Batch(
        images=torch.empty((0, *loader.input_shape), device=device),
        targets=as_targets(np.empty((0, len(loader.class_names)) if loader.multi_label else 0)).to(device),
        sample_ids=torch.empty(0, dtype=torch.int64, device=device),
    )
    if loader.max_batches is not None:
        for _ in range(loader.max_batches):
            yield next(batches, empty)
        return
    while True:  # the length of a stream is unknown, so ranks agree before each batch
        batch = next(batches, None)
        any_left = torch.tensor(batch is not None, dtype=torch.int64, device=device)
        dist.all_reduce(any_left, op=dist.ReduceOp.MAX)
        if not any_left:
            return
        yield empty if batch is None else batch


def _batch_shape(loader: EvalLoader) -> int:
    """The size of every batch. With equal shapes a compiled model is compiled once."""
    world_size = dist.get_world_size() if is_distributed() else 1
    return min(loader.batch_size, -(-loader.num_images // world_size)) or loader.batch_size


def _padded(images: Tensor, *, to: int) -> Tensor:
    missing = to - len(images)
    return F.pad(images, (0, 0, 0, 0, 0, 0, 0, missing)) if missing > 0 else images


def check_classes(logits: Tensor, loader: EvalLoader) -> None:
    """ValueError unless the model has an output for each class of the data."""
    if logits.shape[-1] != len(loader.class_names):
        raise ValueError(
            f"the model has {logits.shape[-1]} outputs, the data {len(loader.class_names)} classes; "
            "build the model with num_classes of the data, or name the model's classes"
        )
