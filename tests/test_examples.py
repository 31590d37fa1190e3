"""The scripts in examples/ run as they are, on the data that they make, and print what they promise."""

import re
import runpy
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "examples"
HELPER = "photo_data"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != HELPER)
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a script in this process, in an empty folder, and returns what it printed."""

    def run_script(name: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.syspath_prepend(str(FOLDER))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        with torch.random.fork_rng():
            runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run_script


def percent(text: str, pattern: str) -> float:
    found = re.search(pattern + r"\D*?([\d.]+)%", text)
    assert found is not None, text
    return float(found[1])


def test_there_are_eight_short_ones_with_a_picture_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(SCRIPTS) == 8
    for name in SCRIPTS:
        assert len((FOLDER / f"{name}.py").read_text(encoding="utf-8").splitlines()) <= 60, name
        assert re.search(rf"\(examples/{name}\.py\).*!\[.+\]\(docs/images/example-\w+\.(jpg|png)\)", readme), name


def test_attention_maps(run: Run) -> None:
    text = run("attention_maps", "--layers", "0", "6")
    assert Path("runs/maps.png").stat().st_size > 1000
    sums = [float(value) for value in re.findall(r"\d\.\d\d", text)]
    assert len(sums) == 4
    assert all(0.9 < value < 1.1 for value in sums)  # a row sums to one, the class token's weight included


def test_retrieval(run: Run) -> None:
    lines = run("retrieval").splitlines()[:-1]
    assert len(lines) == 6
    found = [(line.split("/")[0], re.findall(r"(\w+)/\d+\.jpg[,\n]", f"{line.split(': ')[1]}\n")) for line in lines]
    same = [name == own for own, names in found for name in names]
    assert len(same) == 30
    assert sum(same) >= 24  # neighbours come from the photograph of the query
    assert Path("runs/retrieval.jpg").exists()


def test_linearize_model(run: Run) -> None:
    text = run("linearize_model")
    assert text.count("→ tangent, with residual") == 7
    assert percent(text, "calibrated:") >= 50
    assert "at 256 pixels: (1, 100)" in text
    assert Path("runs/linear.png").exists()


@pytest.mark.slow
def test_own_network(run: Run) -> None:
    assert percent(run("own_network").splitlines()[-2], "accuracy") > 90
    assert Path("runs/digits.jpg").exists()


@pytest.mark.slow
def test_finetune_and_export(run: Run) -> None:
    text = run("finetune_and_export")
    assert percent(text, "top-1 of the validation images:") > 80
    difference = re.search(r"([\d.e-]+) from the model", text)
    assert difference is not None
    assert float(difference[1]) < 1e-4
    guesses = re.findall(r"val/(\w+)/\d+\.jpg: (\w+)", text)
    assert sum(own == guess for own, guess in guesses) >= len(guesses) - 1 >= 2
    assert Path("runs/example/guesses.jpg").exists()


@pytest.mark.slow
def test_segment_masks(run: Run) -> None:
    assert percent(run("segment_masks"), "mIoU of the validation images:") > 60
    assert Path("runs/segment/segmented/flower.overlay.jpg").exists()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("pycocotools") is None, reason="pycocotools is not installed")
def test_detect_boxes(run: Run) -> None:
    text = run("detect_boxes")
    assert percent(text, "AP50 of the validation images:") > 30
    assert "flower 0." in text
    assert Path("runs/detect/found/00.jpg").exists()


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed (pip install transformers)"
)
def test_transformers_pipeline(run: Run) -> None:
    text = run("transformers_pipeline")
    assert re.search(r"^china.jpg [a-z ,]+ 0\.\d\d", text, flags=re.MULTILINE)  # words, not WordNet numbers
    assert Path("runs/hf/guesses.jpg").exists()
    difference = re.search(r"from the model itself: ([\d.e-]+)", text)
    assert difference is not None
    assert float(difference[1]) < 1e-4
