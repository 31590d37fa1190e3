"""Our attentions as the `attn_layer` of timm's vision transformers."""

import copy
import functools
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import timm
import timm.layers
import torch
from timm.models import vision_transformer
from timm.models.naflexvit import NaFlexVitCfg, batch_patchify
from torch import Tensor, nn

from inline_attention import InLineAttention, LinearAttention, SoftmaxAttention, create_model
from inline_attention.analysis import capture
from inline_attention.integrations.timm import partial, register
from inline_attention.layers import ATTENTIONS, FocusedAttention

SIZE = dict(embed_dim=24, depth=2, num_heads=2, num_classes=5)


def build(name: str = "vit_tiny_patch16_224", **kwargs: Any) -> Any:
    """A small model of timm in float64, all parameters random, so that no bias hides behind its zeros."""
    torch.manual_seed(0)
    options: dict[str, Any] = SIZE | (dict(img_size=(32, 80)) if "naflex" not in name else {}) | kwargs
    model = timm.create_model(name, **options).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def images(height: int = 32, width: int = 80, *, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, height, width, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("kind", ["inline", "linear", "mala", "rala", "polaformer", "tangent", "angular", "softmax"])
def test_the_model_is_our_own(kind: str) -> None:
    """timm's ViT with our attention computes what our DeiT computes, from the same weights."""
    options = dict(local_residual=True) if "local_residual" in ATTENTIONS[kind].follows else {}
    model = build(attn_layer=partial(ATTENTIONS[kind], **options))
    ours = create_model("inline_deit_tiny", attention=kind, img_size=(32, 80), **SIZE, **options).double().eval()
    ours.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(images()), ours(images()))


@pytest.mark.parametrize("residual", [True, False])
def test_analyses_know_the_map(residual: bool) -> None:
    """Written out, a layer inside timm's ViT is the layer of our DeiT, on the map of the patch embedding."""
    model = build(attn_layer=partial(InLineAttention, local_residual=residual))
    ours = create_model("inline_deit_tiny", img_size=(32, 80), **SIZE, local_residual=residual).double().eval()
    ours.load_state_dict(model.state_dict())
    for found, expected in zip(capture(model, images()), capture(ours, images()), strict=True):
        assert found.grid == expected.grid == (2, 5)
        torch.testing.assert_close(found.weights(), expected.weights())


def test_all_arguments_of_timm() -> None:
    """With softmax in the place of InLine, timm's own attention has the same parameters and the same output."""
    options = dict(qk_norm=True, scale_attn_norm=True, proj_bias=False, qkv_bias=False, class_token=False, reg_tokens=3)
    theirs = build(**options, global_pool="avg")
    ours = build(**options, global_pool="avg", attn_layer=SoftmaxAttention)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(images()), theirs(images()))


@pytest.mark.parametrize("kind", [kind for kind in ATTENTIONS if kind != "focused"])
def test_device_and_dtype(kind: str) -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", attn_layer=ATTENTIONS[kind], qk_norm=True, device="meta", dtype=torch.bfloat16, **SIZE
    )
    assert {(p.device.type, p.dtype) for p in model.parameters()} == {("meta", torch.bfloat16)}


@pytest.mark.parametrize("kind", ["rala", "tangent"])
def test_the_mean_of_normed_queries(kind: str) -> None:
    """This is not the normed query of the mean token. The matrix form takes the mean of the queries themselves."""
    torch.manual_seed(0)
    module = ATTENTIONS[kind](24, 2, qk_norm=True, norm_layer=nn.LayerNorm).double()
    x = torch.randn(2, 6, 24, dtype=torch.float64)
    written = module.write_out(x, (2, 3))
    attended = written.matrix(slice(None), slice(None), slice(None), None) @ written.v.transpose(1, 2)
    torch.testing.assert_close(module(x, (2, 3)), written.finish(attended.transpose(1, 2), torch.zeros_like(written.v)))


