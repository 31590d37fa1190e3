"""Registered models as pyramids of feature maps."""

import math

import pytest
import timm
import torch
from small import DISTINCT, family_of, shrunk

from inline_attention.models.weights import save_weights
from inline_attention.tasks.dense.backbone import STRIDES, create_backbone


def small_backbone(name: str, **options: object):
    torch.manual_seed(0)
    kwargs = {key: value for key, value in shrunk(name).items() if key != "num_classes"}
    return create_backbone(name, kwargs=kwargs, **options).eval()


@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.parametrize("size", [(64, 96), (75, 130)], ids=["multiple", "odd"])
def test_maps_at_four_strides(name: str, size: tuple[int, int]) -> None:
    backbone = small_backbone(name)
    maps = backbone(torch.randn(2, 3, *size))
    grids = [[math.ceil(side / stride) for side in size] for stride in STRIDES]
    expected = [(2, channels, *grid) for channels, grid in zip(backbone.channels, grids, strict=True)]
    assert [tuple(y.shape) for y in maps] == expected


@pytest.mark.parametrize("name", ["inline_pvt_tiny", "softmax_pvt_tiny", "inline_swin_tiny", "inline_cswin_tiny"])
def test_maps_are_those_of_features_only(name: str) -> None:
    backbone = small_backbone(name)
    kwargs = {key: value for key, value in shrunk(name).items() if key != "num_classes"}
    theirs = timm.create_model(name, features_only=True, **kwargs).eval()
    theirs.model.load_state_dict(backbone.model.state_dict())
    x = torch.randn(1, 3, 64, 64)
    assert theirs.feature_info.channels() == list(backbone.channels)
    for ours, other in zip(backbone(x), theirs(x), strict=True):
        if family_of(name) == "pvt":
            assert torch.equal(ours, other)
        else:  # as initialised, the norm of each map is a plain one
            normed = torch.nn.functional.layer_norm(other.movedim(1, 3), (other.shape[1],)).movedim(3, 1)
            assert torch.allclose(ours, normed, atol=1e-5)


def test_every_parameter_is_used() -> None:
    """A parameter without a gradient would stop distributed training."""
    for name in DISTINCT:
        backbone = small_backbone(name)
        backbone.train()
        sum(y.square().mean() for y in backbone(torch.randn(2, 3, 64, 64))).backward()
        unused = [n for n, p in backbone.named_parameters() if p.grad is None]
        assert unused == [], name


def test_layer_groups_and_decay_follow_the_model() -> None:
    backbone = small_backbone("inline_deit_tiny")
    assert backbone.no_weight_decay() == {"model.pos_embed", "model.cls_token"}
    holder = torch.nn.Module()
    holder.body, holder.head = backbone, torch.nn.Linear(2, 2)
    groups = timm.models.group_parameters(holder, backbone.group_matcher(prefix="body"), reverse=True)
    assert groups["body.model.patch_embed.proj.weight"] == 0
    assert groups["body.model.blocks.1.norm1.weight"] == 2
    assert groups["head.weight"] == groups["body.pyramid.to_stride_8.weight"] == max(groups.values())


def test_classifier_weights_go_below_the_head(tmp_path) -> None:
    classifier = timm.create_model("inline_pvt_tiny", **shrunk("inline_pvt_tiny"))
    save_weights(classifier, tmp_path / "classifier.safetensors")
    backbone = small_backbone("inline_pvt_tiny", weights=str(tmp_path / "classifier.safetensors"))
    own = backbone.model.state_dict()
    assert own
    assert all(torch.equal(classifier.state_dict()[name], value) for name, value in own.items())


def test_names_that_are_no_backbones() -> None:
    with pytest.raises(ValueError, match="did you mean inline_swin_tiny"):
        create_backbone("inline_swin_tinny")
    with pytest.raises(ValueError, match="resnet18 is not a model of this library"):
        create_backbone("resnet18")


def test_patches_that_make_no_four_strides() -> None:
    with pytest.raises(ValueError, match=r"patches of 16 pixels.*this one has 4"):
        create_backbone("inline_deit_tiny", kwargs=dict(patch_size=4, depth=1, img_size=32))
