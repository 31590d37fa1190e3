"""Calibration of a linearised `softmax_deit_study` without training: gains, softmax layers, and the cost of each layer.

Gains, costs and the choice of layers come from training images without their labels.
"""

import json
import math
from collections.abc import Iterable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from inline_attention import linearize
from inline_attention.cli._output import image_progress
from inline_attention.data import open_eval_data
from inline_attention.linearize import Costs, LayerCost, calibrate, layer_costs
from inline_attention.tasks.classification.classifier import Classifier, load_classifier
from inline_attention.tasks.classification.evaluation import evaluate
from inline_attention.tasks.linearization.stages import CALIBRATION_IMAGES
from study.expansion import TEACHER, TEACHER_SHA256, check_teacher

FORMS = (("inline", 0), ("linear", 0), ("tangent", 0), ("tangent", 1), ("tangent", 2), ("tangent", 3))
# Attention, softmax layers, whether it has gains
CASES = [("softmax", 0, False), *((attention, layers, gains) for attention, layers in FORMS for gains in (False, True))]


class Row(NamedTuple):
    attention: str
    softmax_layers: int
    gains: bool
    kept: list[str]  # names of the layers that stay softmax
    images: int
    top1: float

    @property
    def case(self) -> tuple[str, int, bool]:
        return self.attention, self.softmax_layers, self.gains


def read_record(path: Path, *, images: int) -> tuple[Costs | None, list[Row]]:
    """Costs and rows of a record that was begun. ValueError if it has another teacher or number of images."""
    if not path.exists():
        return None, []
    content = json.loads(path.read_text(encoding="utf-8"))
    rows = [Row(**row) for row in content["rows"]]
    if content["teacher"] != TEACHER_SHA256 or any(row.images != images for row in rows):
        raise ValueError(f"{path} has rows of another teacher, or of another number of images; name another file")
    layers = [LayerCost(**cost) for cost in content["costs"]]
    return Costs(layers, content["calibration_images"], LayerCost(**content["together"], error=math.nan)), rows


def open_teacher(data: str, *, batch_size: int, workers: int) -> tuple[Classifier, list[Tensor]]:
    """The teacher, and the images for gains, costs and choice: as many as `inline linearize` takes."""
    check_teacher()
    classifier = load_classifier(TEACHER, "pretrained")
    config = classifier.data
    config.path, config.batch_size, config.workers = data, batch_size, workers
    loader = open_eval_data(config, split=config.train_split, max_images=CALIBRATION_IMAGES, seed=0)
    return classifier, [batch.images for batch in loader]


def evaluate_cases(
    classifier: Classifier,
    images: list[Tensor],
    costs: Costs,
    *,
    device: torch.device,
    max_images: int | None = None,
    known: Iterable[Row] = (),
) -> Iterator[Row]:
    """Yields top-1 of each case as soon as it is known, and the known rows at once."""
    found = {row.case: row for row in known}
    # As keep_softmax="auto:K" chooses them on the same images
    costliest = [layer.name for layer in sorted(costs.layers, key=lambda layer: -layer.change)]
    for attention, layers, gains in CASES:
        if (attention, layers, gains) in found:
            yield found[attention, layers, gains]
            continue
        model = deepcopy(classifier.model).to(device).eval()
        kept = costliest[:layers]
        if attention != "softmax":
            linearize(model, attention=attention, local_residual=False, keep_softmax=kept)
        if gains:
            calibrate(model, images)
        loader = open_eval_data(classifier.data, class_names=classifier.class_names, max_images=max_images)
        with image_progress(f"{attention}, {layers} softmax", total=loader.num_images) as on_images:
            result = evaluate(model, loader, device=device, on_images=on_images)
        yield Row(attention, layers, gains, kept, result.images, result.top1)


def measure_costs(classifier: Classifier, images: list[Tensor], *, device: torch.device) -> Costs:
    """The cost of converting each layer to the tangent alone."""
    model = deepcopy(classifier.model).to(device).eval()
    linearize(model, local_residual=False)
    return layer_costs(model, images)
