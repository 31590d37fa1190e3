"""A linearised attention written out is what the converted module computes, in float64 up to rounding."""

from typing import Any

import pytest
import torch
from linearize_cases import CASES
from torch import Tensor, nn

from inline_attention import linearize
from inline_attention.analysis import LayerAttention, capture, layer_names, observe
from inline_attention.analysis.hooks import attention_kinds
from inline_attention.linearize import FORMS, LinearizedAttention
from inline_attention.linearize.convert import add_gains, linearized_modules

OF_NAME = {case.name: case for case in CASES}
VIT, DEIT, TORCHVISION = "vit_tiny_patch16_224", "softmax_deit_tiny", "torchvision vit"
ON_ONE_MAP = [
    VIT,
    "vit with norms",
    "vit_small_patch14_reg4_dinov2",
    "eva02_tiny_patch14_224",
    TORCHVISION,
    DEIT,
    "mapped softmax",
]
ROUNDING = 1e-12  # relative, in float64


def student(name: str, *, gains: bool = True, **options: Any) -> Any:
    """Local residuals and gains as training could leave them; as converted they would be zero and one."""
    model = OF_NAME[name].model
    linearize(model, **options)
    if gains:
        add_gains(model)
    torch.manual_seed(2)
    with torch.no_grad():
        for module in linearized_modules(model).values():
            if module.local is not None:
                nn.init.normal_(module.local.fc2.weight, std=0.3)
                nn.init.normal_(module.local.fc2.bias, std=0.3)
            if module.gain is not None:
                nn.init.uniform_(module.gain, 0.3, 1.7)
    return model


def check(model: nn.Module, images: Tensor, *, kind: str) -> None:
    records = capture(model, images)
    assert [record.name for record in records] == list(linearized_modules(model))
    for record in records:
        assert record.kind == kind
        assert record.error() < ROUNDING, record.name


@pytest.mark.parametrize("name", ON_ONE_MAP)
def test_matrix_is_the_module(name: str) -> None:
    check(student(name), OF_NAME[name].images(len(OF_NAME[name].sizes) - 1), kind="tangent")


@pytest.mark.parametrize("gains", [True, False], ids=["gains", "plain"])
@pytest.mark.parametrize("name", [VIT, "vit_small_patch14_reg4_dinov2", DEIT])
def test_several_anchors(name: str, gains: bool) -> None:
    check(student(name, anchors=3, gains=gains), OF_NAME[name].images(1), kind="tangent")


@pytest.mark.parametrize("gains", [True, False], ids=["gains", "plain"])
@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("name", [VIT, DEIT])
def test_every_form(name: str, attention: str, gains: bool) -> None:
    check(student(name, attention=attention, gains=gains), OF_NAME[name].images(), kind=attention)


@pytest.mark.parametrize("name", [VIT, DEIT])
def test_without_a_residual(name: str) -> None:
    """timm's modules are not told the map; that of the model stands in."""
    model = student(name, local_residual=False)
    check(model, OF_NAME[name].images(1), kind="tangent")
    record = capture(model, OF_NAME[name].images(1), layers=[0])[0]
    assert not record.local
    assert record.num_prefix_tokens + record.grid[0] * record.grid[1] == record.q.shape[1]


def test_weights_of_the_tangent_by_hand() -> None:
    record = capture(student(VIT, gains=False), OF_NAME[VIT].images(), layers=[0])[0]
    q, k = record.q[1, :, 0], record.k[1, :, 0]
    s, a = q.shape[1] ** -0.5, q.mean(0)
    p = (s * k @ a).softmax(0)
    expected = p * (1 + s * (q - a) @ (k - p @ k).T)
    torch.testing.assert_close(record.weights()[1, 0], expected)
    assert (expected < 0).any()  # unlike softmax's


@pytest.mark.parametrize(("attention", "anchors"), [*((form, 1) for form in FORMS), ("tangent", 3)])
def test_unseen_tokens_are_as_if_absent(attention: str, anchors: int) -> None:
    """A row over some of the tokens is that of the attention among them."""
    model = student(DEIT, attention=attention, anchors=anchors)
    record = capture(model, OF_NAME[DEIT].images(), layers=[1])[0]
    module = linearized_modules(model)[record.name]
    seen = torch.arange(record.q.shape[1]) % 3 != 1
    weights = record.weights(mask=seen[None, None, None])
    assert (weights[..., ~seen] == 0).all()
    few = {"rows": slice(None), "mask": None, "scale": module.scale, "gain": module.gain}
    expected = module.rows_of_weights(record.q[:, seen], record.k[:, seen], **few)  # type: ignore[arg-type]
    torch.testing.assert_close(weights[:, :, seen][..., seen], expected)


