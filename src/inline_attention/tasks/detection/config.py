"""The settings of a detection run. The defaults are the published 1× schedule; recipes change them."""

from dataclasses import dataclass, field
from typing import Literal

from inline_attention.tasks.dense.config import DenseDataConfig, HeadedConfig
from inline_attention.training.config import LoopConfig, OptimConfig, ScheduleConfig

Layout = Literal["auto", "coco", "yolo"]


@dataclass(frozen=True)
class DetectorConfig(HeadedConfig):
    """A backbone with heads for boxes (Faster R-CNN) or boxes and masks (Mask R-CNN), in one stage or a cascade."""

    name: str = "inline_pvt_tiny"
    drop_path: float | None = 0.1
    head: Literal["faster_rcnn", "cascade_rcnn", "mask_rcnn", "cascade_mask_rcnn"] = "mask_rcnn"
    channels: int = 256  # channels of the pyramid and the heads
    regions: int = 512  # regions of an image that each head learns from; fewer take less memory


@dataclass
class DetectionDataConfig(DenseDataConfig):
    """Images with boxes and, for mask heads, masks.

    The layout "coco" is annotations/instances_SPLIT.json with the images in SPLIT/. "yolo" is a folder with data.yaml,
    images/SPLIT and labels/SPLIT. "auto" recognises the layout of `path`. The splits "train" and "val" also find COCO's
    own train2017 and val2017.
    """

    layout: Layout = "auto"  # coco, yolo; auto: recognised from data.path
    batch_size: int = 2  # per rank
    short_side: int = 800  # short side of images in evaluation
    train_short_sides: tuple[int, ...] = (800,)  # one of them is drawn for each image
    max_side: int = 1333  # limit of the long side; the short side is then smaller
    hflip: float = 0.5
    skip_empty: bool = True  # train only on images with objects, as published

    def validate(self) -> None:
        super().validate()
        sides = (self.short_side, *self.train_short_sides)
        self.check("short_side", self.short_side >= 1, "a positive side")
        self.check("train_short_sides", bool(self.train_short_sides) and min(sides) >= 1, "positive sides")
        self.check("max_side", self.max_side >= 1, "a positive side")
        self.check("hflip", 0 <= self.hflip <= 1, "a probability")
        self.check("in_memory", not self.in_memory, "false: detection decodes images when it needs them")


@dataclass(frozen=True, kw_only=True)
class DetectionConfig(LoopConfig):
    """The settings of `inline detect train`. By default, 12 epochs with rates for 16 images per update."""

    command: Literal["detect train"] = "detect train"
    model: DetectorConfig = field(default_factory=DetectorConfig)
    data: DetectionDataConfig = field(default_factory=DetectionDataConfig)
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(lr=1e-4, rate_batch=16, weight_decay=0.05, clip_norm=None)
    )
    schedule: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(
            kind="step",
            epochs=12,
            drop_at=(8, 11),
            warmup_epochs=0,
            warmup_steps=500,
            warmup_lr=1e-7,  # ours: not published
            min_lr=0.0,
        )
    )
