"""The maps are rows of the attention that the model computes, and the models are the ones asked for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from explored import CPU
from PIL import Image
from small import SIZE, create_small, shrunk

from inline_attention import create_model, linearize
from inline_attention.analysis import capture
from inline_attention.data import DataConfig
from inline_attention.explore import Subject, load_subjects
from inline_attention.explore.maps import CACHED_LAYERS, Maps, prepare
from inline_attention.models import shipped
from inline_attention.models.weights import save_weights

GRID = 4


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (96, 96, 3), generator=generator, dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def test_pictures_are_prepared_as_the_model_was_trained() -> None:
    model: Any = create_model("inline_deit_tiny", **shrunk("inline_deit_tiny", in_chans=1))
    data = DataConfig(img_size=[SIZE, SIZE], in_chans=1, mean=[0.25], std=[0.5])
    subject = Subject("inline", "inline_deit_tiny", model, data, None)
    x = prepare(Image.new("RGB", (30, 30), (255, 255, 255)), subject, device=CPU)
    assert x.shape == (1, 1, SIZE, SIZE)
    torch.testing.assert_close(x, torch.full_like(x, (1 - 0.25) / 0.5))


@pytest.mark.parametrize("model", [0, 1, 2], ids=["softmax", "linear", "inline"])
@pytest.mark.parametrize("head", [None, 1])
def test_a_map_is_a_row_of_the_layer(
    subjects: list[Subject], picture: Image.Image, model: int, head: int | None
) -> None:
    """Row and column are those of the clicked point: the third row and the second column of four."""
    found = Maps(subjects, device=CPU).attention_map("a", picture, model=model, layer=2, head=head, x=0.3, y=0.6)
    assert found.query == (2, 1)
    assert found.grid == found.query_grid == (GRID, GRID)
    assert (found.heads, found.tokens) == (2, 1 + GRID * GRID)
    (layer,) = capture(subjects[model].model, prepare(picture, subjects[model], device=CPU), layers=[2])
    assert (found.layer, found.kind) == (layer.name, subjects[model].kind)
    rows = layer.weights()[0]  # (heads, N, N), the class token first
    row = (rows.mean(0) if head is None else rows[head])[1 + 2 * GRID + 1]
    torch.testing.assert_close(torch.tensor(found.weights), row[1:], rtol=1e-4, atol=1e-7)


def test_a_prediction_is_the_model_s_own(subjects: list[Subject], picture: Image.Image) -> None:
    names = ["n01440764", "cat", "dog", "n01443537", "cow"]
    named = [replace(subject, class_names=names if subject.weights else None) for subject in subjects]
    maps = Maps(named, device=CPU)
    for number, subject in enumerate(named):
        guesses = maps.prediction("a", picture, model=number)
        if subject.weights is None:
            assert guesses == []
            continue
        with torch.no_grad():
            shares = subject.model(prepare(picture, subject, device=CPU)).softmax(1)[0]
        order = shares.argsort(descending=True)[:3].tolist()
        assert [guess.name for guess in guesses] == [names[label] for label in order]
        assert [guess.probability for guess in guesses] == pytest.approx(shares[order].tolist())
    unnamed = Maps(subjects, device=CPU).prediction("a", picture, model=0)
    assert all(guess.name == f"class {guess.label}" for guess in unnamed)


def test_the_residual_is_on_the_neighbours(subjects: list[Subject], picture: Image.Image) -> None:
    maps = Maps(subjects, device=CPU)
    assert maps.attention_map("a", picture, model=0, layer=0, head=0, x=0.5, y=0.5).with_local is None
    found = maps.attention_map("a", picture, model=2, layer=0, head=0, x=0.0, y=0.0)
    assert found.with_local is not None
    difference = torch.tensor(found.with_local) - torch.tensor(found.weights)
    touched = difference.view(GRID, GRID) != 0
    expected = torch.zeros(GRID, GRID, dtype=torch.bool)
    expected[:2, :2] = True  # of a corner: itself and three
    assert torch.equal(touched, expected)


def test_the_last_head_stands_for_those_beyond(subjects: list[Subject], picture: Image.Image) -> None:
    """Stages of a pyramid have different numbers of heads; a page that changes the layer keeps the head it had."""
    maps = Maps(subjects, device=CPU)
    beyond, last = (maps.attention_map("a", picture, model=2, layer=0, head=head, x=0.5, y=0.5) for head in (7, 1))
    assert beyond == last
    assert beyond.head == 1


def test_outside_a_window_there_is_no_weight(picture: Image.Image) -> None:
    name = "softmax_swin_tiny"  # windows of 2 tokens on maps of 16, 8, 4 and 2
    data = DataConfig(img_size=[SIZE, SIZE])
    subject = Subject("softmax", name, create_small(name), data, None)
    found = Maps([subject], device=CPU).attention_map("a", picture, model=0, layer=0, head=0, x=0.99, y=0.99)
    assert found.grid == (16, 16)
    assert found.query == (15, 15)
    seen = [i for i, weight in enumerate(found.weights) if weight is not None]
    assert seen == [14 * 16 + 14, 14 * 16 + 15, 15 * 16 + 14, 15 * 16 + 15]


def test_few_layers_are_kept(subjects: list[Subject], picture: Image.Image) -> None:
    maps = Maps(subjects, device=CPU)
    for i in range(CACHED_LAYERS + 3):
        maps.attention_map(f"picture {i}", picture, model=0, layer=0, head=0, x=0, y=0)
    assert len(maps._layers) == CACHED_LAYERS


def test_models_of_the_package() -> None:
    found = [(s.kind, s.name, s.weights) for s in load_subjects(device=CPU)]
    assert found == [(name.partition("_")[0], name, f"{name}.safetensors") for name in shipped.SHIPPED]


def test_models_without_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    subjects = load_subjects(device=CPU)
    assert [(s.kind, s.name, s.weights) for s in subjects] == [
        ("softmax", "softmax_deit_tiny", None),
        ("linear", "inline_deit_tiny", None),
        ("inline", "inline_deit_tiny", None),
    ]
    again = load_subjects(device=CPU)
    for one, other in zip(subjects, again, strict=True):
        assert torch.equal(one.model.head.weight, other.model.head.weight)  # type: ignore[union-attr,arg-type]


def saved(folder: Path, kind: str, **kwargs: Any) -> str:
    model = create_small("inline_deit_tiny", attention=kind, **kwargs)
    return str(save_weights(model, folder / f"{kind}.safetensors"))


def test_models_with_weights(tmp_path: Path) -> None:
    """The given models, and random models of the same architecture for the other attentions."""
    files = [saved(tmp_path, "inline", feature_map="relu"), saved(tmp_path, "softmax")]
    subjects = load_subjects(files, device=CPU)
    weights = {s.kind: s.weights for s in subjects}
    assert weights == {"softmax": "softmax.safetensors", "linear": None, "inline": "inline.safetensors"}
    assert list(weights) == ["softmax", "linear", "inline"]
    assert all((s.model.img_size, s.model.embed_dim) == ((SIZE, SIZE), 16) for s in subjects)
    expected = create_small("inline_deit_tiny", feature_map="relu").state_dict()
    torch.testing.assert_close(subjects[2].model.state_dict(), expected)


def saved_student(folder: Path, name: str = "softmax_deit_tiny", **options: Any) -> str:
    arguments: dict[str, Any] = dict(img_size=56, depth=2, embed_dim=24, num_heads=2, num_classes=5)
    model = create_small(name) if name.startswith("softmax") else timm.create_model(name, **arguments)
    linearize(model, **options, arguments=arguments)
    metadata = {"class_names": json.dumps(["ant", "bee", "cat", "dog", "eel"])}
    return str(save_weights(model, folder / "student.safetensors", metadata=metadata))


@pytest.mark.parametrize("name", ["softmax_deit_tiny", "vit_tiny_patch16_224", "softmax_swin_tiny", "softmax_pvt_tiny"])
def test_a_student_stands_beside_its_teacher(tmp_path: Path, picture: Image.Image, name: str) -> None:
    """Both with maps and predictions. The teacher is the same file with softmax put back, and nothing is random."""
    subjects = load_subjects([saved_student(tmp_path, name, keep_softmax=[0])], device=CPU)
    assert [(s.kind, s.title, s.name, s.weights) for s in subjects] == [
        ("softmax", "Softmax put back", name, "student.safetensors"),
        ("tangent", "Linearised: tangent", name, "student.safetensors"),
    ]
    maps = Maps(subjects, device=CPU)
    assert maps.layer_counts[0] == maps.layer_counts[1]
    first = [maps.attention_map("a", picture, model=model, layer=0, head=0, x=0, y=0) for model in (0, 1)]
    assert [found.kind for found in first] == ["softmax", "softmax"]  # kept
    assert first[0].weights == first[1].weights
    last = [maps.attention_map("a", picture, model=model, layer=1, head=0, x=0, y=0) for model in (0, 1)]
    assert [found.kind for found in last] == ["softmax", "tangent"]
    assert last[0].weights != last[1].weights
    assert all(len(maps.prediction("a", picture, model=model)) == 3 for model in (0, 1))


def test_a_teacher_that_is_given(tmp_path: Path) -> None:
    files = [saved(tmp_path, "inline"), saved_student(tmp_path), saved(tmp_path, "softmax")]
    subjects = load_subjects(files, device=CPU)
    assert [(s.kind, s.title, s.weights) for s in subjects] == [
        ("softmax", None, "softmax.safetensors"),
        ("tangent", "Linearised: tangent", "student.safetensors"),
        ("inline", None, "inline.safetensors"),
    ]


def test_a_teacher_that_cannot_be_written_out(tmp_path: Path) -> None:
    """The student is shown alone."""
    (subject,) = load_subjects([saved_student(tmp_path, "eva02_tiny_patch14_224")], device=CPU)
    assert subject.title == "Linearised: tangent"


def test_students_that_cannot_be_shown(tmp_path: Path) -> None:
    file = saved_student(tmp_path)
    with pytest.raises(ValueError, match=r"student.safetensors and student.safetensors are linearised; expected one"):
        load_subjects([file, file], device=CPU)
    with pytest.raises(
        ValueError, match=r"student.safetensors: stages.0.* a linearised StripeAttention is not written"
    ):
        load_subjects([saved_student(tmp_path, "softmax_cswin_tiny")], device=CPU)


def test_wrong_weights(tmp_path: Path) -> None:
    file = saved(tmp_path, "inline")
    copy = tmp_path / "copy.safetensors"
    copy.write_bytes(Path(file).read_bytes())
    with pytest.raises(ValueError, match=r"inline.safetensors and copy.safetensors both have inline attention"):
        load_subjects([file, str(copy)], device=CPU)
    with pytest.raises(ValueError, match=r"there is no file 'none\.safetensors'"):
        load_subjects(["none.safetensors"], device=CPU)
    pickled = tmp_path / "official.pth"
    torch.save({"model": {"w": torch.ones(2)}}, pickled)
    with pytest.raises(ValueError, match="does not say which model it is for"):
        load_subjects([str(pickled)], device=CPU)
