"""Settings of data sets and loaders, with types that YAML can represent."""

import math
import os
from dataclasses import dataclass, field

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

EVAL_TRANSFORMS = ("published", "timm", "resize")
MAX_CLASSES = 1_000_000  # far above any data set; a damaged label must not allocate gigabytes of class names
AUGMENTING = ("nearest", "bilinear", "bicubic", "random")  # by which Pillow rotates
INTERPOLATIONS = (*AUGMENTING, "box", "hamming", "lanczos")


@dataclass
class LoaderConfig:
    """Settings of the loaders of every task."""

    path: str = ""
    train_split: str = "train"
    val_split: str = "val"

    batch_size: int = 128  # per rank
    workers: int | None = None  # processes per rank; null: the rank's share of the cores, at most 8
    prefetch: int = 2  # batches that each worker prepares in advance
    pin_memory: bool | None = None  # null: with a CUDA device
    in_memory: bool = False  # decode once and keep the pixels, for small data sets
    max_broken: float = 0.01  # stop above this share of unreadable images; a value of 1 or more is a count

    def resolved_workers(self, world_size: int) -> int:
        """The number of worker processes. It may depend on the machine, because results do not depend on it."""
        if self.workers is not None:
            return self.workers
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return min(8, max(1, cores // ranks_here))

    def max_broken_count(self, total: int) -> int:
        """How many of `total` images may be unreadable. A share is rounded up."""
        return math.floor(min(self.max_broken, total)) if self.max_broken >= 1 else math.ceil(self.max_broken * total)

    def check(self, name: str, holds: bool, expected: str) -> None:
        if not holds:
            raise ValueError(f"data.{name} is {getattr(self, name)!r}; expected {expected}")

    def validate(self) -> None:
        """Raise ValueError for an invalid value, before anything is opened."""
        self.check("batch_size", self.batch_size >= 1, "at least 1")
        self.check("workers", self.workers is None or self.workers >= 0, "0 or more, or null")
        self.check("prefetch", self.prefetch >= 1, "at least 1")
        self.check("max_broken", self.max_broken >= 0, "0 or more")


@dataclass
class DataConfig(LoaderConfig):
    """The source of the images and their transforms. The defaults are those of the published training.

    `path` is "digits" (embedded), or a folder. The folder holds class folders, with or without splits, or a labels.csv,
    or zip or tar files. "hfds/NAME" is a Hugging Face dataset, "wds/FOLDER" WebDataset shards, and "tfds/NAME" a
    TensorFlow dataset.
    """

    path: str = "digits"
    labels: bool = True  # false: take all images below the folder, and ignore the names of their folders
    split_file: str | None = None  # a folder without splits: a table of them, such as the split.csv of a run
    val_share: float = 0.2  # a folder without splits: the share of each class for validation
    train_share: float = 1.0  # train on this share of the images, evenly spaced over the split; not for streams
    num_classes: int | None = None  # required for WebDataset shards, which do not list their classes
    input_key: str | None = None  # hfds/, wds/, tfds/: the column of the image, if not the default
    target_key: str | None = None  # hfds/, tfds/: the column of the label

    img_size: int | list[int] | None = 224  # side, or [height, width]; null, in training: the model's own
    in_chans: int = 3  # 1: greyscale
    mean: list[float] | None = None  # for pixels in 0..1; null: ImageNet's, averaged for one channel
    std: list[float] | None = None
    interpolation: str = "bicubic"

    augment: bool = True  # false: training images get the evaluation transform
    augment_on_device: bool = False  # with in_memory: augment whole batches on the device
    scale: list[float] = field(default_factory=lambda: [0.08, 1.0])
    ratio: list[float] = field(default_factory=lambda: [3 / 4, 4 / 3])
    hflip: float = 0.5
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    color_jitter: float = 0.4  # no effect with auto_augment, as in timm and in the published training
    random_erase: float = 0.25  # probability; erased pixels are normal noise
    repeats: int = 0  # repeated augmentation: copies of each image in a batch; 0 and 1: off

    mixup: float = 0.8
    cutmix: float = 1.0
    mixup_switch: float = 0.5  # probability of cutmix if both are on
    mixup_prob: float = 1.0

    # "published", "timm" (short side, then centre crop) or "resize" (straight to the size)
    eval_transform: str = "published"
    crop_pct: float = 0.875  # of the "timm" evaluation transform

    @property
    def size(self) -> tuple[int, int]:
        """(height, width)"""
        if self.img_size is None:
            raise ValueError("data.img_size is null, and there is no model to take the size from; give a size")
        height, width = [self.img_size] * 2 if isinstance(self.img_size, int) else self.img_size
        return height, width

    @property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(mean, std), one value per channel"""
        return (
            _per_channel(self.mean, default=IMAGENET_DEFAULT_MEAN, in_chans=self.in_chans),
            _per_channel(self.std, default=IMAGENET_DEFAULT_STD, in_chans=self.in_chans),
        )

    @property
    def mixes(self) -> bool:
        return (self.mixup > 0 or self.cutmix > 0) and self.mixup_prob > 0

    def validate(self) -> None:
        super().validate()
        check = self.check
        if self.img_size is not None:
            is_pair = isinstance(self.img_size, int) or len(self.img_size) == 2
            check("img_size", is_pair and min(self.size) >= 1, "a positive side, [height, width], or null")
        check("val_share", 0 < self.val_share <= 0.5, "a share above 0, at most 0.5")
        check("in_chans", self.in_chans in (1, 3), "1 (greyscale) or 3 (colour)")
        for name, values in (("mean", self.mean), ("std", self.std)):
            check(
                name,
                values is None or (len(values) == self.in_chans and all(map(math.isfinite, values))),
                f"{self.in_chans} value(s), finite, one per channel",
            )
        check("std", self.std is None or min(self.std) > 0, "positive values")
        check("interpolation", self.interpolation in INTERPOLATIONS, _one_of(INTERPOLATIONS))
        in_range = self.num_classes is None or 1 <= self.num_classes <= MAX_CLASSES
        check("num_classes", in_range, f"1 to {MAX_CLASSES}, or null")
        is_named = self.path.startswith(("hfds/", "wds/", "tfds/"))
        check("num_classes", self.num_classes is None or is_named, f"null: {self.path!r} lists its classes")
        has_splits = is_named or self.path == "digits"
        check("split_file", self.split_file is None or not has_splits, f"null: {self.path!r} has splits of its own")
        for name, bounds in (("scale", self.scale), ("ratio", self.ratio)):
            check(name, len(bounds) == 2 and 0 < bounds[0] <= bounds[1] < math.inf, "[low, high] with 0 < low <= high")
        for name in ("hflip", "random_erase", "mixup_switch", "mixup_prob"):
            check(name, 0 <= getattr(self, name) <= 1, "a probability")
        for name in ("color_jitter", "repeats", "mixup", "cutmix"):
            check(name, 0 <= getattr(self, name) < math.inf, "0 or more, and finite")
        check("eval_transform", self.eval_transform in EVAL_TRANSFORMS, _one_of(EVAL_TRANSFORMS))
        check("train_share", 0 < self.train_share <= 1, "above 0, at most 1")
        check("crop_pct", 0 < self.crop_pct <= 1, "above 0, at most 1")
        if self.augment_on_device:
            where = "with data.augment_on_device"
            check("in_memory", self.in_memory, f"true {where}, which works on pixels in memory")
            check("interpolation", self.interpolation in ("bilinear", "bicubic"), f"bilinear or bicubic {where}")


def _per_channel(values: list[float] | None, *, default: tuple[float, ...], in_chans: int) -> tuple[float, ...]:
    if values is not None:
        return tuple(values)
    return default if in_chans == 3 else (sum(default) / len(default),)


def _one_of(names: tuple[str, ...]) -> str:
    return "one of " + ", ".join(names)
