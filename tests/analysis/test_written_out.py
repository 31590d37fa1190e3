"""Attention written out is what the modules compute, in every family and in timm's models."""

from typing import Any

import pytest
import timm
import torch
from small import DISTINCT, FAMILIES, create_small, image
from torch import nn

from inline_attention.analysis import capture, layer_names, observe
from inline_attention.analysis.neighbours import neighbours
from inline_attention.layers import ATTENTIONS


def small_timm(name: str) -> nn.Module:
    torch.manual_seed(0)
    if name == "vit":
        model = timm.create_model(
            "vit_tiny_patch16_224", img_size=(64, 48), embed_dim=16, depth=2, num_heads=2, num_classes=5, qk_norm=True
        )
    else:
        model = timm.create_model(
            "swin_tiny_patch4_window7_224", img_size=64, window_size=4, embed_dim=8, depths=(2, 1, 1, 1), num_classes=5
        )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def check(model: nn.Module, images: torch.Tensor) -> None:
    for record in capture(model, images):
        assert record.error() < 1e-5, record.name


@pytest.mark.parametrize("name", DISTINCT)
@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
def test_matrix_is_the_module(name: str, size: tuple[int, int]) -> None:
    """Windows that divide the map and windows that do not, shifted windows, stripes, reduced keys, class tokens."""
    check(create_small(name), image(*size))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", sorted(ATTENTIONS))
def test_every_attention_in_every_family(family: str, kind: str) -> None:
    options: dict[str, Any] = dict(window_size=3) if family == "swin" else {}
    model = create_small(f"inline_{family}_tiny", attention=kind, **options)
    check(model, image(48, 80))


@pytest.mark.parametrize("feature_map", ["relu", "exp", "relu_affine"])
def test_feature_maps(feature_map: str) -> None:
    check(create_small("inline_deit_tiny", feature_map=feature_map), image())


@pytest.mark.parametrize(("name", "size"), [("vit", (64, 48)), ("swin", (64, 64))])
def test_timm(name: str, size: tuple[int, int]) -> None:
    model = small_timm(name)
    records = capture(model, image(*size))
    assert len(records) == len(layer_names(model)) > 1
    for record in records:
        assert record.error() < 1e-5, record.name
        torch.testing.assert_close(record.weights().sum(-1), torch.ones(record.q.shape[0], record.num_heads, 1).expand(
            -1, -1, record.q.shape[1]), atol=1e-5, rtol=0)  # fmt: skip


def test_padding_of_timm_is_refused() -> None:
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=64, embed_dim=8, depths=(1, 1, 1, 1))
    with pytest.raises(ValueError, match="windows of 7×7 do not divide the map of 16×16"):
        capture(model, image())


def test_taps_are_the_local_terms() -> None:
    """Weights and the taps of a channel make one matrix, which takes that channel of v to the output."""
    model = create_small("inline_deit_tiny")
    for record in capture(model, image()):
        d = record.v.shape[3]
        channels = [
            torch.einsum("shij,sjh->sih", record.weights() + record.local_weights(channel=c), record.v[..., c])
            for c in range(d)
        ]
        out = model.get_submodule(record.name).merge(torch.stack(channels, -1))
        torch.testing.assert_close(out, record.output, atol=1e-5, rtol=1e-5)
        mean = torch.stack([record.local_weights(channel=c) for c in range(d)]).mean(0)
        torch.testing.assert_close(record.local_weights(), mean)
        assert (record.local_weights()[:, :, 0] == 0).all()  # the class token has no neighbours
        assert (record.local_weights()[:, :, :, 0] == 0).all()


def test_rows_on_the_map() -> None:
    """A row of a shifted window is on the map at the positions of the window's own tokens."""
    model = create_small("softmax_swin_tiny")
    record = capture(model, image(48, 80), layers=["stages.2.blocks.1.attn"])[0]
    assert record.windows is not None
    assert record.map_grid == (3, 5)
    row = record.row(1, (1, 2))
    inside = ~row[0].isnan()
    # Windows of 2 shifted by 1: rows 1–2, columns 1–2.
    assert inside.nonzero().tolist() == [[1, 1], [1, 2], [2, 1], [2, 2]]
    torch.testing.assert_close(row[:, inside].sum(1), torch.ones(record.num_heads))
    q, k = (x.unflatten(0, (2, -1))[1] for x in (record.q, record.k))
    # Window 0 of the shifted map holds these; the query is its second token.
    scores = torch.einsum("hd,jhd->hj", q[0, 1], k[0]) * q.shape[-1] ** -0.5
    module: Any = model.get_submodule(record.name)
    expected = (scores + module.position_bias((2, 2))[:, 1]).softmax(-1)
    torch.testing.assert_close(row[:, inside], expected)


def test_rows_of_a_class_token_and_chunks() -> None:
    model = create_small("inline_deit_tiny")
    record = capture(model, image(64, 48), layers=[-1])[0]
    whole = record.weights()
    torch.testing.assert_close(record.row(1, 0), whole[1, :, 0, 1:].unflatten(1, (4, 3)))
    torch.testing.assert_close(record.row(0, (2, 1)), whole[0, :, 1 + 2 * 3 + 1, 1:].unflatten(1, (4, 3)))
    with_local = whole + record.local_weights()
    torch.testing.assert_close(record.row(0, (2, 1), local=True), with_local[0, :, 8, 1:].unflatten(1, (4, 3)))
    chunks = list(record.row_chunks(max_bytes=2 * 2 * 13 * 4 * 5))
    assert chunks == [slice(0, 5), slice(5, 10), slice(10, 13)]
    torch.testing.assert_close(torch.cat([record.weights(rows) for rows in chunks], 2), whole)
    with pytest.raises(ValueError, match="query 4, 0 is not on the 4×3 map"):
        record.row(0, (4, 0))


def test_the_model_is_left_alone() -> None:
    model = create_small("inline_swin_tiny").train()
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    assert model.training
    replaced = observe(model, image(), lambda record: torch.zeros_like(record.output))
    assert model.training
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    unchanged = observe(model, image(), lambda record: None)
    with torch.no_grad():
        torch.testing.assert_close(unchanged, model.eval()(image()))
    assert not torch.allclose(replaced, unchanged)


def test_every_module_keeps_its_mode() -> None:
    """A frozen norm stays in evaluation mode, also after an error."""
    model: Any = create_small("inline_deit_tiny").train()
    model.blocks[0].norm1.eval()
    modes = [module.training for module in model.modules()]
    capture(model, image())
    assert [module.training for module in model.modules()] == modes

    def fail(record: Any) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        observe(model, image(), fail)
    assert [module.training for module in model.modules()] == modes


def test_which_layers() -> None:
    model = create_small("inline_deit_tiny")
    assert layer_names(model) == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    assert [r.name for r in capture(model, image(), layers=[-1, "blocks.0.attn"])] == ["blocks.0.attn", "blocks.2.attn"]
    with pytest.raises(ValueError, match="there is no layer 3; expected 0 to 2"):
        capture(model, image(), layers=[3])
    with pytest.raises(ValueError, match="Linear has no attention that can be written out"):
        capture(nn.Linear(2, 2), image())


def test_neighbours_by_hand() -> None:
    around = neighbours((2, 3), (3, 3), num_prefix_tokens=1)
    assert around[0].tolist() == [-1] * 9
    assert around[1].tolist() == [-1, -1, -1, -1, 1, 2, -1, 4, 5]
    assert around[5].tolist() == [1, 2, 3, 4, 5, 6, -1, -1, -1]
    assert neighbours((1, 4), (1, 3))[2].tolist() == [1, 2, 3]
