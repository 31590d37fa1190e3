"""The teacher of the tables, and its attention replaced without training."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from inline_attention import create_model
from inline_attention.layers import SoftmaxAttention
from inline_attention.tasks.classification.classifier import load_classifier
from study import expansion
from study.__main__ import main


@pytest.fixture(scope="module")
def teacher() -> torch.nn.Module:
    return create_model(expansion.TEACHER, pretrained=True).eval()


def test_the_teacher_is_the_one_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    expansion.check_teacher()
    monkeypatch.setattr(expansion, "TEACHER_SHA256", "0" * 64)
    with pytest.raises(ValueError, match="expected 0000"):
        expansion.check_teacher()


def test_more_anchors_come_nearer_to_the_teacher(teacher: torch.nn.Module) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = teacher(images)
        errors = [
            float((expansion.carry_over(teacher, attention, anchors)(images) - expected).norm())
            for attention, anchors in expansion.ROWS.values()
        ]
    softmax, linear, inline, _, centroids, tangent, four, sixteen = errors
    assert softmax == 0
    assert sixteen < four < tangent < inline < linear
    assert sixteen < centroids


def inputs(count: int = 9) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, count, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3)]


def softmax_at(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.einsum("bhij,bjhd->bihd", (torch.einsum("bihd,bjhd->bhij", q, k) / 2).softmax(-1), v)


def test_second_order_at_zero() -> None:
    """What PyTorch's derivatives of softmax along each query say."""
    q, k, v = inputs()

    def along(t: torch.Tensor) -> torch.Tensor:
        return softmax_at(t * q, k, v)

    def slope(t: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(along, (t,), (torch.ones_like(t),))[1]

    zero = torch.zeros((), dtype=torch.float64)
    value, first = torch.func.jvp(along, (zero,), (torch.ones_like(zero),))
    _, second = torch.func.jvp(slope, (zero,), (torch.ones_like(zero),))
    found = expansion.TaylorAttention(8, 2).global_attention(q, k, v, grid=(3, 3), token_mask=None)
    torch.testing.assert_close(found, value + first + second / 2, atol=1e-12, rtol=1e-12)


def test_centroids_have_the_softmax_of_their_anchors() -> None:
    """Queries in three clusters of three equal ones are their own anchors."""
    q, k, v = inputs()
    q = q[:, [0, 0, 0, 1, 1, 1, 2, 2, 2]]
    module = expansion.build_like(SoftmaxAttention(8, 2), "centroids", 3)
    found = module.global_attention(q, k, v, grid=(3, 3), token_mask=None)
    torch.testing.assert_close(found, softmax_at(q, k, v), atol=1e-12, rtol=1e-12)
    moved = q + torch.tensor([-0.01, 0.0, 0.01]).repeat(3)[:, None, None]
    found = module.global_attention(moved, k, v, grid=(3, 3), token_mask=None)
    torch.testing.assert_close(found, softmax_at(q, k, v), atol=1e-12, rtol=1e-12)


def test_errors_of_layers(teacher: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of the values has the error 1. Two batches count as one, and the model is left as it was."""

    class Mean(expansion.Expansion):
        def global_attention(self, q, k, v, **_):  # type: ignore[no-untyped-def]
            return v.mean(1, keepdim=True).expand_as(v)

    monkeypatch.setitem(expansion.OF_THE_STUDY, "mean", Mean)
    monkeypatch.setattr(expansion, "ROWS", {"mean": ("mean", 1), "softmax": ("softmax", 1), "inline": ("inline", 1)})
    images = torch.randn(3, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    mean, softmax, inline = expansion.compare_layers(teacher, [images[:1], images[1:]])
    assert mean.errors == pytest.approx([1] * 7)
    assert softmax == ("softmax", 3, [0] * 7)
    assert inline.errors == pytest.approx(expansion.compare_layers(teacher, [images])[2].errors)
    assert not any(module._forward_pre_hooks for module in teacher.modules())
    (captured,) = [module for name, module in teacher.named_modules() if name == "blocks.3.attn"]
    seen: list[torch.Tensor] = []
    hook = captured.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        teacher(images)
        q, k, v = captured.qkv(seen[0]).unflatten(-1, (3, 5, 32)).unbind(2)
    hook.remove()
    weights = (torch.einsum("bihd,bjhd->bhij", q, k) * 32**-0.5).double()
    exact = weights.softmax(-1)
    linear = (1 + weights - weights.mean(-1, keepdim=True)) / weights.shape[-1]
    difference, deviation = (
        torch.einsum("bhij,bjhd->bihd", w, v.double()).square().sum()
        for w in (linear - exact, exact - 1 / exact.shape[-1])
    )
    assert inline.errors[3] == pytest.approx(float(difference / deviation), rel=1e-4)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = load_classifier(expansion.TEACHER, "pretrained").class_names
    assert names is not None
    for name in names[:2]:
        folder = tmp_path / "val" / name
        folder.mkdir(parents=True)
        Image.new("RGB", (64, 64), "red").save(folder / "0.png")
    monkeypatch.setattr(expansion, "ROWS", {"softmax": ("softmax", 1), "tangent": ("tangent", 1)})
    assert main(["expansion", "--data", str(tmp_path), "--workers", "0", "--json", str(tmp_path / "table.json")]) == 0
    table = json.loads((tmp_path / "table.json").read_text())
    assert [(row["title"], row["images"]) for row in table["rows"]] == [("softmax", 2), ("tangent", 2)]
    softmax, tangent = table["layers"]
    assert (softmax["images"], softmax["errors"]) == (1, [0] * 7)
    assert all(0 < error < 1 for error in tangent["errors"])


def test_a_table_that_was_begun_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, known = tmp_path / "table.json", expansion.Row("softmax", "softmax", 1, 5000, 45.8, 73.0)
    table.write_text(json.dumps({"teacher": expansion.TEACHER_SHA256, "rows": [known._asdict()]}))
    monkeypatch.setattr(expansion, "ROWS", {"softmax": ("softmax", 1)})
    assert list(
        expansion.evaluate_rows(
            "nowhere", device=torch.device("cpu"), batch_size=1, workers=0, known=expansion.read_table(table)[0]
        )
    ) == [known]
    monkeypatch.setattr(expansion, "evaluate_rows", lambda data, *, known, **_: [more, *known])
    monkeypatch.setattr(expansion, "ROWS", {"linear": ("linear", 1), "softmax": ("softmax", 1)})
    layers = [expansion.LayerErrors(title, 1000, [0.5]) for title in expansion.ROWS]
    monkeypatch.setattr(expansion, "evaluate_layers", lambda data, **_: layers)
    more = known._replace(title="linear")
    assert main(["expansion", "--data", "nowhere", "--json", str(table)]) == 0
    assert expansion.read_table(table) == ([more, known], layers)  # in the order of the table, and nothing is lost
    table.write_text(json.dumps({"teacher": "another", "rows": []}))
    with pytest.raises(ValueError, match="the table of the teacher another"):
        expansion.read_table(table)