@torch.no_grad()
@pytest.mark.parametrize(("attention", "anchors"), [("tangent", 1), ("tangent", 3), ("linear", 1)])
def test_a_mask_of_tokens(attention: str, anchors: int) -> None:
    model = student(DEIT, attention=attention, anchors=anchors)
    attn = model.blocks[0].attn
    x = torch.randn(2, 17, attn.proj.in_features, dtype=torch.float64)
    mask = torch.rand(2, 17) < 0.7
    written = attn.write_out(x, (4, 4), token_mask=mask)
    record = LayerAttention(**vars(written), name="attn", output=attn(x, (4, 4), token_mask=mask))
    assert record.error() < ROUNDING


def test_layers_that_stayed_softmax() -> None:
    model = student(VIT, keep_softmax=[-1])
    assert layer_names(model) == ["blocks.0.attn", "blocks.1.attn"]
    assert attention_kinds(model) == ["tangent", "softmax"]
    records = capture(model, OF_NAME[VIT].images())
    assert [record.kind for record in records] == ["tangent", "softmax"]
    assert all(record.error() < ROUNDING for record in records)


@pytest.mark.parametrize("name", [VIT, TORCHVISION])
def test_the_output_can_be_replaced(name: str) -> None:
    """Also where a module returns more than its output. The observer of a module is given back."""
    model, images = student(name), OF_NAME[name].images()
    with torch.no_grad():
        expected = model(images)
    torch.testing.assert_close(observe(model, images, lambda record: record.recompute_output()), expected)
    changed = observe(model, images, lambda record: torch.zeros_like(record.output))
    assert not torch.allclose(changed, expected)
    assert all(module.observer is None for module in model.modules() if isinstance(module, LinearizedAttention))


def fitting_images(name: str) -> Tensor:
    """Images of a size that needs no padding of timm's windows, and of another shape elsewhere."""
    return OF_NAME[name].images(0 if name.startswith("swin_") else 1)


PYRAMIDS = ["swin_tiny_patch4_window7_224", "pvt_v2_b0", "softmax_swin_tiny", "softmax_pvt_tiny"]


@pytest.mark.parametrize(
    ("attention", "anchors", "gains"),
    [("tangent", 1, True), ("tangent", 3, True), ("inline", 1, False), ("linear", 1, False)],
)
@pytest.mark.parametrize("name", PYRAMIDS)
def test_windows_biases_and_reduced_keys(name: str, attention: str, anchors: int, gains: bool) -> None:
    """Shifted windows too: their regions attend separately, and so do the residuals."""
    model, images = student(name, attention=attention, anchors=anchors, gains=gains), fitting_images(name)
    check(model, images, kind=attention)
    records = capture(model, images)
    if "swin" in name:
        assert any(record.windows is not None for record in records)
        assert any(term.sample_regions is not None for record in records for term in record.local)
    else:
        assert any(record.key_grid is not None for record in records)
    for record in records:
        row = record.row(1, (0, 1))
        assert row.shape[1:] == (record.key_grid or record.map_grid)
        if attention != "linear":  # a query whose φ is zero has no weights
            torch.testing.assert_close(row.nansum((1, 2)), torch.ones_like(row[:, 0, 0]))


@pytest.mark.parametrize("attention", FORMS)
@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "softmax_swin_tiny"])
def test_windows_with_gains_and_no_residual(name: str, attention: str) -> None:
    check(student(name, attention=attention, local_residual=False), fitting_images(name), kind=attention)


@pytest.mark.parametrize("name", ["pvt_v2_b0", "softmax_pvt_tiny"])
def test_gains_with_reduced_keys(name: str) -> None:
    check(student(name, attention="inline"), OF_NAME[name].images(1), kind="inline")


REFUSED = ["davit_tiny", "tnt_s_patch16_224", "SHViT", "levit_128", "swinv2_tiny_window8_256", "softmax_cswin_tiny"]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    """Windows that are cut inside a module, stripes, maps (B, C, height, width), and tokens of unknown places."""
    with pytest.raises(ValueError, match=r"attn.*: a linearised \w+ is not written out in this case; analyse"):
        capture(student(name, gains=False), OF_NAME[name].images())


def test_gains_of_a_residual_in_regions_are_refused() -> None:
    """Each region would have a mean of its own, whose residual the gain removes."""
    with pytest.raises(ValueError, match=r"layers.0.blocks.1.attn: a linearised WindowAttention is not written"):
        capture(
            student("swin_tiny_patch4_window7_224", attention="inline"), fitting_images("swin_tiny_patch4_window7_224")
        )


def test_a_map_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match="does not know its token map; convert the model with local_residual=True"):
        capture(student(TORCHVISION, local_residual=False), OF_NAME[TORCHVISION].images())
