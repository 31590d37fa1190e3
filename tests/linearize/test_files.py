"""A weights file of a linearised model says how to build it again, and nothing that it says is executed."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from linearize_cases import CASES, MORE, TIMM, Case
from safetensors.torch import save_file
from timm.layers import LayerNorm

import inline_attention
from inline_attention.linearize import calibrate, linearize
from inline_attention.models.weights import WeightsError

OF_NAME = {case.name: case for case in CASES}
OWN = ("deit", "pvt", "swin", "cswin")


@pytest.mark.parametrize(
    "case",
    [*TIMM, *(c for c in MORE if c.arguments), *(OF_NAME[f"softmax_{name}_tiny"] for name in OWN)],
    ids=lambda c: c.name,
)
def test_load_model_builds_what_was_saved(case: Case, tmp_path: Path) -> None:
    model, images = case.model.float(), case.images().float()
    linearize(model, anchors=2, arguments=case.arguments, keep_softmax=[0] if case.converted > 1 else None)
    calibrate(model, images)
    for name, parameter in model.named_parameters():
        if "local" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    path = inline_attention.save_weights(model, tmp_path / "linear.safetensors")
    loaded = inline_attention.load_model(path).eval()
    assert type(loaded) is type(model)
    with torch.no_grad():
        for size in range(len(case.sizes)):
            images = case.images(size).float()
            assert torch.equal(loaded(images), model(images))


@pytest.mark.filterwarnings("ignore:the file will not say")
def test_a_model_of_torchvision_is_saved_and_loaded_into_another(tmp_path: Path) -> None:
    """Nothing in the file can build it, so the model is given."""
    case = OF_NAME["torchvision vit"]
    model, twin = case.model.float(), case.model.float()
    for built in (model, twin):
        linearize(built, anchors=2, keep_softmax=[0])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    images = case.images().float()
    path = inline_attention.save_weights(model, tmp_path / "linear.safetensors")
    with torch.no_grad():
        expected = model(images)
        assert not torch.equal(twin(images), expected)
        assert torch.equal(inline_attention.load_model(path, model=twin)(images), expected)
    with pytest.raises(WeightsError, match="does not say how to build it"):
        inline_attention.load_model(path)


def test_a_model_whose_arguments_are_not_known_is_saved_with_a_warning(tmp_path: Path) -> None:
    case = OF_NAME["vit_tiny_patch16_224"]
    model = case.model
    linearize(model)
    with pytest.warns(UserWarning, match="will not say how to build this vit_tiny_patch16_224"):
        path = inline_attention.save_weights(model, tmp_path / "linear.safetensors")
    twin = case.model
    linearize(twin)
    inline_attention.load_model(path, model=twin)
    assert all(torch.equal(value, twin.state_dict()[name]) for name, value in model.state_dict().items())


SMALL: dict[str, Any] = dict(depth=1, embed_dim=48, img_size=32)


@pytest.mark.parametrize(
    ("name", "arguments", "other", "message"),
    [
        ("vit_tiny_patch16_224", dict(num_heads=3), dict(num_heads=6), "blocks.0.attn.num_heads would be 3 and not 6"),
        ("vit_tiny_patch16_224", {}, dict(act_layer="relu"), "mlp.act would be .*GELU and not .*ReLU"),
        ("vit_tiny_patch16_224", {}, dict(norm_layer=partial(LayerNorm, eps=1e-3)), "eps would be 1e-06"),
        (
            "vit_tiny_patch16_224",
            dict(global_pool="avg"),
            dict(pool_include_prefix=True),
            "pool_include_prefix would be False",
        ),
        ("vit_small_patch16_dinov3", dict(num_heads=6), dict(num_heads=12), "rope.dim would be 8 and not 4"),
    ],
)
@pytest.mark.parametrize("local_residual", [False, True])
def test_a_file_never_names_another_model(
    name: str, arguments: dict[str, Any], other: dict[str, Any], message: str, local_residual: bool, tmp_path: Path
) -> None:
    """The weights of these models have the shapes of the model that is named, and their outputs differ."""
    model = timm.create_model(name, **{**SMALL, **arguments, **other})
    linearize(model, local_residual=local_residual, arguments={**SMALL, **arguments})
    with pytest.warns(UserWarning, match=message):
        path = inline_attention.save_weights(model, tmp_path / "linear.safetensors")
    assert "architecture" not in inline_attention.models.weights.read_metadata(path)


@pytest.mark.parametrize("local_residual", [False, True])
def test_a_file_that_names_no_model_is_not_guessed(local_residual: bool, tmp_path: Path) -> None:
    """With the residual it has the shapes of inline_deit_tiny, without it those of the softmax model."""
    model = timm.create_model("vit_tiny_patch16_224", num_heads=6)
    linearize(model, local_residual=local_residual)
    with pytest.warns(UserWarning, match="num_heads would be 3 and not 6"):
        path = inline_attention.save_weights(model, tmp_path / "linear.safetensors")
    for name in (None, "vit_tiny_patch16_224"):
        with pytest.raises(WeightsError, match="holds a linearised model and does not say how to build it"):
            inline_attention.models.weights.open_model(name, str(path))
    twin = timm.create_model("vit_tiny_patch16_224", num_heads=6)
    linearize(twin, local_residual=local_residual)
    inline_attention.load_model(path, model=twin)
    images = torch.randn(1, 3, 224, 224)
    assert torch.equal(twin.eval()(images), model.eval()(images))


def test_a_model_whose_patch_embedding_has_other_attributes_is_saved(tmp_path: Path) -> None:
    model = timm.create_model("pit_ti_224", num_classes=5)
    linearize(model, local_residual=False)
    path = inline_attention.save_weights(model, tmp_path / "linear.safetensors")
    said = json.loads(inline_attention.models.weights.read_metadata(path)["config"])
    assert said == dict(num_classes=5)


def test_dropout_alone_does_not_make_another_model(tmp_path: Path) -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", **SMALL, drop_rate=0.1, drop_path_rate=0.1, proj_drop_rate=0.1, attn_drop_rate=0.1
    )
    model.set_grad_checkpointing(True)
    linearize(model, arguments=SMALL)
    path = inline_attention.save_weights(model, tmp_path / "linear.safetensors")
    assert "architecture" in inline_attention.models.weights.read_metadata(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(architecture="hf-hub:someone/model"), "neither this library nor timm has"),
        (dict(architecture="no_such_model"), "neither this library nor timm has"),
        (dict(config=json.dumps(dict(checkpoint_path="/etc/passwd"))), "not an argument of a model"),
        (dict(config=json.dumps(dict(attn_layer="diff"))), "attn_layer"),
        (dict(config=json.dumps(dict(depth=60000))), "cannot be built"),
        (dict(linearize=json.dumps(dict(model="x"))), "gives model="),
        (dict(linearize=json.dumps(dict(attention="tangent", images="x"))), "not one of"),
        (dict(linearize=json.dumps(dict(attention="flash"))), "cannot be built"),
        (dict(linearize="{"), "not JSON"),
        (dict(linearize=None), "does not fit the model"),
    ],
)
def test_a_hostile_file_is_refused(changes: dict[str, str | None], message: str, tmp_path: Path) -> None:
    options = dict(attention="tangent", feature_map="identity", local_residual=True, keep_softmax=[], gains=False)
    metadata = dict(
        library="inline_attention 0", architecture="vit_tiny_patch16_224", config="{}", linearize=json.dumps(options)
    )
    kept = {key: value for key, value in (metadata | changes).items() if value is not None}
    save_file({"head.bias": torch.zeros(1000)}, tmp_path / "bad.safetensors", metadata=kept)
    with pytest.raises(WeightsError, match=message):
        inline_attention.load_model(tmp_path / "bad.safetensors")


def test_the_whole_of_timms_arguments_is_found_for_a_registered_size(tmp_path: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", num_classes=7, img_size=(32, 64), global_pool="avg")
    linearize(model)
    path = inline_attention.save_weights(model, tmp_path / "linear.safetensors")
    said = json.loads(inline_attention.models.weights.read_metadata(path)["config"])
    assert said == dict(num_classes=7, img_size=[32, 64], global_pool="avg")
    loaded = inline_attention.load_model(path)
    images = torch.randn(1, 3, 32, 64)
    assert torch.equal(loaded.eval()(images), model.eval()(images))
