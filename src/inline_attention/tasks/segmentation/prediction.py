"""Segments image files with a trained model, and writes masks and overlays."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from inline_attention.data.decode import read_image
from inline_attention.tasks.dense.prediction import for_files, open_output
from inline_attention.tasks.segmentation.data import open_image_files
from inline_attention.tasks.segmentation.evaluation import Predictor
from inline_attention.tasks.segmentation.pictures import overlay, palette, save_mask
from inline_attention.tasks.segmentation.weights import TrainedSegmenter


class SegmentedFile(NamedTuple):
    path: Path  # of the image
    mask: Path  # PNG of class numbers
    overlay: Path  # the classes in colours over the image
    shares: dict[str, float]  # of the pixels, for each class that occurs; the largest first


def segment_files(
    trained: TrainedSegmenter,
    paths: Sequence[Path],
    output: Path,
    *,
    device: torch.device,
    amp_dtype: torch.dtype | None = None,
    on_file: Callable[[SegmentedFile], None] = lambda file: None,
) -> list[SegmentedFile]:
    """Write a mask and an overlay of every readable image to the folder `output`. `on_file` is called after each."""
    results = open_output(output, paths, endings=(".png", ".overlay.jpg"))
    predictor = Predictor(trained.model.to(device), config=trained.data, device=device, amp_dtype=amp_dtype)
    colours = palette(trained.class_names)
    done = []
    for batch in open_image_files(paths, config=for_files(trained.data, paths)):
        for image in batch:
            (predicted,) = predictor([image.pixels], [image.size])
            classes = predicted.cpu().numpy().astype(np.uint8)
            mask, picture = (Path(f"{results[image.sample_id]}{ending}") for ending in (".png", ".overlay.jpg"))
            save_mask(classes, mask, colours)
            pixels = np.asarray(read_image(paths[image.sample_id]))  # image.pixels are resized
            Image.fromarray(overlay(pixels, classes, colours)).save(picture, quality=92)
            shares = np.bincount(classes.ravel(), minlength=len(trained.class_names)) / classes.size
            named = {trained.class_names[c]: float(shares[c]) for c in np.argsort(-shares) if shares[c] > 0}
            done.append(SegmentedFile(paths[image.sample_id], mask, picture, named))
            on_file(done[-1])
    return done