def test_the_grid_is_that_of_every_call() -> None:
    """Two maps of ten tokens each: transposing an image must not give the same output as keeping the old grid."""
    model = build(attn_layer=InLineAttention, dynamic_img_size=True)
    wide, tall = images(), images().mT
    outs = [model(wide), model(tall), model(wide)]
    assert torch.equal(outs[0], outs[2])
    assert model.blocks[0].attn.model_grid.grid == (2, 5)
    model(tall)
    assert model.blocks[0].attn.model_grid.grid == (5, 2)
    assert len(model.forward_intermediates(wide, intermediates_only=True)) == 2


def test_copies_have_a_grid_of_their_own() -> None:
    model = build(attn_layer=InLineAttention, dynamic_img_size=True)
    expected = model(images())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(images()), expected)
        other(images(80, 32))
        assert other.blocks[1].attn.model_grid.grid == (5, 2)
        assert model.blocks[1].attn.model_grid.grid == (2, 5)


def test_a_copy_of_one_block_is_not_a_copy_of_the_model() -> None:
    block = build(attn_layer=InLineAttention, embed_dim=48).blocks[0]
    assert len(pickle.dumps(block)) < 1.5 * sum(parameter.nbytes for parameter in block.parameters())


def test_prefix_tokens_that_are_added_later() -> None:
    """A distilled DeiT has two, and sets their number after it has built its blocks."""
    model = build("deit_tiny_distilled_patch16_224", attn_layer=InLineAttention)
    model(images())
    assert [block.attn.num_prefix_tokens for block in model.blocks] == [2, 2]


def test_beside_another_global_hook() -> None:
    """PyTorch calls both for each module that gets a child: ours first, because the first attention is built before."""
    calls: list[str] = []
    InLineAttention(24, 2, norm_layer=nn.LayerNorm)
    handle = nn.modules.module.register_module_module_registration_hook(lambda parent, name, child: calls.append(name))
    try:
        model = build(attn_layer=InLineAttention)
    finally:
        handle.remove()
    assert "blocks" in calls
    assert model.blocks[0].attn.model_grid.grid is None  # it is connected, and not called yet


def test_training_with_checkpoints() -> None:
    model = build(attn_layer=InLineAttention).train()
    model.set_grad_checkpointing()
    model(images()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_compiled_and_exported() -> None:
    model = build(attn_layer=InLineAttention)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(images()), model(images()))
    program = torch.export.export(model, (images(),))
    torch.testing.assert_close(program.module()(images()), model(images()))


@pytest.mark.parametrize("additive", [False, True])
def test_masks_over_keys(additive: bool) -> None:
    """The result is the same as without the masked tokens."""
    model = build(attn_layer=partial(InLineAttention, local_residual=False), pos_embed="none", class_token=False,
                  global_pool="")  # fmt: skip
    mask = torch.ones(1, 1, 1, 10, dtype=torch.bool)
    mask[..., 5:] = False  # the second row of patches
    given = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -torch.inf) if additive else mask
    out = model.forward_features(images(), attn_mask=given)[:, :5]
    model.set_input_size((16, 80))
    torch.testing.assert_close(out, model.forward_features(images()[:, :, :16]))


def test_masks_over_pairs_are_refused() -> None:
    model = build(attn_layer=InLineAttention)
    message = r"attn_mask has shape \(2, 1, 11, 11\) and dtype torch.bool; a linear attention takes a mask over keys"
    with pytest.raises(ValueError, match=message):
        model.forward_features(images(), attn_mask=torch.ones(2, 1, 11, 11, dtype=torch.bool))
    with pytest.raises(ValueError, match="cannot be causal"):
        model.forward_features(images(), is_causal=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(attn_drop_rate=0.1), "attn_drop=0.1 drops single weights"),
        (dict(patch_drop_rate=0.5), "VisionTransformer drops patches in training"),
    ],
)
def test_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(attn_layer=InLineAttention, **options)


def test_patches_may_be_dropped_without_a_residual() -> None:
    model = build(attn_layer=LinearAttention, patch_drop_rate=0.5).train()
    assert model(images()).shape == (2, 5)


