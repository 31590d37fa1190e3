"""Dense models against their softmax twins: the models that are built, and their records."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from inline_attention.bench import contenders
from inline_attention.bench import model as bench
from inline_attention.bench.record import read_record
from inline_attention.bench.timing import Effort
from inline_attention.cli import main
from inline_attention.layers import InLineAttention
from inline_attention.tasks.detection.model import create_detector

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def settings(model: str, *, tasks: list[str], img_size: tuple[int, int] | None = None) -> list[bench.Setting]:
    return bench.make_dense_settings([model], img_size=img_size, batch=None, tasks=tasks)


def build(setting: bench.Setting, contender: str) -> nn.Module:
    return contenders.CONTENDERS[contender].build(setting.model, setting.img_size)


def test_contenders_differ_in_the_backbone_alone() -> None:
    [setting] = settings("fpn-pvt_tiny", tasks=["infer"])
    assert setting.img_size == (512, 2048)
    with torch.device("meta"):
        models = {name: build(setting, name) for name in contenders.OF_DENSE_MODELS}
    heads = {contender: {n: p.shape for n, p in m.head.named_parameters()} for contender, m in models.items()}
    assert heads["fused"] == heads["softmax"]
    backends = {
        contender: {module.backend for module in model.modules() if isinstance(module, InLineAttention)}
        for contender, model in models.items()
    }
    assert backends == {"fused": {"triton"}, "reference": {"reference"}, "softmax": set()}


@pytest.mark.parametrize("head", ["mask_rcnn", "cascade_mask_rcnn"])
def test_detectors_have_objects_to_find_and_to_learn(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "create_detector", partial(create_detector, channels=32, regions=16))
    [setting] = settings(f"{head}-pvt_tiny", tasks=["train"])
    assert setting.img_size == (800, 1280)
    torch.manual_seed(0)
    model = build(setting, "reference").eval()
    images = torch.randn(1, 3, 256, 256)
    with torch.no_grad():
        (found,) = model(images)
    assert len(found.scores) > 30
    assert set(found.labels.tolist()) == {1}
    assert contenders.training_loss(setting.model, images)(model.train()).isfinite()


def test_the_command_measures_records_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, picture = tmp_path / "dense.json", tmp_path / "dense.png"
    command = ["bench", "dense", "fpn-pvt_tiny", "--img-size", "64", "--modes=eager", "--quick", "--device=cpu"]
    assert main([*command, "--infer", f"--json={record}", f"--picture={picture}"]) == 0
    results = json.loads(record.read_text())["results"]
    assert [(r["contender"], r["task"]) for r in results] == [("reference", "infer"), ("softmax", "infer")]
    assert all(r["error"] is None and r["timing"]["median"] > 0 for r in results)
    assert np.asarray(Image.open(picture).convert("L")).std() > 5
    shown = capsys.readouterr().out
    again = tmp_path / "again.png"
    assert main(["bench", "table", str(record), f"--picture={again}"]) == 0
    assert again.read_bytes() == picture.read_bytes()
    rows = [[[cell.strip() for cell in line.split("|")] for line in text.splitlines() if "| softmax " in line]
            for text in (shown, capsys.readouterr().out)]  # fmt: skip
    assert len(rows[0]) == 1
    assert rows[0] == rows[1]
    assert all("1.00" in row for row in rows[0])  # its speed over its own


def test_the_table_of_the_documentation_is_that_of_its_record() -> None:
    _, _, results = read_record(RESULTS / "dense-h200.json", kinds=["dense"])
    assert bench.model_table(results).strip() in (RESULTS / "dense-tables.md").read_text()


@pytest.mark.parametrize("names", [["op-h200"], ["dense-h200", "models-h200"]])
def test_records_that_make_no_picture(names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [str(RESULTS / f"{name}.json") for name in names]
    assert main(["bench", "table", *records, f"--picture={tmp_path / 'x.png'}"]) == 2
    assert "expected records of model and sweep, or of dense" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("contender", ["reference", "softmax"])
def test_training_steps(contender: str) -> None:
    [setting] = settings("upernet-swin_tiny", tasks=["train"], img_size=(64, 64))
    options = dict(modes=["eager"], device=torch.device("cpu"), dtype=torch.float32)
    [result] = bench.run_setting(setting, contenders=[contender], effort=Effort(rounds=2, seconds=0), **options)
    assert result.error is None
    assert result.timing is not None
    assert result.images_per_second == 2 / result.timing.median


@pytest.mark.parametrize("model", ["upernet-swin_tiny", "mask_rcnn-pvt_tiny"])
def test_the_usual_batch_can_be_trained_on(model: str) -> None:
    assert [setting.batch for setting in settings(model, tasks=["infer", "train"])] == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-size=0"], "--batch-size 0: expected 1 or more"),
        (["--batch-size=1", "--train"], "give --batch-size 2, or --infer"),
        (["--img-size", "0", "4"], "--img-size is 0 4; expected a side, or height and width"),
    ],
)
def test_settings_that_there_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "dense", "upernet-swin_tiny", "--device=cpu", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["fpn", "unet-pvt_tiny", "fpn-pvt_huge"])
def test_models_that_there_are_not(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "dense", name, "--device=cpu"]) == 2
    assert f"there is no dense model '{name}'" in capsys.readouterr().err
