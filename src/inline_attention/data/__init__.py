"""Data sets, augmentation and loaders: `open_data(DataConfig(path=…))`."""

from inline_attention.data.config import DataConfig, LoaderConfig
from inline_attention.data.factory import open_data, open_eval_data, open_files, typical_side
from inline_attention.data.loaders import Data, EvalLoader, TrainLoader
from inline_attention.data.mixup import Mixup
from inline_attention.data.prefetcher import Batch
from inline_attention.data.skipped import SkippedImage, SkippedImages

__all__ = [
    "DataConfig",
    "LoaderConfig",
    "open_data",
    "open_eval_data",
    "open_files",
    "typical_side",
    "Data",
    "TrainLoader",
    "EvalLoader",
    "Batch",
    "Mixup",
    "SkippedImage",
    "SkippedImages",
]
