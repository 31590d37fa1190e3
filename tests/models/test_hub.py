"""Models in the folders of the Hugging Face hub, as timm and transformers open them."""

import json

import pytest
import timm
import torch
from PIL import Image
from small import DISTINCT, create_small, image

from inline_attention import linearize
from inline_attention.export import export_model
from inline_attention.models.hub import hf_arguments, save_for_hf

CLASSES = ["ant", "bee", "cat", "dog", "eel"]


@pytest.mark.parametrize("name", DISTINCT)
def test_timm_opens_the_folder(tmp_path, name):
    model = create_small(name, global_pool="avg", img_size=(64, 96))
    save_for_hf(model, tmp_path / "saved", class_names=CLASSES)
    loaded = timm.create_model(f"local-dir:{tmp_path / 'saved'}", pretrained=True).eval()
    x = image(64, 96)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    assert tuple(loaded.pretrained_cfg["input_size"]) == (3, 64, 96)


def test_what_the_folder_says(tmp_path):
    model = create_small("inline_deit_tiny")
    model.reset_classifier(2)
    save_for_hf(model, tmp_path, class_names=["a", "b"], preprocessing={"mean": (0.5, 0.5, 0.5)})
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
    student = create_small("softmax_pvt_tiny")
    linearize(student, local_residual=False)  # its weights would fit the model of softmax
    with pytest.raises(ValueError, match="was linearised"):
        hf_arguments(student)
    with pytest.raises(ValueError, match="2 class names for the 5 classes"):
        hf_arguments(create_small("inline_cswin_tiny"), class_names=["a", "b"])


@pytest.fixture
def transformers():
    return pytest.importorskip("transformers", reason="transformers is not installed")


def write_folder(folder, name="inline_swin_tiny"):
    model = create_small(name)
    export_model(model, folder, format="hf", class_names=CLASSES, preprocessing=dict(mean=(0.5, 0.25, 0.125)))
    return model


@pytest.mark.parametrize("name", ["inline_deit_tiny", "inline_swin_tiny"])
def test_transformers_opens_the_folder(tmp_path, transformers, name):
    model = write_folder(tmp_path, name)
    loaded = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert loaded.config.id2label == dict(enumerate(CLASSES))
    assert loaded.config.label2id["cat"] == 2
    with torch.no_grad():
        assert torch.equal(loaded(pixel_values=image()).logits, model(image()))


@pytest.mark.slow
def test_a_pipeline_names_the_classes(tmp_path, transformers):
    """And prepares the photograph as the folder says."""
    model = write_folder(tmp_path)
    pixels = (255 * torch.rand(80, 100, 3, generator=torch.Generator().manual_seed(0))).byte().numpy()
    photograph = Image.fromarray(pixels)
    pipeline = transformers.pipeline("image-classification", model=str(tmp_path))
    answers = {answer["label"]: answer["score"] for answer in pipeline(photograph, top_k=5)}
    config = timm.data.resolve_model_data_config(timm.create_model(f"local-dir:{tmp_path}"))
    assert tuple(config["mean"]) == (0.5, 0.25, 0.125)
    x = timm.data.create_transform(**config)(photograph)[None]
    with torch.no_grad():
        expected = model(x).softmax(-1)[0]
    assert set(answers) == set(CLASSES)
    torch.testing.assert_close(torch.tensor([answers[name] for name in CLASSES]), expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_trainer_trains_it_and_saves_a_folder_for_both(tmp_path, transformers):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate, which is not installed")
    write_folder(tmp_path / "folder")
    model = transformers.AutoModelForImageClassification.from_pretrained(
        tmp_path / "folder", num_labels=3, ignore_mismatched_sizes=True
    )
    before = model.timm_model.head.weight.detach().clone()
    assert before.shape[0] == 3
    samples = [{"pixel_values": x, "labels": i % 3} for i, x in enumerate(image(batch=6))]
    arguments = transformers.TrainingArguments(
        tmp_path / "run", max_steps=2, per_device_train_batch_size=3, report_to=[], use_cpu=True, save_strategy="no"
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=samples)
    trainer.train()
    assert not torch.equal(model.timm_model.head.weight, before)
    trainer.save_model(tmp_path / "trained")
    again = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "trained").eval()
    in_timm = timm.create_model(f"local-dir:{tmp_path / 'trained'}", pretrained=True).eval()
    with torch.no_grad():
        expected = model.eval()(pixel_values=image()).logits
        torch.testing.assert_close(again(pixel_values=image()).logits, expected)
        torch.testing.assert_close(in_timm(image()), expected)


@pytest.mark.slow
def test_backbones_of_transformers(tmp_path, transformers):
    model = write_folder(tmp_path)
    source = f"local-dir:{tmp_path}"
    config = transformers.TimmBackboneConfig(backbone=source, out_indices=(0, 1, 2, 3))
    auto = transformers.AutoBackbone.from_config(config, pretrained=True).eval()
    direct = transformers.TimmBackbone.from_pretrained(source, out_indices=(0, 1, 2, 3)).eval()
    with torch.no_grad():
        expected = model.forward_intermediates(image(), intermediates_only=True)
        for backbone in (auto, direct):
            for ours, theirs in zip(expected, backbone(image()).feature_maps, strict=True):
                torch.testing.assert_close(theirs, ours)
    assert auto.channels == [8, 16, 32, 64]
