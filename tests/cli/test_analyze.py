"""`inline analyze` end to end, on small models."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from inline_attention.analysis import measures
from inline_attention.analysis.subjects import parse_model
from inline_attention.cli import main
from inline_attention.data.samples import sample_photographs

ANALYSES = ("injectivity", "confusion", "locality", "maps", "masking", "rank")
VIT = "vit_tiny_patch16_224,img_size=32,embed_dim=16,depth=2,num_heads=2,num_classes=4"


def analyze(*arguments: object) -> int:
    return main(["analyze", *map(str, arguments), "--device", "cpu"])


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def check_files(out: Path, name: str) -> None:
    assert read(out / f"{name}.json")["analysis"] == name
    with Image.open(out / f"{name}.png") as picture:
        assert min(picture.size) > 300
    assert (out / f"{name}.svg").read_text().lstrip().startswith("<?xml")
    header, *lines = csv.reader((out / f"{name}.csv").open())
    assert lines
    assert all(len(line) == len(header) for line in lines)


def test_injectivity_needs_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert analyze("injectivity", "--output", tmp_path / "new" / "folder") == 0
    check_files(tmp_path / "new" / "folder", "injectivity")
    panels = read(tmp_path / "new" / "folder" / "injectivity.json")["panels"]
    for panel in panels:
        verdicts = {kind: rows["verdict"] for kind, rows in panel["rows"].items()}
        assert verdicts == {"softmax": "all different", "linear": "all equal", "inline": "all different"}
    assert "linear: verdict all equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["locality", "--taus", 0.1], "--taus is an option of confusion, not of locality"),
        (["injectivity", "inline_deit_tiny"], "injectivity uses no model and no images: leave them out"),
        (["injectivity", "--data", "digits"], "injectivity uses no model and no images: leave them out"),
        (["rank", "--split", "test"], "--split test is a split of --data: give --data too"),
        (["rank", "inline_deit_tinny"], "did you mean inline_deit_tiny"),
    ],
)
def test_what_an_analysis_cannot_use_is_refused_before_it_writes(
    arguments: list[object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert analyze(*arguments, "--output", tmp_path / "out") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_all_compares_models(weights: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trained weights file, which names its model, beside an untrained model with another attention."""
    small = "img_size=8,in_chans=1,embed_dim=16,depth=1,num_heads=2,patch_size=2,num_classes=10"
    models = ("inline_deit_tiny", f"inline_deit_tiny,attention=softmax,{small}")
    files = ("--weights", weights, "none", "--images", images / "a.png", images / "b.jpg")
    assert analyze("all", *models, *files, "--sides", 1, "--output", tmp_path / "out") == 0
    for name in ANALYSES:
        check_files(tmp_path / "out", name)
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(f'id="{name}"' in page for name in ANALYSES)
    # One file: every source is in the page, and nothing points elsewhere.
    assert all(source.startswith("data:image/png;base64,") for source in re.findall(r'src="([^"]{1,40})', page))
    assert not re.search(r"https?:|<script|<link|@import|url\(", page)
    labels = ["inline_deit_tiny (inline)", "inline_deit_tiny (softmax)"]
    masking = read(tmp_path / "out" / "masking.json")
    assert [model["label"] for model in masking["models"]] == labels
    assert masking["parameters"] == {"sides": [1], "seed": 0}
    assert masking["models"][0]["weights"] == str(weights)
    assert masking["models"][1]["weights"] == "none: as initialised"
    none = masking["models"][0]["result"]["outcomes"][0]
    assert (none["condition"]["what"], none["agreement"], none["top1"]) == ("none", 1.0, None)
    confusion = read(tmp_path / "out" / "confusion.json")
    assert confusion["parameters"] == {"taus": [0.03, 0.1, 0.3], "rhos": [0.3, 1.0], "layers": None}
    assert len(confusion["models"][0]["result"]["by_image"]) == 2
    printed = capsys.readouterr()
    assert "report.html" in printed.out
    assert (
        "warning: 2 images are too few for masking: give at least 100 before relying on its numbers; each"
        in printed.err
    )
    assert "2 images are too few for confusion" in page


