"""Weights that come with the package: packed from a training run, found by name, and what commands show by default."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
import training_runs
import yaml
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from inline_attention import create_model, list_models
from inline_attention.analysis import Subject
from inline_attention.analysis.subjects import open_subjects
from inline_attention.cli import main
from inline_attention.cli.predict import split_model
from inline_attention.data import DataConfig
from inline_attention.explore import load_subjects
from inline_attention.models import deit, shipped
from inline_attention.models.weights import load_model, read_metadata, save_weights
from inline_attention.tasks.classification.classifier import load_classifier, preprocessing
from inline_attention.training.task import weights_source
from study.pack import pack_weights

CPU = torch.device("cpu")
KINDS = ("softmax", "linear", "inline")
CLASSES = [f"digit {number:03}" for number in range(deit.STUDY["num_classes"])]
FACTS = dict(data="a hundred digits", seed=3)


def make_data(root: Path) -> None:
    """The registered models have a hundred classes: each of the first hundred digits is one, validated on itself."""
    import sklearn.datasets

    for name, pixels in zip(CLASSES, sklearn.datasets.load_digits().images, strict=False):
        for split in ("train", "val"):
            (root / split / name).mkdir(parents=True)
            Image.fromarray((pixels * 15).astype("uint8")).convert("RGB").save(root / split / name / "0.png")


def train(name: str, root: Path) -> Path:
    recipe = dict(
        model=dict(name=name),
        data=dict(
            path=str(root / "data"),
            img_size=64,
            augment=False,
            mixup=0,
            cutmix=0,
            eval_transform="resize",
            interpolation="bilinear",
        ),
        optim=dict(lr=2e-3, rate_batch=50),
        schedule=dict(epochs=3, warmup_epochs=0),
        log=dict(tensorboard=False),
    )
    recipe["data"] |= dict(batch_size=50, workers=0, in_memory=True)
    (root / "tiny.yaml").write_text(yaml.safe_dump(recipe))
    command = ["train", str(root / "tiny.yaml"), "--device", "cpu", "--output", str(root / name)]
    with training_runs.without_pictures():
        assert main(command) == 0
    return root / name / "checkpoints" / "best.safetensors"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Run folders of the three models, which are made small in the table that sets their sizes."""
    root = tmp_path_factory.mktemp("study")
    make_data(root / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deit, "STUDY", {**deit.STUDY, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2})
        yield {name: train(name, root) for name in shipped.SHIPPED}


@pytest.fixture
def nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package without weights."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "package")
    return tmp_path / "package"


@pytest.fixture
def packed(runs: dict[str, Path], nothing: Path) -> dict[str, Path]:
    """A package with weights."""
    return {name: pack_weights(source, name=name, **FACTS) for name, source in runs.items()}


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    Image.new("RGB", (70, 50), "teal").save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


# The file


def test_file_is_half_as_large_and_says_what_it_is(runs: dict[str, Path], packed: dict[str, Path]) -> None:
    for name, path in packed.items():
        assert path == shipped.FOLDER / f"{name}.safetensors"
        trained, written = load_file(runs[name]), load_file(path)
        assert {tensor.dtype for tensor in written.values()} == {torch.float16}
        assert all(torch.equal(written[key], tensor.half()) for key, tensor in trained.items())
        about = read_metadata(path)
        assert about["architecture"] == name
        assert json.loads(about["class_names"]) == CLASSES
        assert (about["data"], about["seed"], about["recipe"]) == ("a hundred digits", "3", "tiny")
        assert about["top1"] == read_metadata(runs[name])["top1"]


def test_given_facts_come_first(runs: dict[str, Path], tmp_path: Path) -> None:
    name = "inline_deit_study"
    path = pack_weights(runs[name], name=name, recipe="epochs: 3", top1=41.4, folder=tmp_path / "new", **FACTS)
    assert path == tmp_path / "new" / "inline_deit_study.safetensors"
    assert (read_metadata(path)["recipe"], read_metadata(path)["top1"]) == ("epochs: 3", "41.40")


