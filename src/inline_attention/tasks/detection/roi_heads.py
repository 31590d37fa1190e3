"""Heads on proposed regions: classes, refined boxes and optional masks. A cascade has three stages, others have one."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead, FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import batched_nms, box_iou, clip_boxes_to_image, generalized_box_iou_loss

from inline_attention.tasks.detection.boxes import (
    KeyedSampler,
    PyramidAlign,
    Size,
    image_numbers,
    in_full_precision,
    mask_targets,
    mean_over_images,
)
from inline_attention.tasks.detection.rpn import Losses, Targets

BOX_SIDE, MASK_SIDE = 7, 14  # sides of the heads' inputs; a predicted mask has twice the side
GIOU_WEIGHT = 10.0
MIN_SCORE, NMS_IOU, MAX_DETECTIONS = 0.05, 0.5, 100  # of the detections in an image
NORM_GROUPS = 32
Maps = Sequence[Tensor]


@dataclass(frozen=True)
class StageSettings:
    iou: float  # smallest overlap at which a region belongs to an object
    box_weights: tuple[float, float, float, float]  # of the box coder: x, y, width, height
    loss_weight: float = 1.0


SINGLE = (StageSettings(0.5, (10, 10, 5, 5)),)
CASCADE = (
    StageSettings(0.5, (10, 10, 5, 5), 1.0),
    StageSettings(0.6, (20, 20, 10, 10), 0.5),
    StageSettings(0.7, (30, 30, 15, 15), 0.25),
)


class Detections(NamedTuple):
    """The detections in one image, by descending score. Labels start at 1."""

    boxes: Tensor  # (n, 4) x0, y0, x1, y1 in the pixels of the model's input
    scores: Tensor  # (n,)
    labels: Tensor  # (n,) int64
    masks: Tensor | None  # (n, 28, 28) probabilities inside the box; None: the detector has no mask heads


class Samples(NamedTuple):
    """The regions of one image that a stage learns from, positive ones first."""

    boxes: Tensor  # (n, 4)
    labels: Tensor  # (n,) int64, 0: background
    matched: Tensor  # (positives,) int64: their objects
    proposed: Tensor  # (n,) bool: False for the boxes of objects, which are added to the proposals


class Stage(nn.Module):
    """A box head and an optional mask head, with their losses."""

    def __init__(
        self,
        channels: int,
        *,
        num_classes: int,
        settings: StageSettings,
        cascaded: bool,
        masks: bool,
        regions: int,
        place: int,
    ) -> None:
        super().__init__()
        self.settings, self.cascaded = settings, cascaded
        hidden, outputs, convs = 4 * channels, num_classes + 1, [channels] * 4
        if cascaded:
            # Unlike a batch norm, a group norm does not depend on other images or ranks.
            norm = partial(nn.GroupNorm, NORM_GROUPS)
            self.box_head = FastRCNNConvFCHead((channels, BOX_SIDE, BOX_SIDE), convs, [hidden], norm_layer=norm)
        else:
            self.box_head = TwoMLPHead(channels * BOX_SIDE**2, hidden)
        self.box_predictor = FastRCNNPredictor(hidden, outputs)
        nn.init.normal_(self.box_predictor.cls_score.weight, std=0.01)
        nn.init.normal_(self.box_predictor.bbox_pred.weight, std=0.001)
        for layer in (self.box_predictor.cls_score, self.box_predictor.bbox_pred):
            nn.init.zeros_(layer.bias)
        self.mask_head: nn.Module | None = None
        if masks:
            self.mask_head = nn.Sequential(
                MaskRCNNHeads(channels, convs, dilation=1), MaskRCNNPredictor(channels, channels, outputs)
            )
        self.coder = BoxCoder(settings.box_weights)
        self.matcher = Matcher(settings.iou, settings.iou, allow_low_quality_matches=False)
        self.sampler = KeyedSampler(regions, positive_share=0.25, place=place)

    def predict_boxes(self, regions: Tensor) -> tuple[Tensor, Tensor]:
        """(n, C, 7, 7) → logits (n, classes + 1), deltas (n, classes + 1, 4), in full precision"""
        logits, deltas = self.box_predictor(self.box_head(regions))
        return in_full_precision(logits), in_full_precision(deltas).unflatten(1, (-1, 4))

    def refine(self, boxes: Tensor, deltas: Tensor, labels: Tensor) -> Tensor:
        """Move boxes (n, 4) by the deltas (n, classes + 1, 4) of their labels (n,)"""
        return self.coder.decode_single(_of_label(deltas, labels), boxes)

    def choose(self, proposals: Tensor, target: dict[str, Tensor], key: Tensor) -> Samples:
        """Match proposals and the objects' own boxes with objects, and sample some of them."""
        objects = target["boxes"]
        boxes = torch.cat([proposals, objects])
        if len(objects):
            matched = self.matcher(box_iou(objects, boxes))
            labels = torch.where(matched >= 0, target["labels"][matched.clamp(min=0)], 0)
        else:
            matched = torch.full((len(boxes),), -1, device=boxes.device)
            labels = torch.zeros_like(matched)
        positive, negative = self.sampler(labels, key)
        chosen = torch.cat([positive, negative])
        return Samples(boxes[chosen], labels[chosen], matched[positive], chosen < len(proposals))

    def box_losses(self, logits: Tensor, deltas: Tensor, samples: Sequence[Samples], targets: Targets) -> Losses:
        labels = torch.cat([s.labels for s in samples])
        boxes = torch.cat([s.boxes for s in samples])
        images = image_numbers([s.labels for s in samples])
        counts = torch.tensor([len(s.labels) for s in samples], device=labels.device)
        wanted = torch.cat([t["boxes"][s.matched] for s, t in zip(samples, targets, strict=True)])
        positive = labels > 0
        moved = _of_label(deltas[positive], labels[positive])
        if self.cascaded:
            predicted = self.coder.decode_single(moved, boxes[positive])
            errors = GIOU_WEIGHT * generalized_box_iou_loss(predicted, wanted)
        else:
            encoded = self.coder.encode_single(wanted, boxes[positive])
            errors = (moved - encoded).abs().sum(1)
        class_errors = F.cross_entropy(logits, labels, reduction="none")
        return {
            "class": mean_over_images(class_errors, images, counts),
            "box": mean_over_images(errors, images[positive], counts),
        }

    def mask_loss(self, logits: Tensor, samples: Sequence[Samples], targets: Targets) -> Tensor:
        """logits (positives, classes + 1, 28, 28)"""
        labels = torch.cat([s.labels[: len(s.matched)] for s in samples])
        wanted = [
            mask_targets(t["masks"], s.boxes[: len(s.matched)], s.matched, side=logits.shape[-1])
            for s, t in zip(samples, targets, strict=True)
        ]
        own = in_full_precision(_of_label(logits, labels))
        errors = F.binary_cross_entropy_with_logits(own, torch.cat(wanted), reduction="none")
        counts = torch.tensor([len(s.matched) for s in samples], device=labels.device)
        return mean_over_images(errors.mean((1, 2)), image_numbers([s.matched for s in samples]), counts)