def test_an_attention_outside_a_model_needs_a_grid() -> None:
    module = InLineAttention(24, 2, norm_layer=nn.LayerNorm)
    with pytest.raises(ValueError, match=r"grid is missing: pass grid=\(height, width\)"):
        module(torch.randn(1, 6, 24))
    assert LinearAttention(24, 2)(torch.randn(1, 6, 24)).shape == (1, 6, 24)


def test_options_through_partial() -> None:
    model = build(attn_layer=partial(InLineAttention, feature_map="relu", local_residual=False))
    assert [(b.attn.feature_map, b.attn.local) for b in model.blocks] == [("relu", None)] * 2
    model = build(attn_layer=partial(FocusedAttention, grid=(2, 5), num_prefix_tokens=1))
    assert model(images()).isfinite().all()
    model = build(attn_layer=timm.layers.Attention)  # timm's own is as it was
    assert type(model.blocks[0].attn) is timm.layers.Attention


@pytest.fixture
def registered() -> Iterator[None]:
    before = dict(vision_transformer.ATTN_LAYERS)
    register()
    yield
    vision_transformer.ATTN_LAYERS.clear()
    vision_transformer.ATTN_LAYERS.update(before)


@pytest.mark.usefixtures("registered")
def test_by_name() -> None:
    assert isinstance(build(attn_layer="mala").blocks[0].attn, ATTENTIONS["mala"])
    assert type(build(attn_layer="attn").blocks[0].attn) is timm.layers.Attention


# NaFlexVit: images of different sizes in one batch.

masks_keys = pytest.mark.skipif(
    not hasattr(NaFlexVitCfg, "use_key_only_attn_mask"), reason="this timm's NaFlexVit makes masks over pairs alone"
)


def patches_of(*pictures: Tensor) -> dict[str, Tensor]:
    """What timm's collation makes of images (3, H, W)."""
    patches, coordinates = [], []
    for picture in pictures:
        rows, (height, width) = batch_patchify(picture[None], (16, 16))
        patches.append(rows[0])
        coordinates.append(torch.cartesian_prod(torch.arange(height), torch.arange(width)))
    pad = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
    valid = pad([torch.ones(len(rows), dtype=torch.bool) for rows in patches])
    return dict(patches=pad(patches), patch_coord=pad(coordinates), patch_valid=valid)


@masks_keys
@pytest.mark.parametrize("kind", ["inline", "linear", "mala", "tangent", "rala", "enhanced"])
@pytest.mark.parametrize("local_residual", [False, True])
def test_images_of_different_sizes(kind: str, local_residual: bool) -> None:
    """Every image of a batch gets what it gets alone."""
    layer = partial(ATTENTIONS[kind], local_residual=local_residual)
    model = build("naflexvit_base_patch16_gap", attn_layer=layer, use_key_only_attn_mask=True, reg_tokens=2)
    pictures = [images(32, 80)[0], images(64, 48)[1], images(16, 16)[0]]
    alone = torch.cat([model(picture[None]) for picture in pictures])
    torch.testing.assert_close(model(patches_of(*pictures)), alone)


@masks_keys
def test_naflex_gradients() -> None:
    model = build("naflexvit_base_patch16_gap", attn_layer=InLineAttention, use_key_only_attn_mask=True)
    pictures = [images(32, 80)[0], images(64, 48)[1]]
    model(patches_of(*pictures)).sum().backward()
    together = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    sum(model(picture[None]).sum() for picture in pictures).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(together[name], parameter.grad, msg=name)


def test_naflex_masks_of_pairs_are_refused() -> None:
    model = build("naflexvit_base_patch16_gap", attn_layer=InLineAttention)
    with pytest.raises(ValueError, match="pass use_key_only_attn_mask=True"):
        model(patches_of(images(32, 80)[0], images(64, 48)[1]))


def test_naflex_patches_that_are_no_map() -> None:
    model = build("naflexvit_base_patch16_gap", attn_layer=InLineAttention, use_key_only_attn_mask=True)
    batch = patches_of(images(32, 80)[0], images(64, 48)[1])
    batch["patch_coord"][1] = batch["patch_coord"][1].flip(0)
    with pytest.raises(ValueError, match="the patches of image 1 are not a map of 4×3 row by row"):
        model(batch)
