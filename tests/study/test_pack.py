"""Rows of the grid become the package's weights: which runs, and real ones, on data as small as they take."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from inline_attention import create_model
from inline_attention.data import DataConfig
from inline_attention.models import shipped
from inline_attention.models.weights import load_model, read_metadata, save_weights
from inline_attention.tasks.classification.classifier import preprocessing
from study.__main__ import main
from study.grid import Run
from study.measures import weights_file
from study.pack import PACKED_ROWS, pack_best, pack_models, shipped_runs
from study.results import Results, RunResult, collect
from study.runner import GridRunner

SETTINGS = ["run.compile=false", "data.batch_size=50", "data.workers=0", "device=cpu"]
RUNS = [Run("tiny_imagenet", row, 1, 0, 4) for row in PACKED_ROWS.values()]


def make_images(root: Path) -> None:
    noise = np.random.default_rng(0)
    for split in ("train", "val"):
        for number in range(100):
            (root / split / f"n{number:08}").mkdir(parents=True)
            pixels = noise.integers(0, 255, (64, 64, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / split / f"n{number:08}" / "0.png")


def finished(out: Path, row: str, *, epochs: int, seed: int = 0, top1: float = 1.0) -> RunResult:
    """A finished run with untrained weights."""
    run = Run("tiny_imagenet", row, epochs, seed, 4)
    (name,) = (name for name, packed in PACKED_ROWS.items() if packed == row)
    prepared = preprocessing(DataConfig(eval_transform="resize", interpolation="bilinear"))
    about = {"class_names": json.dumps([f"class {number}" for number in range(100)]), "preprocessing": prepared}
    file = weights_file(out / run.name)
    file.parent.mkdir(parents=True)
    save_weights(create_model(name), file, metadata=about)
    return RunResult(
        run, out / run.name, top1, best=top1, images=5000, curve=[], seconds=1.0, analysis=None, changed=[],
        commit="1 (abc)", machine="a cpu",
    )  # fmt: skip


def as_results(runs: list[RunResult]) -> Results:
    return Results(runs, again=[], failures={}, sessions=[], probes=None, speed=None, sweep=None)


def test_the_longest_training_is_packed(tmp_path: Path) -> None:
    """It is chosen although a shorter one has more seeds. Its first seed is packed, although the second is better."""
    short = [finished(tmp_path, row, epochs=40, seed=seed) for row in PACKED_ROWS.values() for seed in (0, 1, 2)]
    long = [finished(tmp_path, row, epochs=120, top1=10 + len(row)) for row in PACKED_ROWS.values()]
    better = finished(tmp_path, "inline", epochs=120, seed=1, top1=90.0)
    results = as_results([*short, *long, better])
    assert results.main_setting is not None
    assert results.main_setting.epochs == 40
    for path, source in zip(pack_models(results, folder=tmp_path / "packed"), long, strict=True):
        about = read_metadata(path)
        assert PACKED_ROWS[path.stem] == source.run.row
        assert (about["seed"], about["top1"]) == ("0", f"{source.top1:.2f}")
        assert "schedule.epochs=120" in about["recipe"].split()


def test_a_length_that_lacks_a_row_is_not_packed(tmp_path: Path) -> None:
    """The three are compared: they are trained equally long."""
    short = [finished(tmp_path, row, epochs=40) for row in PACKED_ROWS.values()]
    long = [finished(tmp_path, row, epochs=120) for row in ("linear", "inline")]
    files = pack_models(as_results([*short, *long]), folder=tmp_path / "packed")
    assert all("schedule.epochs=40" in read_metadata(path)["recipe"].split() for path in files)
    with pytest.raises(ValueError, match="257 tokens: no length has finished runs of all of softmax, linear, inline"):
        pack_models(as_results(long))
    with pytest.raises(ValueError, match="there is nothing to pack"):
        pack_models(as_results([]))


def published(out: Path, row: str, *, seed: int, top1: float, epochs: int = 300) -> RunResult:
    run = Run("tiny_imagenet", f"{row}_published", epochs, seed, 4)
    file = weights_file(out / run.name)
    file.parent.mkdir(parents=True)
    prepared = preprocessing(DataConfig(eval_transform="resize", interpolation="bilinear"))
    about = {"class_names": "[]", "preprocessing": prepared}
    config = run.config().model
    save_weights(create_model(config.name, img_size=64, num_classes=100, **config.kwargs), file, metadata=about)
    return RunResult(
        run, out / run.name, top1, best=top1, images=5000, curve=[], seconds=1.0, analysis=None, changed=[],
        commit="1 (abc)", machine="a cpu",
    )  # fmt: skip


def test_the_best_of_the_published_rows_is_packed(tmp_path: Path) -> None:
    """By the mean of the seeds, of the longest training. Its first seed is packed."""
    inline = [published(tmp_path, "inline", seed=seed, top1=top1) for seed, top1 in enumerate((55.0, 56.0))]
    softmax = [published(tmp_path, "softmax", seed=seed, top1=top1) for seed, top1 in enumerate((50.0, 60.0))]
    short = published(tmp_path, "inline", seed=0, top1=90.0, epochs=120)
    path = pack_best(as_results([*inline, *softmax, short]), folder=tmp_path / "packed")
    about = read_metadata(path)
    assert (path.stem, about["seed"], about["top1"]) == ("inline_deit_study", "0", "55.00")
    assert "schedule.epochs=300" in about["recipe"].split()
    with pytest.raises(ValueError, match="no run of the group published has finished"):
        pack_best(as_results([]))


def test_a_best_row_that_the_package_does_not_know(tmp_path: Path) -> None:
    runs = [published(tmp_path, row, seed=0, top1=top1) for row, top1 in (("inline", 50.0), ("linear_residual", 60.0))]
    with pytest.raises(ValueError, match="the package has no model like it: give a folder"):
        pack_best(as_results(runs))
    path = pack_best(as_results(runs), folder=tmp_path / "packed")
    assert path.name == "linear_residual_published.safetensors"
    model = load_model(path)
    assert model(torch.randn(1, 3, 64, 64)).shape == (1, 100)
    assert path.stat().st_size < 5e6


@pytest.mark.slow
def test_the_grid_makes_what_is_shipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_images(tmp_path / "images")
    out, packed = tmp_path / "study", tmp_path / "packed"
    runner = GridRunner(out, paths={"tiny_imagenet": str(tmp_path / "images")}, settings=SETTINGS)
    assert runner.make(RUNS).failed == []
    assert main(["pack", str(out), "--to", str(packed)]) == 0
    assert {path.stem for path in packed.iterdir()} == set(shipped.SHIPPED)
    assert sum(path.stat().st_size for path in packed.iterdir()) < 15e6
    results = collect(out)
    setting = results.main_setting
    assert setting is not None
    for name, row in PACKED_ROWS.items():
        about, result = read_metadata(packed / f"{name}.safetensors"), results.find(setting, row)
        assert result is not None
        assert about["top1"] == f"{result.top1:.2f}"
        assert about["recipe"].startswith("inline train study/study.yaml --data TINY_IMAGENET --seed 0")
        assert "of 100 validation images" in about["data"]
    x = torch.randn(2, 3, 64, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shipped, "FOLDER", packed)
        assert create_model("inline_deit_study", pretrained=True).eval()(x).shape == (2, 100)
    (out / RUNS[0].name / "checkpoints" / "last.safetensors").unlink()
    assert main(["pack", str(out), "--to", str(packed)]) == 2
    assert "last.safetensors is missing: softmax_deit_study is made from it" in capsys.readouterr().err


def test_the_files_of_the_package_are_runs_of_the_recorded_study(tmp_path: Path) -> None:
    """So that they can be analysed without the folders of their runs, and the report has the result."""
    record = Path(__file__).parents[2] / "docs" / "results" / "study.json"
    found = shipped_runs(collect(tmp_path, onto=record))
    assert {run.name: path.stem for run, path in found.items()} == {
        f"tiny_imagenet-p4-e120-{row}-s0": name for name, row in PACKED_ROWS.items()
    }
    run = next(iter(found))
    (tmp_path / run.name).mkdir()
    (tmp_path / run.name / "analysis.json").write_text('{"images": 1000}')
    (result,) = (result for result in collect(tmp_path, onto=record).runs if result.run == run)
    assert result.analysis == {"images": 1000}