def test_data_with_labels(weights: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a mask, the accuracy is that of `inline eval`."""
    common = ("--weights", weights, "--data", "digits", "--workers", 0)
    assert analyze("masking", *common, "--batch-size", 100, "--sides", 1, "--output", tmp_path) == 0
    result = read(tmp_path / "masking.json")["models"][0]["result"]
    assert main(["eval", "inline_deit_tiny", *map(str, common), "--json", str(tmp_path / "eval.json")]) == 0
    top1 = read(tmp_path / "eval.json")["top1"] / 100
    assert result["images"] == 450
    assert "too few" not in capsys.readouterr().err
    assert result["top1"] == pytest.approx(top1)
    assert result["outcomes"][0]["top1"] == pytest.approx(top1)


def test_timm_on_the_sample_photographs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert analyze("rank", VIT, "--output", out) == 0
    assert capsys.readouterr().out.endswith(f"\n{out / 'rank.png'}\n")
    model = read(out / "rank.json")["models"][0]
    assert (model["images"], model["img_size"], model["attention"]) == (2, "32×32", "softmax")
    assert [Path(p).name for p in sample_photographs()] == ["china.jpg", "flower.jpg"]
    assert model["result"]["tokens"] == [5, 5]


def test_weights_of_timm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A weights file with timm's names is analysed with its own weights."""
    name, arguments = parse_model(VIT)
    model = timm.create_model(name, **arguments)
    for block in model.blocks:  # keys without a direction: every row is uniform, and the rank is 1
        torch.nn.init.zeros_(block.attn.qkv.weight[16:32])
        torch.nn.init.zeros_(block.attn.qkv.bias[16:32])
    save_file(model.state_dict(), tmp_path / "vit.safetensors")
    assert analyze("rank", VIT, "--weights", tmp_path / "vit.safetensors", "--output", tmp_path) == 0
    assert read(tmp_path / "rank.json")["models"][0]["summary"]["mean_numerical"] == 1
    other = VIT.replace("depth=2", "depth=1")
    assert analyze("rank", other, "--weights", tmp_path / "vit.safetensors", "--output", tmp_path) == 2
    assert "does not fit the model" in capsys.readouterr().err


def test_parameters_and_limits(weights: Path, tmp_path: Path) -> None:
    common = ("--weights", weights, "--data", "digits", "--workers", 0, "--max-images", 5, "--batch-size", 3)
    assert analyze("confusion", *common, "--taus", 0.2, 0.5, "--rhos", 0, "--layers", -1, "--output", tmp_path) == 0
    content = read(tmp_path / "confusion.json")
    assert content["parameters"] == {"taus": [0.2, 0.5], "rhos": [0], "layers": [-1]}
    assert len(content["models"][0]["result"]["by_image"]) == 5
    assert analyze("maps", *common, "--query", 0.1, 0.9, "--head", 1, "--output", tmp_path) == 0
    assert read(tmp_path / "maps.json")["models"][0]["result"][0]["query"] == [0.1, 0.9]


def test_errors(weights: Path, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save({"x": torch.zeros(1)}, tmp_path / "other.pth")
    for arguments, message in (
        (("inline_deit_tiny", "softmax_deit_tiny", "--weights", weights), "2 models and 1 weights"),
        (("--weights", tmp_path / "other.pth"), "does not say which model it is for"),
        (("inline_deit_tiny,linear",), "expected NAME,key=value"),
        (("--weights", weights, "--labels", "a", "b"), "1 models and 2 labels"),
        (("--weights", weights, "--max-images", 0), "--max-images is 0"),
        (("--weights", weights, "--layers", 7), "there is no layer 7"),
        (("--weights", weights, "--images", images / "gone.png"), "does not exist"),
        ((VIT, "--weights", weights), "holds weights of inline_deit_tiny"),
        (("resnet18",), "has no attention that can be written out"),
        (("--weights", weights, "--images", images / "bad.png"), "there are no images"),
    ):
        assert analyze("rank", *arguments, "--output", tmp_path / "out") == 2
        assert message in capsys.readouterr().err
    assert analyze("maps", "--weights", weights, "--images", images / "bad.png", "--output", tmp_path / "out") == 2
    assert "there are no images" in capsys.readouterr().err
    assert analyze("maps", "--weights", weights, "--head", 2, "--output", tmp_path / "out") == 2
    assert "head 2 is not in every layer; expected 0 to 1" in capsys.readouterr().err
    assert analyze("rank", "--weights", weights, "--output", weights) == 2
    assert f"{weights} is a file; expected a folder" in capsys.readouterr().err


def test_trained_with_another_attention(tmp_path: Path) -> None:
    """A run with attention=focused in its recipe, and the analysis of what it saved."""
    settings = (
        "model.kwargs.attention=focused",
        "model.kwargs.depth=1",
        "schedule.epochs=1",
        "schedule.warmup_epochs=0",
    )
    assert main(["train", "quickstart", *settings, "--device", "cpu", "--output", str(tmp_path / "run")]) == 0
    file = tmp_path / "run" / "checkpoints" / "best.safetensors"
    common = ("--weights", file, "--data", "digits", "--workers", 0, "--max-images", 4)
    assert analyze("rank", *common, "--output", tmp_path) == 0
    model = read(tmp_path / "rank.json")["models"][0]
    assert (model["model"], model["attention"], model["images"]) == ("inline_deit_tiny", "focused", 4)


NEW_ANALYSIS = '''
from dataclasses import dataclass

from inline_attention.analysis.base import Analysis, option


@dataclass(frozen=True, kw_only=True)
class Brightness(Analysis):
    """How bright are the images?"""

    least_images = 3

    power: int = option(1, "of the pixels", type=int)

    def measure(self, subject, on_images):
        means = [float(image.pow(self.power).mean()) for batch in subject.images() for image in batch]
        on_images(len(means))
        return means

    def summarise(self, result):
        return dict(images=len(result), mean=sum(result) / len(result))

    def table(self, results):
        return ("model", "image", "mean"), [(m, i, x) for m, means in results.items() for i, x in enumerate(means)]

    def draw(self, results):
        from inline_attention.analysis import figures

        figure = figures.new_figure(5, 4)
        figure.subplots().plot(*results.values())
        return figure
'''


def test_an_analysis_is_one_file(weights: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name, options, table, picture and definition reach the command and the report."""
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "brightness.py").write_text(NEW_ANALYSIS)
    monkeypatch.setattr(measures, "__path__", [str(folder)])  # alone: the others take their time
    common = ("--weights", weights, "--images", images / "a.png", "--output", tmp_path / "out")
    assert analyze("all", *common, "--power", 2) == 0
    check_files(tmp_path / "out", "brightness")
    content = read(tmp_path / "out" / "brightness.json")
    assert content["parameters"] == {"power": 2}
    assert content["warning"].startswith("1 image is too few for brightness: give at least 3")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "How bright are the images?" in page
