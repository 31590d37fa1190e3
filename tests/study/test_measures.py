"""Measurements of trained models: what they write, on models as small as they take."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from study_results import analysis, write_runs

from inline_attention.bench.timing import Effort
from inline_attention.models import create_model
from study import measures
from study.grid import Run
from study.report import analysis_table
from study.results import collect

RUNS = [Run("digits", row, 8, 0, 2) for row in ("softmax", "inline")]


def test_speed_of_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(run: Run) -> torch.nn.Module:
        if run.row == "softmax":
            raise RuntimeError("out of memory")
        sizes = dict(embed_dim=8, depth=1, num_heads=2, patch_size=2, img_size=8, in_chans=1)
        return create_model("inline_deit_tiny", num_classes=10, **sizes)

    monkeypatch.setattr(measures, "build_model", build)
    found = measures.measure_speed(
        RUNS, device=torch.device("cpu"), effort=Effort(rounds=2, seconds=1e-4), log=lambda line: None
    )
    inline, softmax = (found["rows"][f"digits-p2-{row}"] for row in ("inline", "softmax"))
    assert inline["train"] > 0
    assert inline["infer"] > inline["train"]
    assert (softmax["train"], softmax["infer"]) == (None, None)  # it failed, and the other was timed
    assert inline.keys() == {"batch", "train", "infer", "train_peak_bytes", "infer_peak_bytes"}


class Opened(Exception):
    pass


@pytest.mark.parametrize("patch", [4, 16])
def test_every_analysis_has_as_many_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch: int) -> None:
    """Also with 1,025 tokens."""

    def open_model(*_: Any, images: int, **__: Any) -> None:
        raise Opened(images)

    run = Run("imagenette", "inline", 30, 0, patch)
    monkeypatch.setattr(measures, "open_model", open_model)
    with pytest.raises(Opened, match=r"^1000$"):
        measures.analyse_runs(
            tmp_path, paths={"imagenette": ""}, device=torch.device("cpu"), shipped={run: Path(__file__)}, log=print
        )


def test_the_rank_has_an_interval_over_images() -> None:
    torch.manual_seed(0)
    model = create_model("inline_deit_tiny", embed_dim=8, depth=2, num_heads=2, patch_size=2, img_size=8, in_chans=1)
    batches = [SimpleNamespace(images=chunk) for chunk in torch.randn(60, 1, 8, 8).split(20)]
    found = measures.PARTS["rank"](model.eval(), batches)  # type: ignore[arg-type]
    assert found["images"] == 60
    low, high = found["interval"]
    assert low < found["mean_effective"] < high
    assert high - low < found["mean_effective"]


def test_a_rank_of_few_images_says_so(tmp_path: Path) -> None:
    """Stored analyses stay as they are."""
    old, new = analysis(local=0.0, random=0.0), analysis(local=0.0, random=0.0)
    new["rank"]["interval"] = [2.5, 3.5]
    write_runs(tmp_path, {"linear": [40.0], "inline": [40.0]}, analyses={"linear": old, "inline": new})
    lines = analysis_table(collect(tmp_path)).splitlines()
    assert lines[0].endswith("| effective rank |")
    assert sorted(line.split(" | ")[-1] for line in lines[2:]) == ["3.0 (10 images) |", "3.0 (2.5 to 3.5) |"]
