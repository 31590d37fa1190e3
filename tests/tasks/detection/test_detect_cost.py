"""Parameters and multiply-accumulates against the published ones, and the recipes against the published settings."""

import dataclasses
import functools
from importlib import resources

import pytest

from inline_attention.models import list_models
from inline_attention.tasks.detection.published import DETECTORS, PublishedDetector, count_cost
from inline_attention.tasks.detection.task import Detection
from inline_attention.training.config import load_recipe, recipe_names

MODELS = {f"{row.backbone}-{row.head}": row for row in DETECTORS.values()}
count = functools.cache(count_cost)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=name, marks=() if row.backbone.endswith("tiny") else pytest.mark.slow)
        for name, row in MODELS.items()
    ],
)
def test_softmax_detectors_cost_what_was_published(row: PublishedDetector) -> None:
    cost = count(row.backbone, row.head)
    assert cost.macs / 1e9 == pytest.approx(row.macs, rel=0.005)
    if row.params is not None:
        assert cost.params / 1e6 == pytest.approx(row.params, abs=0.5)


@pytest.mark.parametrize(
    ("backbone", "head", "params", "macs"),
    [
        ("inline_pvt_tiny", "mask_rcnn", 31.69, 210.4),
        ("inline_swin_tiny", "mask_rcnn", 48.73, 262.8),
        ("inline_swin_tiny", "cascade_mask_rcnn", 86.58, 741.1),
    ],
)
def test_inline_detectors_differ_in_the_backbone_alone(backbone: str, head: str, params: float, macs: float) -> None:
    """The figures of docs/dense.md."""
    cost, softmax = count(backbone, head), count(backbone.replace("inline", "softmax"), head)
    assert cost.params / 1e6 == pytest.approx(params, abs=0.005)
    assert cost.macs / 1e9 == pytest.approx(macs, abs=0.05)
    assert cost[2:] == softmax[2:]
    assert cost.backbone < softmax.backbone


def test_the_cost_of_the_heads_by_hand() -> None:
    """Cascade: four 3×3 convolutions and a hidden layer a box, four convolutions and two more layers a mask, thrice."""
    cost = count_cost("inline_pvt_tiny", "cascade_mask_rcnn", img_size=(64, 64))
    box = 4 * 49 * 9 * 256**2 + 49 * 256 * 1024 + 1024 * (81 + 4 * 81)
    mask = 4 * 196 * 9 * 256**2 + 196 * 4 * 256**2 + 784 * 256 * 81
    assert cost.boxes == 3 * 1000 * box
    assert cost.masks == 3 * 100 * mask


PUBLISHED = [name for name in recipe_names(Detection.recipes) if "mask_rcnn" in name]
OURS = sorted({*recipe_names(Detection.recipes)} - {*PUBLISHED})


def test_every_published_row_has_a_recipe_and_an_inline_twin() -> None:
    assert set(PUBLISHED) == {name.replace("softmax", kind) for name in DETECTORS for kind in ("softmax", "inline")}


@pytest.mark.parametrize("name", [name for name in OURS if name.endswith("1x")])
def test_recipes_for_boxes_are_those_for_masks_without_the_masks(name: str) -> None:
    """The comment in the recipe says so too."""
    twin = name.replace("faster_rcnn", "mask_rcnn").replace("cascade_rcnn", "cascade_mask_rcnn")
    config, same = (load_recipe(n, defaults=Detection.defaults(), folder=Detection.recipes) for n in (name, twin))
    model = dataclasses.replace(config.model, head=same.model.head)
    assert dataclasses.replace(config, model=model, recipe=twin) == same
    assert (config.model.head, same.model.head) in [
        ("faster_rcnn", "mask_rcnn"),
        ("cascade_rcnn", "cascade_mask_rcnn"),
    ]


@pytest.mark.parametrize("name", [name for name in recipe_names(Detection.recipes) if name.endswith("x")])
def test_recipes_say_what_is_ours(name: str) -> None:
    text = resources.files("inline_attention").joinpath(Detection.recipes, f"{name}.yaml").read_text()
    comment = " ".join(line for line in text.splitlines() if line.startswith("#"))
    assert ("weight decay and drop path" in comment) == name.startswith("cascade")
    assert ("steps of 32" in comment) == name.endswith("3x")
    assert ("single scale" in comment) == name.endswith("1x")


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_are_as_published(name: str) -> None:
    config = load_recipe(name, defaults=Detection.defaults(), folder=Detection.recipes)
    row = DETECTORS[name.replace("inline", "softmax")]
    kind, family = config.model.name.split("_")[:2]
    assert config.model.name in list_models()
    assert config.model.name.replace("inline", "softmax") == row.backbone
    assert config.model.head == row.head
    assert config.model.drop_path == 0.1
    assert config.model.weights == ("pretrained" if kind == "inline" else None)
    assert (config.optim.lr, config.optim.weight_decay) == ((2e-4, 1e-4) if family == "pvt" else (1e-4, 0.05))
    assert config.data.max_side == 1333
    assert config.data.short_side == 800

    # COCO has 117 266 images with objects, 16 in an update.
    steps = 117266 // 16
    schedule = config.build_schedule(steps_per_epoch=steps, world_size=8)
    peak = config.optim.lr
    epochs, first, second = (36, 27, 33) if name.endswith("3x") else (12, 8, 11)
    assert config.data.train_short_sides == (tuple(range(480, 801, 32)) if name.endswith("3x") else (800,))
    assert schedule.total_steps == epochs * steps
    assert schedule.rate(0) < peak / 100
    for step, rate in (
        (250, peak / 2),
        (500, peak),
        (first * steps - 1, peak),
        (first * steps, peak / 10),
        (second * steps - 1, peak / 10),
        (second * steps, peak / 100),
        (epochs * steps - 1, peak / 100),
    ):
        assert schedule.rate(step) == pytest.approx(rate, rel=2e-3), step
