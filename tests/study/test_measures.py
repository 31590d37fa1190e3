"""Measurements of trained models: what they write, on models as small as they take."""

import pytest
import torch

from inline_attention.bench.timing import Effort
from inline_attention.models import create_model
from study import measures
from study.grid import Run

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