def test_loaded_by_name_in_single_precision(runs: dict[str, Path], packed: dict[str, Path]) -> None:
    x = torch.randn(2, 3, 64, 64)
    for name in shipped.SHIPPED:
        model = timm.create_model(name, pretrained=True).eval()
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        trained = load_model(runs[name]).eval()
        weights = trained.state_dict()
        assert all(torch.equal(tensor, weights[key].half().float()) for key, tensor in model.state_dict().items())
        torch.testing.assert_close(model(x), trained(x), rtol=0, atol=0.02 * trained(x).std().item())
        assert torch.equal(load_model(packed[name]).eval()(x), model(x))
        other = create_model(name, pretrained=True, num_classes=7)
        assert torch.equal(other.pos_embed, model.pos_embed)
        assert other(x).shape == (2, 7)
    assert set(shipped.SHIPPED) <= set(list_models(pretrained=True))
    assert weights_source("inline_deit_study") == str(packed["inline_deit_study"])


def test_only_a_model_of_the_same_kind_is_packed(runs: dict[str, Path], tmp_path: Path) -> None:
    """Softmax and linear attention have the same parameters, so shapes do not distinguish them."""

    def packing(source: Path, name: str = "linear_deit_study") -> None:
        pack_weights(source, name=name, folder=tmp_path, **FACTS)

    with pytest.raises(ValueError, match=r"has attention=\[\['softmax', 'softmax'\]\], and linear_deit_study has"):
        packing(runs["softmax_deit_study"])
    with pytest.raises(ValueError, match="expected one of softmax_deit_study"):
        packing(runs["softmax_deit_study"], "softmax_deit_tiny")

    def saved(prepared: DataConfig | None = None, **options: object) -> Path:
        about = {"class_names": json.dumps(CLASSES), "recipe": "none", "top1": "1.00"}
        about |= {"preprocessing": preprocessing(prepared)} if prepared else {}
        return save_weights(create_model("linear_deit_study", **options), tmp_path / "x.safetensors", metadata=about)

    as_registered = DataConfig(eval_transform="resize", interpolation="bilinear")
    packing(saved(as_registered, drop_path_rate=0.1))
    packing(saved(as_registered, feature_map="relu", local_residual=False))  # what it has by itself
    for prepared, options, message in (
        (as_registered, dict(embed_dim=32), "has embed_dim=32, and linear_deit_study has embed_dim=16"),
        (as_registered, dict(img_size=32), r"has img_size=\(32, 32\)"),
        (as_registered, dict(feature_map="exp"), r"has feature_map=\['exp', 'exp'\], and linear_deit_study has"),
        (as_registered, dict(local_residual=True), r"has local_residual=\[True, True\]"),
        (DataConfig(interpolation="bilinear"), {}, "evaluated with eval_transform=published"),
        (DataConfig(eval_transform="resize"), {}, "evaluated with interpolation=bicubic"),
        (DataConfig(eval_transform="resize", mean=[0.5] * 3, std=[0.5] * 3), {}, "evaluated with mean="),
        (None, {}, "does not say its preprocessing"),
    ):
        with pytest.raises(ValueError, match=message):
            packing(saved(prepared, **options))

    file = saved(as_registered)
    tensors = load_file(file)
    tensors["head.weight"][0, 0] = 1e6
    with safe_open(file, framework="pt") as opened:
        save_file(tensors, tmp_path / "large.safetensors", metadata=opened.metadata())
    with pytest.raises(ValueError, match="beyond the range of float16"):
        packing(tmp_path / "large.safetensors")


# What commands take where nothing is named


def subjects_of_analyze() -> list[Subject]:
    return open_subjects(device=CPU)


