"""Real runs of `inline detect` on drawn shapes, in processes of their own: learning, resuming, ranks, files."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import training_runs as _runs
from coco_shapes import draw_shapes
from PIL import Image

from inline_attention.cli import main

pytest.importorskip("pycocotools")

KWARGS = "{embed_dims: [8, 16, 16, 32], depths: [1, 1, 2, 1], num_heads: [1, 2, 2, 4]}"
# Everything random is on: image sizes, flips, the choice of regions, stochastic depth; and an average of the weights.
TINY = (
    f"model.kwargs={KWARGS}",
    "model.channels=32",
    "model.regions=16",
    "model.weights=null",
    "model.drop_path=0.3",
    "data.val_split=val",  # stored in the weights, so that `eval` needs no option
    "data.short_side=64",
    "data.train_short_sides=[48, 64]",
    "data.batch_size=4",
    "data.workers=0",
    "optim.lr=2e-3",
    "optim.rate_batch=4",
    "schedule.epochs=2",
    "schedule.drop_at=[1.5]",
    "schedule.warmup_steps=2",
    "ema.decay=0.5",
    "ema.batch=null",
    "log.every_steps=1",
    "log.eval_epochs=2",
    "log.tensorboard=false",
)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shapes")
    draw_shapes(root, split="train2017", images=17, seed=1)
    draw_shapes(root, split="val", images=5, seed=2)
    return root


def arguments(shapes: Path, output: Path, *more: str, recipe: str = "mask_rcnn_inline_pvt_tiny_1x") -> list[str]:
    """Four updates of four images an epoch"""
    settings = [item for item in more if not item.startswith("--")]
    flags = [item for item in more if item.startswith("--")]
    return [
        "detect", "train", recipe, *TINY, *settings,
        f"--data={shapes}", f"--output={output}", "--device=cpu", "--deterministic", *flags,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "one"
    log = output.parent / "log.txt"
    assert _runs.run(arguments(shapes, output), log=log) == 0, log.read_text()
    return output


def test_a_run_leaves_its_figures_behind(undisturbed: Path) -> None:
    summary = json.loads((undisturbed / "summary.json").read_text())
    precision = json.loads((undisturbed / "average_precision.json").read_text())
    assert summary["model"] == "inline_pvt_tiny + Mask R-CNN"
    assert summary["updates"] == 8
    assert summary["val_box_ap"] == pytest.approx(precision["box"]["AP"])
    assert summary["val_mask_ap50"] == pytest.approx(precision["mask"]["AP50"])
    assert precision["images"] == 5
    rows = (undisturbed / "per_class.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["class", "disc", "square", "triangle"]
    records = _runs.metrics(undisturbed)
    assert [record["update"] for record in records] == list(range(1, 9))
    for record in records:
        parts = ("proposal_score", "proposal_box", "class", "box", "mask")
        assert sum(record[f"loss_{part}"] for part in parts) == pytest.approx(record["loss"], rel=1e-5)


def test_killed_and_resumed_it_is_the_same_run(shapes: Path, undisturbed: Path, tmp_path: Path) -> None:
    output, log = tmp_path / "run", tmp_path / "log.txt"
    command = arguments(shapes, output, "checkpoint.every_steps=1", "--resume=auto")
    for updates in (2, 5):
        process = _runs.start(command, log=log)
        while process.is_alive() and not (output / "checkpoints" / f"step-{updates:08d}").exists():
            time.sleep(0.001)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
    assert _runs.run(command, log=log) == 0, log.read_text()[-2000:]
    assert "5 updates done" in log.read_text() or "6 updates done" in log.read_text()
    assert [r["loss"] for r in _runs.metrics(output)] == [r["loss"] for r in _runs.metrics(undisturbed)]
    assert _runs.metrics(output, "eval") == _runs.metrics(undisturbed, "eval")
    _runs.assert_same_weights(output, undisturbed)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_two_ranks_are_one(shapes: Path, undisturbed: Path, tmp_path: Path, strategy: str) -> None:
    """Losses of each update, and the figures over all images, each of them counted once.

    In the last update of this run a box is on the edge of an overlap. Ranks add gradients in another order, and the
    rounding may move it to the other side. So does a learning rate that differs by 1e-7 on one rank. The loss then
    differs by 2e-4, about what one of its 64 regions can change.
    """
    output, log = tmp_path / "run", tmp_path / "log.txt"
    command = arguments(shapes, output, "data.batch_size=2", f"run.strategy={strategy}")
    assert _runs.run_ranks(command, 2, log=log) == [0, 0], log.read_text()[-3000:]
    one, two = _runs.metrics(undisturbed), _runs.metrics(output)
    first, second = ([record["loss"] for record in records] for records in (one, two))
    assert second[:-1] == pytest.approx(first[:-1], rel=1e-6)
    assert second[-1] == pytest.approx(first[-1], rel=1e-3)
    (evaluation,), (reference,) = _runs.metrics(output, "eval"), _runs.metrics(undisturbed, "eval")
    assert evaluation["val_images"] == 5
    assert evaluation["val_box_ap"] == pytest.approx(reference["val_box_ap"])


@pytest.mark.slow
def test_two_ranks_are_one_for_a_cascade(shapes: Path, tmp_path: Path) -> None:
    """Over three updates: later, a box on the edge of an overlap of 0.6 may fall to the other side on one of them."""
    kwargs = "model.kwargs={embed_dim: 8, depths: [1, 1, 2, 1], num_heads: [1, 2, 2, 4]}"
    losses = []
    for ranks in (1, 2):
        output, log = tmp_path / f"run{ranks}", tmp_path / f"log{ranks}.txt"
        settings = (kwargs, f"data.batch_size={4 // ranks}", "schedule.steps=3", "schedule.drop_at=[]")
        command = arguments(shapes, output, *settings, recipe="cascade_mask_rcnn_inline_swin_tiny_1x")
        assert _runs.run_ranks(command, ranks, log=log) == [0] * ranks, log.read_text()[-3000:]
        losses.append([record["loss"] for record in _runs.metrics(output)])
    assert len(losses[0]) == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_eval_and_predict(shapes: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = f"--weights={undisturbed / 'checkpoints' / 'last.safetensors'}"
    result, classes = tmp_path / "result.json", tmp_path / "classes.csv"
    command = ["detect", "eval", weights, f"--data={shapes}", "--device=cpu", "--workers=0"]
    examples = tmp_path / "examples.png"
    assert main([*command, f"--json={result}", f"--csv={classes}", f"--examples={examples}"]) == 0
    assert Image.open(examples).size == Image.open(undisturbed / "examples.png").size
    printed = capsys.readouterr().out
    (record,) = _runs.metrics(undisturbed, "eval")
    facts = json.loads(result.read_text())
    assert facts["box"]["AP"] == pytest.approx(record["val_box_ap"], rel=1e-6)
    assert facts["images"] == 5
    assert "5 images" in printed
    assert classes.read_text().startswith("class,box AP,mask AP\ndisc,")

    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    pictures = tmp_path / "pictures"
    command = ["detect", "predict", weights, str(shapes / "val"), str(broken), "--min-score=0", "--device=cpu"]
    assert main([*command, f"--output={pictures}"]) == 0
    content = json.loads((pictures / "objects.json").read_text())
    assert [Path(entry["image"]).name for entry in content["images"]] == [f"{n:04d}.png" for n in range(5)]
    assert [Path(entry["path"]).name for entry in content["skipped_images"]] == ["broken.png"]
    assert "0000.png: " in capsys.readouterr().out
    assert sorted(path.name for path in pictures.glob("*.jpg")) == [f"{n:04d}.jpg" for n in range(5)]
    assert Image.open(pictures / "0000.jpg").size == (96, 64)
    first = content["images"][0]["objects"][0]
    assert first["class"] in ("disc", "square", "triangle")
    assert first["mask"]["size"] == [64, 96]


def test_the_command_says_what_is_wrong(
    shapes: Path, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["detect", "train", "mask_rcnn_inline_pvt_tiny_1x", "model.weights=null"]) == 2
    assert "no data: give --data FOLDER with annotations/instances_SPLIT.json" in capsys.readouterr().err
    assert main(["detect", "train", "mask_rcnn_inline_pvt_tny_1x", f"--data={shapes}"]) == 2
    assert "did you mean mask_rcnn_inline_pvt_tiny_1x?" in capsys.readouterr().err
    weights = f"--weights={undisturbed / 'checkpoints' / 'last.safetensors'}"
    assert main(["detect", "predict", weights, str(shapes / "val"), "--min-score=50"]) == 2
    assert "--min-score is 50; expected a score from 0 to 1" in capsys.readouterr().err
    for option in ("--short-side=0", "--max-side=0", "--workers=-1"):
        assert main(["detect", "predict", weights, str(shapes / "val"), option]) == 2
        assert f"{option.replace('=', ' is ')}; expected" in capsys.readouterr().err
    other = tmp_path / "other.safetensors"
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, other)
    assert main(["detect", "eval", f"--weights={other}", f"--data={shapes}"]) == 2
    assert "is not a weights file of `inline detect train`" in capsys.readouterr().err
    draw_shapes(tmp_path, split="val", images=1)
    annotations = tmp_path / "annotations" / "instances_val.json"
    annotations.write_text(annotations.read_text().replace('"disc"', '"ring"'))
    assert main(["detect", "eval", weights, f"--data={tmp_path}"]) == 2
    assert "has classes that the model does not know: ring" in capsys.readouterr().err
