"""Accuracy and loss of a classifier over an evaluation loader, on one rank or several."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import ImageNetInfo, RealLabelsImagenet
from torch import Tensor, nn

from inline_attention.data import Batch, EvalLoader
from inline_attention.data.collate import as_targets
from inline_attention.layers.mode import evaluation_mode
from inline_attention.ops.precision import widest_float
from inline_attention.tasks.evaluation import check_readable
from inline_attention.training.distributed import current_ranks

MAX_CONFUSION_CLASSES = 256
CALIBRATION_BINS = 15


@dataclass(frozen=True, kw_only=True)
class LoaderResult:
    """What every result has: figures over the readable images of all ranks."""

    loss: float
    images: int
    skipped: int  # images that could not be read
    seconds: float

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds

    def figures(self) -> dict[str, float]:
        """All single numbers by name, without those that were not measured."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        return {**numbers, "images_per_second": self.images_per_second}


@dataclass(frozen=True, kw_only=True)
class EvalResult(LoaderResult):
    """Accuracies in per cent of the images that could be read, and the cross-entropy."""

    top1: float
    top5: float  # 100 with five classes or fewer
    ece: float  # expected calibration error in per cent: |accuracy − confidence|, averaged over 15 bins of confidence
    per_class: Tensor  # (classes, 2) int64: correct, total
    confusion: Tensor | None  # (classes, classes) int64: true, predicted; None for more than MAX_CONFUSION_CLASSES
    real_top1: float | None = None  # by ImageNet's reassessed labels, over images that have any; None: not counted

    def summary(self) -> str:
        top5 = f"  top-5 {self.top5:.3f}%" if len(self.per_class) > 5 else ""
        real = "" if self.real_top1 is None else f"  ReaL {self.real_top1:.3f}%"
        return f"top-1 {self.top1:.3f}%{top5}{real}  loss {self.loss:.4f}  ECE {self.ece:.2f}%"

    def class_table(self, names: Sequence[str]) -> tuple[tuple[str, ...], list[tuple[Any, ...]]]:
        """The header and the rows of a table of the classes that have images."""
        counts = zip(names, self.per_class.tolist(), strict=True)
        rows = [(name, right, total, f"{right / total:.4f}") for name, (right, total) in counts if total]
        return ("class", "correct", "total", "accuracy"), rows


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
    """Accuracy of a model that gives each image one class.

    The model runs in evaluation mode, and every module's mode is restored afterwards. Counts stay on the device and are
    read once, at the end. In a process group every rank calls this and gets the result over all ranks. `on_images` is
    called with the number of images of each batch, for a progress bar. `real_labels` also counts by the reassessed
    labels of ImageNet's validation images (ReaL, arXiv:2006.07159).
    """
    loader.check_one_label("accuracy")
    device = torch.device(device)
    counts = _Counts(len(loader.class_names), device=device)
    real = _RealCounts(loader, device=device) if real_labels else None

    def add(logits: Tensor, batch: Batch) -> None:
        counts.add(logits, batch.targets)
        if real is not None:
            real.add(logits, batch.sample_ids)

    start = time.perf_counter()
    run_batches(model, loader, add, device=device, amp_dtype=amp_dtype, on_images=on_images)
    result = counts.result(loader, start=start)
    return result if real is None else replace(result, real_top1=real.top1())


def run_batches(
    model: nn.Module,
    loader: EvalLoader,
    add: Callable[[Tensor, Batch], None],
    *,
    device: torch.device,
    amp_dtype: torch.dtype | None,
    on_images: Callable[[int], None] | None,
) -> None:
    """Run the model in evaluation mode, and call `add` with the logits (n, classes) float32 of each batch of n images.

    ValueError unless the model has an output for each class of the data.
    """
    loader.to(device)
    classes = len(loader.class_names)
    with evaluation_mode(model):
        for images, batch in padded_batches(loader, device=device):
            with torch.autocast(device.type, dtype=amp_dtype, enabled=amp_dtype is not None):
                logits = model(images)
            if logits.shape[-1] != classes:
                raise ValueError(
                    f"the model has {logits.shape[-1]} outputs, the data {classes} classes; "
                    "build the model with num_classes of the data, or name the model's classes"
                )
            add(logits[: len(batch.images)].float(), batch)
            if on_images is not None:
                on_images(len(batch.images))


class _Counts:
    """Counts and sums over batches, on the device."""

    def __init__(self, num_classes: int, *, device: torch.device) -> None:
        wide = widest_float(device)
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
        for value in sums:
            current_ranks().sum(value)
        per_class = self._per_class.cpu()  # waits for the device
        correct, images = per_class.sum(0).tolist()
        seconds = time.perf_counter() - start
        check_readable(loader, images=images, skipped=int(skipped))
        shape = (self._num_classes, self._num_classes)
        return EvalResult(
            top1=100 * correct / images,
            top5=100 * int(self._top5) / images,
            loss=float(self._loss) / images,
            ece=100 * float((self._calibration[:, 0] - self._calibration[:, 1]).abs().sum()) / images,
            images=images,
            skipped=int(skipped),
            seconds=seconds,
            per_class=per_class,
            confusion=None if self._confusion is None else self._confusion.cpu().view(shape),
        )


def padded_batches(loader: EvalLoader, *, device: torch.device) -> Iterator[tuple[Tensor, Batch]]:
    """Yield each batch, and its images padded to one shape. Every rank gets the same number of batches.

    With equal shapes, a compiled model is compiled once.
    """
    size = min(loader.batch_size, -(-loader.num_images // current_ranks().world_size)) or loader.batch_size
    for batch in _in_step(loader, device=device):
        missing = size - len(batch.images)
        yield F.pad(batch.images, (0,) * 7 + (missing,)) if missing > 0 else batch.images, batch


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
        hits, images = current_ranks().sum(self._counts).tolist()
        return 100 * hits / max(1, images)


def _in_step(loader: EvalLoader, *, device: torch.device) -> Iterator[Batch]:
    """Yield the batches of the loader, then empty ones until every rank has had the same number.

    A sharded model communicates in its forward pass, so all ranks must call it equally often.
    """
    batches = iter(loader)
    ranks = current_ranks()
    if ranks.world_size == 1:
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
        if not ranks.maximum(torch.tensor(batch is not None, dtype=torch.int64, device=device)):
            return
        yield empty if batch is None else batch
