"""Finds objects in image files with a trained model, and writes pictures and a list of the objects."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from inline_attention.data.decode import read_image
from inline_attention.printing import write_json
from inline_attention.tasks.dense.prediction import for_files, open_output
from inline_attention.tasks.detection.annotations import without_annotations
from inline_attention.tasks.detection.average_precision import as_records
from inline_attention.tasks.detection.data import DetectionEvalLoader
from inline_attention.tasks.detection.evaluation import detect
from inline_attention.tasks.detection.pictures import draw
from inline_attention.tasks.detection.weights import TrainedDetector

OBJECTS = "objects.json"


class DetectedFile(NamedTuple):
    path: Path  # of the image
    picture: Path  # the image with its objects drawn on it
    objects: list[dict[str, Any]]  # see `as_records`


def detect_files(
    trained: TrainedDetector,
    paths: Sequence[Path],
    output: Path,
    *,
    min_score: float = 0.5,
    device: torch.device,
    amp_dtype: torch.dtype | None = None,
    on_file: Callable[[DetectedFile], None] = lambda file: None,
) -> list[DetectedFile]:
    """Write a picture of every readable image to the folder `output`, and all objects to its objects.json.

    Objects with a score below `min_score` are left out. `on_file` is called after each image. An error or Ctrl-C keeps
    the results so far.
    """
    if not 0 <= min_score <= 1:
        raise ValueError(f"min_score is {min_score:g}; expected a score from 0 to 1")
    results = open_output(output, paths, endings=(".jpg",))
    loader = DetectionEvalLoader(without_annotations(paths, trained.class_names), config=for_files(trained.data, paths))
    done = []
    try:
        for result in detect(trained.model.to(device), loader, device=device, amp_dtype=amp_dtype):
            path, picture = paths[result.image_id], Path(f"{results[result.image_id]}.jpg")
            drawn = draw(read_image(path), result, class_names=trained.class_names, min_score=min_score)
            drawn.save(picture, quality=92)
            done.append(DetectedFile(path, picture, as_records(result, trained.class_names, min_score=min_score)))
            on_file(done[-1])
    finally:  # an interrupted run keeps the objects of its pictures
        images = [{"image": str(file.path), "picture": str(file.picture), "objects": file.objects} for file in done]
        skipped = [image._asdict() for image in loader.skipped]
        write_json(output / OBJECTS, {"model": trained.title, "images": images, "skipped_images": skipped})
    return done