class RoIHeads(nn.Module):
    """A sequence of stages. Each starts from the boxes that the previous one refined."""

    def __init__(
        self, channels: int, *, num_classes: int, stages: Sequence[StageSettings], masks: bool, regions: int
    ) -> None:
        super().__init__()
        self.box_pool, self.mask_pool = PyramidAlign(BOX_SIDE), PyramidAlign(MASK_SIDE)
        self.stages = nn.ModuleList(
            Stage(
                channels,
                num_classes=num_classes,
                settings=settings,
                cascaded=len(stages) > 1,
                masks=masks,
                regions=regions,
                place=number,
            )
            for number, settings in enumerate(stages, start=1)
        )

    def in_order(self) -> list[Stage]:
        """`stages`, with their type"""
        return [stage for stage in self.stages if isinstance(stage, Stage)]

    @torch.compiler.disable  # shapes depend on the number of detections
    def losses(
        self, maps: Maps, proposals: Sequence[Tensor], sizes: Sequence[Size], targets: Targets, keys: Tensor
    ) -> Losses:
        losses: Losses = {}
        for number, stage in enumerate(self.in_order(), start=1):
            samples = [stage.choose(*image) for image in zip(proposals, targets, keys, strict=True)]
            logits, deltas = stage.predict_boxes(self.box_pool(maps, [s.boxes for s in samples]))
            found = stage.box_losses(logits, deltas, samples, targets)
            if stage.mask_head is not None:
                positive_boxes = [s.boxes[: len(s.matched)] for s in samples]
                masks = stage.mask_head(self.mask_pool(maps, positive_boxes))
                found["mask"] = stage.mask_loss(masks, samples, targets)
            suffix = f"_{number}" if stage.cascaded else ""
            losses |= {name + suffix: stage.settings.loss_weight * value for name, value in found.items()}
            if number < len(self.stages):
                labels = torch.cat([s.labels for s in samples])
                labels = torch.where(labels > 0, labels, surest_class(logits))
                boxes = torch.cat([s.boxes for s in samples])
                refined = stage.refine(boxes, deltas, labels).detach().split([len(s.labels) for s in samples])
                proposals = [
                    clip_boxes_to_image(moved[s.proposed], size)
                    for moved, s, size in zip(refined, samples, sizes, strict=True)
                ]
        return losses

    @torch.compiler.disable
    def forward(self, maps: Maps, proposals: Sequence[Tensor], sizes: Sequence[Size]) -> list[Detections]:
        counts = [len(boxes) for boxes in proposals]
        scores = torch.zeros((), device=maps[0].device)
        for number, stage in enumerate(self.in_order(), start=1):
            logits, deltas = stage.predict_boxes(self.box_pool(maps, proposals))
            scores = scores + logits.softmax(1) / len(self.stages)
            boxes = torch.cat(list(proposals))
            if number < len(self.stages):
                refined = stage.refine(boxes, deltas, surest_class(logits)).split(counts)
                proposals = [clip_boxes_to_image(*image) for image in zip(refined, sizes, strict=True)]
            else:
                of_classes = stage.coder.decode_single(deltas.flatten(1), boxes).unflatten(1, (-1, 4))
        images = zip(of_classes.split(counts), scores.split(counts), sizes, strict=True)
        selected = [self._select(*image) for image in images]
        masks = self._masks(maps, [boxes for boxes, _, _ in selected], [labels for _, _, labels in selected])
        return [Detections(*image, masks=part) for image, part in zip(selected, masks, strict=True)]

    def _select(self, boxes: Tensor, scores: Tensor, size: Size) -> tuple[Tensor, Tensor, Tensor]:
        """boxes (n, classes + 1, 4), scores (n, classes + 1) → boxes, scores, labels of the detections"""
        boxes = clip_boxes_to_image(boxes, size)
        rows, labels = (scores[:, 1:] > MIN_SCORE).nonzero().unbind(1)
        labels = labels + 1
        boxes, scores = boxes[rows, labels], scores[rows, labels]
        kept = batched_nms(boxes, scores, labels, NMS_IOU)[:MAX_DETECTIONS]
        return boxes[kept], scores[kept], labels[kept]

    def _masks(self, maps: Maps, boxes: Sequence[Tensor], labels: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The mean of the stages' masks, for each image (n, 28, 28), or None without mask heads"""
        heads = [stage.mask_head for stage in self.in_order() if stage.mask_head is not None]
        if not heads:
            return [None] * len(boxes)
        regions, flat = self.mask_pool(maps, boxes), torch.cat(list(labels))
        of_stages = [in_full_precision(_of_label(head(regions), flat)).sigmoid() for head in heads]
        return torch.stack(of_stages).mean(0).split([len(part) for part in labels])


def surest_class(logits: Tensor) -> Tensor:
    """The most likely class except the background: (n, classes + 1) → (n,)"""
    return logits[:, 1:].argmax(1) + 1


def _of_label(values: Tensor, labels: Tensor) -> Tensor:
    """(n, classes + 1, …) → (n, …) of each row's label"""
    return values[torch.arange(len(labels), device=labels.device), labels]
