"""The settings of a segmentation run. The defaults are UperNet's published training on ADE20K."""

from dataclasses import dataclass, field
from typing import Any, Literal

from inline_attention.tasks.dense.config import DenseDataConfig, HeadedConfig
from inline_attention.training.config import LoopConfig, OptimConfig, ScheduleConfig, check_setting

Layout = Literal["auto", "folders", "ade20k", "cityscapes"]


@dataclass(frozen=True)
class SegmenterConfig(HeadedConfig):
    """A backbone under a segmentation head."""

    name: str = "inline_swin_tiny"
    head: Literal["upernet", "fpn"] = "upernet"
    head_kwargs: dict[str, Any] = field(default_factory=dict)  # arguments of the head, such as dim
    auxiliary_weight: float = 0.4  # weight of the auxiliary head's loss, if there is one

    def __post_init__(self) -> None:
        super().__post_init__()
        weight = self.auxiliary_weight
        check_setting("model.auxiliary_weight", weight, weight >= 0, "0 or more")


@dataclass
class SegmentDataConfig(DenseDataConfig):
    """Images with masks: PNG files of the same size, whose pixels are class numbers.

    The layout "folders" is images/SPLIT/NAME.jpg with masks/SPLIT/NAME.png, at any depth. "ade20k" and "cityscapes" are
    these data sets as distributed. "auto" recognises the layout of `path`.
    """

    layout: Layout = "auto"  # folders, ade20k, cityscapes; auto: recognised from data.path
    classes: str | list[str] | None = None  # names, or a file with one name per line; null: classes.txt in data.path
    ignore_index: int = 255  # class number of ignored pixels

    batch_size: int = 16
    crop: int | list[int] = 512  # size of training crops: side, or [height, width]
    short_side: int | None = 512  # of resized images, in training and evaluation; null: images keep their size
    max_side: int = 2048  # limit of a resized image's long side
    scale: list[float] = field(
        default_factory=lambda: [0.5, 2.0]
    )  # in training, the size is multiplied by a random factor in this range
    max_class_share: float = 0.75  # a crop with a larger share of one class is drawn again, up to ten times
    hflip: float = 0.5
    photometric: bool = True  # brightness, contrast, saturation and hue, each with probability 1/2

    eval_batch_size: int = 1  # images per batch; only those of the same size run together
    window: int | list[int] | None = None  # evaluate in windows of this size; null: evaluate the whole image
    window_stride: float = 2 / 3  # distance between windows, as a share of the window's side
    eval_scales: list[float] = field(default_factory=lambda: [1.0])  # average over images scaled by these factors
    eval_flip: bool = False  # average over the image and its mirror image

    @property
    def crop_size(self) -> tuple[int, int]:
        """(height, width)"""
        return _pair(self.crop)

    @property
    def window_size(self) -> tuple[int, int] | None:
        return None if self.window is None else _pair(self.window)

    def validate(self) -> None:
        super().validate()
        check = self.check
        for name, size in (("crop", self.crop), ("window", self.window)):
            is_pair = size is None or isinstance(size, int) or len(size) == 2
            check(name, is_pair and (size is None or min(_pair(size)) >= 1), "a positive side or [height, width]")
        check("ignore_index", 0 <= self.ignore_index <= 0xFFFF, "a number that a mask can hold, 0 to 65535")
        check("short_side", self.short_side is None or self.short_side >= 1, "a positive size, or null")
        check("max_side", self.max_side >= (self.short_side or 1), "no less than data.short_side")
        bounds = self.scale
        check("scale", len(bounds) == 2 and 0 < bounds[0] <= bounds[1], "[low, high] with 0 < low <= high")
        check("max_class_share", 0 < self.max_class_share <= 1, "above 0, at most 1 (1: any crop is accepted)")
        check("hflip", 0 <= self.hflip <= 1, "a probability")
        check("eval_batch_size", self.eval_batch_size >= 1, "at least 1")
        check("window_stride", 0 < self.window_stride <= 1, "above 0, at most 1")
        check("eval_scales", bool(self.eval_scales) and min(self.eval_scales) > 0, "one positive number or more")


@dataclass(frozen=True, kw_only=True)
class SegmentConfig(LoopConfig):
    """The settings of `inline segment train`."""

    command: Literal["segment train"] = "segment train"
    model: SegmenterConfig = field(default_factory=lambda: SegmenterConfig(drop_path=0.3))
    data: SegmentDataConfig = field(default_factory=SegmentDataConfig)
    # The published rates are for 16 images per update.
    optim: OptimConfig = field(
        default_factory=lambda: OptimConfig(lr=6e-5, rate_batch=16, weight_decay=0.01, clip_norm=None)
    )
    schedule: ScheduleConfig = field(
        default_factory=lambda: ScheduleConfig(kind="poly", steps=160_000, warmup_steps=1500, warmup_lr=0.0, min_lr=0.0)
    )


def _pair(size: int | list[int]) -> tuple[int, int]:
    height, width = [size] * 2 if isinstance(size, int) else size
    return height, width
