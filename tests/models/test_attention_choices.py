"""Every family with every attention, and windows against loops over them."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from small import FAMILIES, create_small, image, shrunk
from torch import Tensor
from window_oracle import members

import inline_attention
from inline_attention import InLineAttention, SoftmaxAttention
from inline_attention.layers import ATTENTIONS, Attention
from inline_attention.layers.registry import LETTERS
from inline_attention.models.cswin import StripeAttention
from inline_attention.models.swin import SwinBlock, WindowSoftmaxAttention
from inline_attention.models.weights import load_model, load_weights, save_weights
from inline_attention.ops.projections import unstack

every_family = pytest.mark.parametrize("family", FAMILIES)


def attentions(model: torch.nn.Module) -> list[Attention]:
    return [m for m in model.modules() if isinstance(m, Attention)]


def check_training(model: Any) -> None:
    out = model.train()(image(48, 80))
    out.square().sum().backward()
    assert out.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@every_family
@pytest.mark.parametrize("kind", sorted(ATTENTIONS))
def test_by_name(family: str, kind: str) -> None:
    model = create_small(f"inline_{family}_tiny", attention=kind)
    # Families have softmax attentions of their own.
    expected = SoftmaxAttention if "softmax" in kind else ATTENTIONS[kind]
    assert all(isinstance(attn, expected) and attn.kind == kind for attn in attentions(model))
    check_training(model)


@every_family
@pytest.mark.parametrize(("letter", "kind"), LETTERS.items())
def test_by_letter(family: str, letter: str, kind: str) -> None:
    name = f"inline_{family}_tiny"
    model = create_small(name, attention=letter * (1 if family == "deit" else 4))
    assert torch.equal(model(image()), create_small(name, attention=kind)(image()))


@pytest.mark.parametrize("kind", ATTENTIONS)
def test_weights_drawn_after_the_meta_device(kind: str) -> None:
    """`to_empty` leaves any value in memory; `init_weights` replaces all of them."""
    with torch.device("meta"):
        model = inline_attention.create_model("inline_deit_tiny", **shrunk("inline_deit_tiny", attention=kind))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    model.init_weights()
    assert not [name for name, parameter in model.named_parameters() if not parameter.isfinite().all()]


@every_family
def test_softmax_behind_a_map(family: str) -> None:
    """φ before softmax changes the output if it changes q or k, in windows, stripes and reduced maps too."""
    name = f"inline_{family}_tiny"
    plain, mapped, none = (
        create_small(name, attention=kind, feature_map=phi)
        for kind, phi in (("softmax", "relu"), ("mapped_softmax", None), ("mapped_softmax", "identity"))
    )
    with torch.no_grad():
        assert torch.equal(plain(image()), none(image()))  # softmax itself does not follow the feature map
        assert not torch.allclose(plain(image()), mapped(image()))
    check_training(create_small(name, attention="mapped_softmax", feature_map="relu_affine"))


@every_family
def test_learned_positions_fit_the_input_size(family: str, tmp_path: Path) -> None:
    """Focused attention at another size: resized, saved, loaded back, and loaded into a model of the old size."""
    model = create_small(f"inline_{family}_tiny", attention="focused")
    small_image = image(64, 32)
    with torch.no_grad():
        before = model(small_image)
        model.set_input_size((64, 32))
        torch.testing.assert_close(model(small_image), before, atol=1e-4, rtol=1e-4)
        path = save_weights(model, tmp_path / "focused.safetensors")
        torch.testing.assert_close(load_model(path).eval()(small_image), model(small_image))
        load_weights(create_small(f"inline_{family}_tiny", attention="focused"), path)


@every_family
def test_first_blocks_inline_then_softmax(family: str) -> None:
    spec: Any = "inline:1" if family == "deit" else ("inline", "linear", "inline:1", "softmax")
    model = create_small(f"inline_{family}_tiny", attention=spec)
    stage = model.blocks if family == "deit" else model.stages[2].blocks
    kinds = [type(block.attn) for block in stage]
    assert kinds[0] is InLineAttention
    assert all(issubclass(kind, SoftmaxAttention) for kind in kinds[1:])
    assert len(kinds) > 1
    check_training(model)


@every_family
def test_wrong_attention_is_an_error(family: str) -> None:
    with pytest.raises(ValueError, match="attention='cosine'"):
        create_small(f"inline_{family}_tiny", attention="cosine")


@every_family
@pytest.mark.parametrize("feature_map", ["identity", "relu", "leaky_relu", "exp", "relu_affine"])
def test_feature_maps(family: str, feature_map: str) -> None:
    model = create_small(f"inline_{family}_tiny", feature_map=feature_map)
    inline = [attn for attn in attentions(model) if isinstance(attn, InLineAttention)]
    assert inline
    assert all((attn.affine is not None) == (feature_map == "relu_affine") for attn in inline)
    # Softmax does not follow: a feature map is a choice of linear attentions.
    assert all(attn.feature_map == "identity" for attn in attentions(model) if attn not in inline)
    check_training(model)


@every_family
def test_local_residual(family: str) -> None:
    name = f"inline_{family}_tiny"
    default, on, off = (
        create_small(name, **options) for options in ({}, dict(local_residual=True), dict(local_residual=False))
    )
    assert torch.equal(default(image()), on(image()))
    assert {n for n, _ in on.named_parameters()} - {n for n, _ in off.named_parameters()} == {
        n for n, _ in on.named_parameters() if ".local." in n
    }
    assert any(".local." in n for n, _ in on.named_parameters())
    check_training(off)
    linear = create_small(name, attention="linear", local_residual=True)
    assert all(attn.local is not None for attn in attentions(linear))
    check_training(linear)


@every_family
@pytest.mark.parametrize("kind", ["inline", "linear", "mala", "tangent"])
def test_rotary_positions(family: str, kind: str) -> None:
    """In windows, too. A stage of softmax stays as it is."""
    spec: Any = kind if family == "deit" else (kind, kind, kind, "softmax")
    plain, rotary = (create_small(f"inline_{family}_tiny", attention=spec, rope=rope) for rope in (False, True))
    assert {attn.kind for attn in attentions(rotary) if attn.rope} == {kind}
    with torch.no_grad():
        assert not torch.allclose(plain(image()), rotary(image()))
    check_training(rotary)


@every_family
def test_anchors(family: str, tmp_path: Path) -> None:
    """The number is that of the attention, and a file of weights has it."""
    model = create_small(f"inline_{family}_tiny", attention="tangent", anchors=3)
    assert all(attn.anchors == 3 for attn in attentions(model))
    again = load_model(save_weights(model, tmp_path / "tangent.safetensors")).eval()
    assert all(attn.anchors == 3 for attn in attentions(again))
    with torch.no_grad():
        assert torch.equal(model(image()), again(image()))
    check_training(model)


@every_family
def test_a_choice_that_no_attention_follows_is_an_error(family: str) -> None:
    name = f"inline_{family}_tiny"
    with pytest.raises(ValueError, match=r"anchors=4 has no effect with attention inline(, softmax)?; .* of tangent"):
        create_small(name, anchors=4)
    with pytest.raises(ValueError, match=r"rope=True .* rala; expected one of inline, linear, mala, tangent"):
        create_small(name, attention="rala", rope=True)
    with pytest.raises(ValueError, match="anchors=0; expected 1 or more"):
        create_small(name, attention="tangent", anchors=0)


# Windows


def attended(block: Any, x: Tensor, size: tuple[int, int]) -> Tensor:
    with torch.no_grad():
        return block.attention_branch(x.flatten(1, 2), size).unflatten(1, size)


def inline_block(*, shifted: bool, local_residual: bool) -> SwinBlock:
    torch.manual_seed(0)
    attn = InLineAttention(8, 2, local_residual=local_residual)
    return SwinBlock(8, attn, window=(3, 4), shifted=shifted, mlp_ratio=1, norm_eps=1e-5).double().eval()


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", [(4, 6), (5, 7), (2, 5)])
def test_inline_windows_leave_padding_out(shifted: bool, size: tuple[int, int]) -> None:
    """Windows that do not divide the map: each attends over its own tokens alone, without its padding."""
    block = inline_block(shifted=shifted, local_residual=False)
    x = torch.randn(2, *size, 8, dtype=torch.float64)
    out, normed = attended(block, x, size), block.norm1(x)
    for window in members(size, (3, 4), shifted):
        places = [place for place in window if place is not None]
        rows = torch.stack([normed[:, i, j] for i, j in places], dim=1)
        with torch.no_grad():
            expected = block.attn(rows, (1, len(places)))
        for n, (i, j) in enumerate(places):
            torch.testing.assert_close(out[:, i, j], expected[:, n], atol=1e-12, rtol=0)


@pytest.mark.parametrize("size", [(4, 6), (5, 7), (2, 5)])
def test_the_last_inline_windows_are_smaller_maps(size: tuple[int, int]) -> None:
    """Local kernels are made from the tokens present, and the 3×3 residual sees zeros where padding is."""
    block = inline_block(shifted=False, local_residual=True)
    x = torch.randn(2, *size, 8, dtype=torch.float64)
    out, normed = attended(block, x, size), block.norm1(x)
    for top, left in itertools.product(range(0, size[0], 3), range(0, size[1], 4)):
        crop = normed[:, top : top + 3, left : left + 4]
        with torch.no_grad():
            expected = block.attn(crop.flatten(1, 2), crop.shape[1:3]).unflatten(1, crop.shape[1:3])
        torch.testing.assert_close(out[:, top : top + 3, left : left + 4], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("size", [(4, 6), (5, 7), (2, 5)])
def test_softmax_windows_leave_padding_and_other_regions_out(shifted: bool, size: tuple[int, int]) -> None:
    """Against a loop over queries and keys: neighbours of the same window, not wrapped around, with their bias."""
    torch.manual_seed(0)
    window = (3, 4)
    attn = WindowSoftmaxAttention(8, 2, window=window)
    torch.nn.init.normal_(attn.relative_position_bias_table)
    block = SwinBlock(8, attn, window=window, shifted=shifted, mlp_ratio=1, norm_eps=1e-5).double().eval()
    x = torch.randn(1, *size, 8, dtype=torch.float64)
    out = attended(block, x, size)[0]
    steps = [w // 2 if shifted and w < s else 0 for w, s in zip(window, size, strict=True)]
    q, k, v = attn.qkv(block.norm1(x))[0].unflatten(-1, (3, 2, 4)).unbind(2)  # (H, W, heads, d)

    def cell(position: int, axis: int) -> int:
        """The window of a position on the unwrapped axis. The first windows are those that the shift cut off."""
        side = min(window[axis], size[axis])
        return (position - steps[axis]) // side

    for y, x_ in itertools.product(range(size[0]), range(size[1])):
        keys = [
            (i, j)
            for i, j in itertools.product(range(size[0]), range(size[1]))
            if cell(i, 0) == cell(y, 0) and cell(j, 1) == cell(x_, 1)
        ]
        scores = []
        for i, j in keys:
            row = (y - i + window[0] - 1) * (2 * window[1] - 1) + (x_ - j + window[1] - 1)
            scores.append((q[y, x_] * k[i, j]).sum(-1) * 4**-0.5 + attn.relative_position_bias_table[row])
        weights = torch.stack(scores).softmax(0)  # (keys, heads)
        values = torch.stack([v[i, j] for i, j in keys])
        expected = attn.proj((weights[..., None] * values).sum(0).flatten())
        torch.testing.assert_close(out[y, x_], expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("size", [(4, 6), (5, 7), (1, 3)])
def test_stripes_leave_padding_out(size: tuple[int, int]) -> None:
    """Each half of the heads in its own stripes, the last of them cut short by the border of the map."""
    torch.manual_seed(0)
    attn = StripeAttention(8, 2, stripe=2).double().eval()
    x = torch.randn(2, size[0] * size[1], 8, dtype=torch.float64)
    q, k, v = (y.unflatten(1, size) for y in attn.qkv(x).unflatten(-1, (3, 2, 4)).unbind(2))
    expected = torch.zeros(2, *size, 2, 4, dtype=torch.float64)
    for head, axis in ((0, 1), (1, 0)):
        for start in range(0, size[axis], 2):
            part = [slice(None)] * 4
            part[axis + 1] = slice(start, start + 2)
            part[3] = head
            rows = [y[tuple(part)] for y in (q, k, v)]  # (B, h, w, d)
            out = torch.nn.functional.scaled_dot_product_attention(*(y.flatten(1, 2) for y in rows))
            position = attn.positions[head](rows[2].permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            expected[tuple(part)] = out.unflatten(1, rows[0].shape[1:3]) + position
    with torch.no_grad():
        torch.testing.assert_close(attn(x, size), attn.proj(expected.flatten(1, 2).flatten(2)), atol=1e-9, rtol=0)


def test_inline_windows_of_any_size_are_clipped() -> None:
    """A window that covers the map is the whole map, whatever its size."""
    whole = create_small("inline_swin_tiny", attention="IIII")
    large = create_small("inline_swin_tiny", attention="IIII", window_size=(16, 99), softmax_window_size=2)
    small = create_small("inline_swin_tiny", attention="IIII", window_size=3)
    with torch.no_grad():
        assert torch.equal(large(image()), whole(image()))
        assert not torch.allclose(small(image(48, 80)), whole(image(48, 80)))


def test_softmax_window_follows_the_inline_window() -> None:
    for window_size, expected in ((7, 7), (28, 7), (56, 7), (96, 12), (None, 7)):
        with torch.device("meta"):
            model = create_small("inline_swin_tiny", window_size=window_size, softmax_window_size=None, img_size=512)
        assert model.softmax_window == (expected, expected)


@pytest.mark.parametrize("name", ["softmax_swin_tiny", "inline_swin_tiny"])
def test_window_size_that_no_block_has_is_an_error(name: str) -> None:
    with torch.device("meta"):
        options: dict[str, Any] = dict(attention="softmax", softmax_window_size=None)
        with pytest.raises(ValueError, match=r"window_size=12 has no effect.* set softmax_window_size=12"):
            create_small(name, window_size=12, **options)
        assert create_small(name, **options | dict(softmax_window_size=12)).softmax_window == (12, 12)
        assert create_small(name, window_size=96, **options).softmax_window == (12, 12)  # as published at 384


def test_pvt_reduction_drops_an_incomplete_border() -> None:
    model = create_small("softmax_pvt_tiny")
    attn = model.stages[0].blocks[0].attn
    x = torch.randn(1, 17 * 9, 8)
    cropped = x.unflatten(1, (17, 9))[:, :16, :8].flatten(1, 2)
    with torch.no_grad():
        _, k, v = unstack(attn.project(x, (17, 9)))
        _, expected_k, expected_v = unstack(attn.project(cropped, (16, 8)))
    assert torch.equal(k, expected_k)
    assert torch.equal(v, expected_v)
    with pytest.raises(ValueError, match="a map of 7×9 is smaller than the reduction 8 of its keys"):
        attn(torch.randn(1, 63, 8), (7, 9))
