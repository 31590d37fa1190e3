"""Models in the folders of the Hugging Face hub, as timm and transformers open them."""

import json

import pytest
import timm
import torch
from small import DISTINCT, create_small, image

from inline_attention.models.hub import hf_arguments

CLASSES = ["ant", "bee", "cat", "dog", "eel"]


@pytest.mark.parametrize("name", DISTINCT)
def test_timm_opens_the_folder(tmp_path, name):
    model = create_small(name, global_pool="avg", img_size=(64, 96))
    timm.models.save_for_hf(model, tmp_path / "saved", **hf_arguments(model, class_names=CLASSES))
    loaded = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()
    x = image(64, 96)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    assert tuple(loaded.pretrained_cfg["input_size"]) == (3, 64, 96)


def test_what_the_folder_says(tmp_path):
    model = create_small("inline_deit_tiny")
    model.reset_classifier(2)
    arguments = hf_arguments(model, class_names=["a", "b"], preprocessing={"mean": (0.5, 0.5, 0.5)})
    timm.models.save_for_hf(model, tmp_path, **arguments)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architecture"] == "inline_deit_tiny"
    assert config["num_classes"] == config["pretrained_cfg"]["num_classes"] == 2
    assert config["label_names"] == ["a", "b"]
    assert "num_classes" not in config["model_args"]  # transformers passes it besides
    assert config["pretrained_cfg"]["mean"] == [0.5, 0.5, 0.5]
    assert "file" not in config["pretrained_cfg"]


def test_models_that_cannot_be_described():
    model = create_small("inline_cswin_tiny")
    model.prune_intermediate_layers([1])
    with pytest.raises(ValueError, match="changed since it was built"):
        hf_arguments(model)
    with pytest.raises(ValueError, match="2 class names for the 5 classes"):
        hf_arguments(create_small("inline_cswin_tiny"), class_names=["a", "b"])


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_swin_tiny"])
def test_transformers_opens_the_folder(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    model = create_small(name)
    timm.models.save_for_hf(model, tmp_path, **hf_arguments(model, class_names=CLASSES))
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert loaded.config.id2label == dict(enumerate(CLASSES))
    with torch.no_grad():
        assert torch.equal(loaded(pixel_values=image()).logits, model(image()))