def test_without_weights(nothing: Path, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in shipped.SHIPPED:
        with pytest.raises(ValueError, match=f"no weights of {name} to load"):
            create_model(name, pretrained=True)
    assert not set(shipped.SHIPPED) & set(list_models(pretrained=True))
    assert main(["predict", str(picture)]) == 2
    assert "no weights come with this installation: give --weights" in capsys.readouterr().err
    assert main(["predict", "inline_deit_study", str(picture)]) == 2
    assert "no weights of inline_deit_study in the package" in capsys.readouterr().err
    assert [subject.weights for subject in load_subjects(device=CPU)] == [None] * 3
    (subject,) = subjects_of_analyze()
    assert subject.facts["model"] == "inline_deit_tiny"
    assert subject.facts["weights"] == "none: as initialised"


def test_with_weights(packed: dict[str, Path], picture: Path, tmp_path: Path, capsys) -> None:
    assert main(["predict", str(picture), "--device", "cpu", "--json", str(tmp_path / "out.json")]) == 0
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["model"] == "inline_deit_study"
    classifier = load_classifier(None, str(packed["inline_deit_study"]))
    assert {guess["name"] for guess in result["predictions"][0]["guesses"]} <= set(CLASSES)
    assert classifier.class_names == CLASSES
    assert "digit 0" in capsys.readouterr().out

    assert main(["predict", "linear_deit_study", str(picture), "--device", "cpu"]) == 0
    by_name = capsys.readouterr().out
    file = str(packed["linear_deit_study"])
    assert main(["predict", "--weights", file, str(picture), "--device", "cpu"]) == 0
    assert capsys.readouterr().out == by_name
    assert main(["predict", str(picture), "--device", "cpu", str(picture)]) == 0
    assert capsys.readouterr().out.count("picture.png") == 2

    subjects = load_subjects(device=CPU)
    assert [(subject.kind, subject.weights) for subject in subjects] == [
        (kind, f"{kind}_deit_study.safetensors") for kind in KINDS
    ]
    analysed = subjects_of_analyze()
    assert [subject.facts["model"] for subject in analysed] == list(shipped.SHIPPED)
    assert [subject.facts["attention"] for subject in analysed] == list(KINDS)


def test_one_of_three_weights(packed: dict[str, Path]) -> None:
    """The page shows random models of the same architecture beside it."""
    for name in ("softmax_deit_study", "linear_deit_study"):
        packed[name].unlink()
    assert shipped.shipped_models() == ["inline_deit_study"]
    subjects = load_subjects(device=CPU)
    assert [subject.weights for subject in subjects] == [None, None, "inline_deit_study.safetensors"]
    assert {subject.model.embed_dim for subject in subjects} == {16}


def test_model_or_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("inline_deit_tiny").mkdir()  # a run that is called after its model
    assert split_model(["folder", "a.png"]) == (None, ["folder", "a.png"])
    assert split_model(["gone.png"]) == (None, ["gone.png"])
    assert split_model(["inline_deit_tiny.png"]) == (None, ["inline_deit_tiny.png"])
    assert split_model(["inline_deit_tiny.in1k", "a.png"]) == ("inline_deit_tiny.in1k", ["a.png"])
    assert split_model(["inline_deit_tiny", "a.png"]) == ("inline_deit_tiny", ["a.png"])
    with pytest.raises(ValueError, match="no file, folder or model 'inline_swim_tiny'; did you mean inline_swin_tiny"):
        split_model(["inline_swim_tiny", "folder"])
    with pytest.raises(ValueError, match="there are no images"):
        split_model(["inline_deit_tiny"])


# What is in this package


@pytest.mark.parametrize("name", shipped.SHIPPED)
def test_weights_of_this_package(name: str) -> None:
    path = shipped.shipped_weights(name)
    assert path is not None
    about = read_metadata(path)
    assert {"recipe", "data", "seed", "top1"} <= about.keys()
    card = (shipped.FOLDER / "README.md").read_text()
    assert f"{about['top1']} %" in card
    classifier = load_classifier(name, "pretrained")
    assert len(classifier.class_names or []) == deit.STUDY["num_classes"]
    assert classifier.data.eval_transform == "resize"


def test_weights_of_this_package_are_small() -> None:
    assert sum(path.stat().st_size for path in shipped.FOLDER.glob("*.safetensors")) < 15e6
