"""Detectors from weights files: whole, the backbone alone, or a classifier below new heads."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import shrunk

import inline_attention
from inline_attention.models.weights import load_model, load_weights, read_metadata, save_weights
from inline_attention.tasks.detection.config import DetectionDataConfig, DetectorConfig
from inline_attention.tasks.detection.model import Detector
from inline_attention.tasks.detection.weights import MODELS, load_detector
from inline_attention.tasks.segmentation.config import SegmenterConfig
from inline_attention.tasks.segmentation.weights import MODELS as SEGMENTERS
from inline_attention.training.optim import freeze_layers

KWARGS = {key: value for key, value in shrunk("inline_pvt_tiny").items() if key != "num_classes"}
CONFIG = DetectorConfig(name="inline_pvt_tiny", channels=32, kwargs=KWARGS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """What `inline detect train` writes, of three classes"""
    torch.manual_seed(1)
    path = tmp_path / "detector.safetensors"
    metadata = {
        "library": "inline_attention",
        "architecture": CONFIG.name,
        "config": json.dumps(MODELS.arguments_of(CONFIG)),
        "class_names": json.dumps(["disc", "square", "triangle"]),
        "task": MODELS.task,
        "preprocessing": MODELS.preparation_of(DetectionDataConfig(short_side=96, max_side=160)),
    }
    save_file(MODELS.build(CONFIG, num_classes=3).state_dict(), path, metadata=metadata)
    return path


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_a_file_says_what_it_is_of(file: Path) -> None:
    trained = load_detector(str(file))
    assert isinstance(trained.model, Detector)
    assert trained.title == MODELS.title(CONFIG) == "inline_pvt_tiny + Mask R-CNN"
    assert trained.class_names == ["disc", "square", "triangle"]
    assert (trained.data.short_side, trained.data.max_side) == (96, 160)
    torch.manual_seed(1)
    assert same(trained.model, MODELS.build(CONFIG, num_classes=3))


def test_training_goes_on_from_a_detector_or_from_its_backbone(file: Path) -> None:
    saved = load_detector(str(file)).model
    torch.manual_seed(2)
    assert same(MODELS.build(DetectorConfig(**{**vars(CONFIG), "weights": str(file)}), num_classes=3), saved)
    with pytest.raises(ValueError, match=r"does not fit the model: \d+ of another shape.*set model.reset_head=true"):
        MODELS.build(DetectorConfig(**{**vars(CONFIG), "weights": str(file)}), num_classes=5)
    other = {"weights": str(file), "reset_head": True, "head": "cascade_mask_rcnn"}
    cascade = MODELS.build(DetectorConfig(**{**vars(CONFIG), **other}), num_classes=5)
    assert same(cascade.backbone, saved.backbone)
    assert not same(cascade.pyramid, saved.pyramid)


def test_a_classifier_goes_below_new_heads(tmp_path: Path) -> None:
    classifier = inline_attention.create_model("inline_pvt_tiny", **shrunk("inline_pvt_tiny", num_classes=7))
    path = save_weights(classifier, tmp_path / "classifier.safetensors")
    model = MODELS.build(DetectorConfig(**{**vars(CONFIG), "weights": str(path)}), num_classes=3)
    assert torch.equal(model.backbone.model.patch_embed.proj.weight, classifier.patch_embed.proj.weight)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="model for classification, not for detection; use it with `inline predict`"):
        load_detector(str(path))


def test_the_backbone_of_a_detector_goes_below_a_segmenter(file: Path) -> None:
    config = SegmenterConfig(name="inline_pvt_tiny", head="fpn", kwargs=KWARGS, weights=str(file))
    with pytest.raises(ValueError, match=r"model for detection, not for segmentation.*set model.reset_head=true"):
        SEGMENTERS.build(config, num_classes=3)
    segmenter = SEGMENTERS.build(replace(config, reset_head=True), num_classes=3)
    assert same(segmenter.backbone, load_detector(str(file)).model.backbone)
    with pytest.raises(ValueError, match="holds weights of inline_pvt_tiny, not of inline_swin_tiny"):
        SEGMENTERS.build(SegmenterConfig(name="inline_swin_tiny", weights=str(file)), num_classes=3)


def test_a_detector_is_refused_as_a_classifier(file: Path) -> None:
    classifier = inline_attention.create_model("inline_pvt_tiny", **shrunk("inline_pvt_tiny"))
    for load in (load_model, partial(load_weights, classifier)):
        with pytest.raises(ValueError, match=r"holds a model for detection.*use it with `inline detect`"):
            load(str(file))


def test_stages_can_be_frozen_and_recomputed() -> None:
    model = MODELS.build(CONFIG, num_classes=3)
    frozen = freeze_layers(model, 2)
    assert all(name.startswith(("backbone.model.patch_embed", "backbone.model.stages.0")) for name in frozen)
    assert any(".stages.0." in name for name in frozen)
    target = {
        "boxes": torch.tensor([[4.0, 4.0, 40.0, 40.0]]),
        "labels": torch.tensor([1]),
        "masks": torch.ones(1, 64, 64, dtype=torch.uint8),
    }
    images, keys = torch.randn(1, 3, 64, 64), torch.tensor([5])
    gradients = []
    for recomputed in (False, True):
        model.backbone.set_grad_checkpointing(recomputed)
        model.eval().train()
        torch.manual_seed(0)  # of stochastic depth
        model.zero_grad()
        sum(model(images, None, [target], keys).values()).backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(list(model.parameters())) - len(frozen)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_weight_decay_spares_what_the_backbone_names() -> None:
    kwargs = {key: value for key, value in shrunk("softmax_swin_tiny").items() if key != "num_classes"}
    model = MODELS.build(DetectorConfig(name="softmax_swin_tiny", channels=32, kwargs=kwargs), num_classes=3)
    names = {name for name, _ in model.named_parameters()}
    assert model.no_weight_decay()
    assert model.no_weight_decay() <= names


@pytest.mark.parametrize("split", ["../other", "/etc", "", "C:/data"])
def test_a_file_cannot_lead_out_of_the_data(file: Path, split: str, tmp_path: Path) -> None:
    prepared = json.loads(read_metadata(file)["preprocessing"]) | {"val_split": split}
    metadata = read_metadata(file) | {"preprocessing": json.dumps(prepared)}
    save_file(load_file(file), tmp_path / "other.safetensors", metadata=metadata)
    with pytest.raises(ValueError, match=r"data.val_split is .*; expected the name of a folder inside data.path"):
        load_detector(str(tmp_path / "other.safetensors"))
