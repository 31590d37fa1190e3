"""`inline segment`: runs that are killed, spread over ranks, evaluated and used, on shapes drawn at run time."""

import csv
import json
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import shapes
import torch
import training_runs as _runs
from PIL import Image
from safetensors.torch import load_file, save_file

from inline_attention.models.weights import read_metadata
from inline_attention.tasks.segmentation.task import Segmentation
from inline_attention.tasks.segmentation.weights import load_segmenter
from inline_attention.training.config import load_recipe, recipe_names
from inline_attention.training.distributed import Ranks
from inline_attention.training.run_folder import plan_run

# Everything random is on: augmentation, stochastic depth, dropout of channels; and an average of the weights.
TINY = (
    "model.kwargs={embed_dim: 8, depths: [1, 1, 2, 1], num_heads: [1, 2, 2, 4]}",
    "model.weights=null",
    "model.drop_path=0.4",
    "model.head_kwargs={dim: 8}",
    "data.crop=32",
    "data.short_side=null",
    "data.batch_size=8",
    "data.workers=0",
    "data.in_memory=true",
    "schedule.steps=9",  # an epoch has 2: the last one is cut short
    "schedule.warmup_steps=2",
    "optim.lr=1e-2",
    "ema.decay=0.9",
    "ema.batch=null",
    "log.tensorboard=false",
    "log.every_steps=1",
    "log.eval_epochs=3",
)


def arguments(output: Path, *more: str) -> list[str]:
    flags = [item for item in more if item.startswith("--")]
    return [
        "segment", "train", "upernet_inline_swin_tiny", *TINY, *(item for item in more if not item.startswith("--")),
        f"--data={shapes.folder()}", "--device=cpu", "--deterministic", f"--output={output}", *flags,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("undisturbed") / "run"
    log = output.parent / "log.txt"
    assert _runs.run(arguments(output), log=log) == 0, log.read_text()
    return output


def test_the_folder_of_a_run(undisturbed: Path) -> None:
    summary = json.loads((undisturbed / "summary.json").read_text())
    evaluations = _runs.metrics(undisturbed, "eval")
    assert [record["update"] for record in evaluations] == [6, 9]
    assert evaluations[-1]["val_images"] == 5
    assert summary["val_miou"] == evaluations[-1]["val_miou"]
    assert summary["best_miou"] == max(max(r["val_miou"], r["ema_miou"]) for r in evaluations)
    assert (summary["updates"], summary["epochs"]) == (9, 5)
    assert summary["model"] == "inline_swin_tiny + UperNet"
    steps = _runs.metrics(undisturbed)
    assert [record["loss"] for record in steps] == pytest.approx(
        [record["loss_main"] + record["loss_auxiliary"] for record in steps], rel=1e-6
    )
    assert steps[-1]["loss"] < steps[0]["loss"]
    with open(undisturbed / "per_class.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == list(shapes.CLASSES)
    found = [float(row["iou"]) for row in rows if row["iou"]]
    assert np.mean(found) == pytest.approx(summary["val_miou"], abs=1e-3)
    picture = np.asarray(Image.open(undisturbed / "examples.png").convert("RGB"))
    assert picture.shape[1] == 3 * 480
    assert picture.std() > 5


@pytest.mark.slow
def test_killed_and_resumed_it_ends_with_the_same_weights(undisturbed: Path, tmp_path: Path) -> None:
    output, log = tmp_path / "run", tmp_path / "log.txt"
    command = arguments(output, "checkpoint.every_steps=1", "checkpoint.keep=20", "--resume=auto")
    kills = 0
    for update in (1, 4, 8):  # inside an epoch, at its end, in the last one
        process = _runs.start(command, log=log)
        while process.is_alive() and not (output / "checkpoints" / f"step-{update:08d}").exists():
            time.sleep(0.0005)
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
        kills += process.exitcode == -signal.SIGKILL
    assert kills == 3
    assert _runs.run(command, log=log) == 0, log.read_text()
    _runs.assert_same_weights(output, undisturbed)
    assert [r["loss"] for r in _runs.metrics(output)] == [r["loss"] for r in _runs.metrics(undisturbed)]
    assert _runs.metrics(output, "eval") == _runs.metrics(undisturbed, "eval")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_are_one(strategy: str, undisturbed: Path, tmp_path: Path) -> None:
    """The same images, masks, drops and batch statistics: the same losses, up to the order of sums."""
    log = tmp_path / "log.txt"
    command = arguments(tmp_path / "run", "data.batch_size=4", f"run.strategy={strategy}")
    assert _runs.run_ranks(command, 2, log=log) == [0, 0], log.read_text()
    assert "Warning" not in log.read_text()
    one, two = _runs.metrics(undisturbed), _runs.metrics(tmp_path / "run")
    assert [r["loss"] for r in two] == pytest.approx([r["loss"] for r in one], rel=1e-5)
    assert [r["grad_norm"] for r in two] == pytest.approx([r["grad_norm"] for r in one], rel=1e-3)
    assert [r["loss_auxiliary"] for r in two] == pytest.approx([r["loss_auxiliary"] for r in one], rel=1e-5)
    (*_, evaluation), (*_, reference) = (_runs.metrics(run, "eval") for run in (tmp_path / "run", undisturbed))
    assert evaluation["val_images"] == 5
    assert evaluation["val_miou"] == pytest.approx(reference["val_miou"], abs=0.5)  # a few pixels on the edge


def test_evaluating_and_predicting(undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = undisturbed / "checkpoints" / "last.safetensors"
    trained = load_segmenter(str(weights))
    load_segmenter(str(undisturbed / "checkpoints" / "ema.safetensors"))  # batch norm's counters too
    assert trained.class_names == list(shapes.CLASSES)
    saved = _runs.weights(undisturbed)
    assert all(torch.equal(value, saved[name]) for name, value in trained.model.state_dict().items())

    command = ["segment", "eval", f"--weights={weights}", f"--data={shapes.folder()}", "--device=cpu", "--workers=0"]
    outputs = [f"--json={tmp_path / 'a.json'}", f"--csv={tmp_path / 'a.csv'}", f"--examples={tmp_path / 'a.png'}"]
    assert _runs.inline([*command, *outputs]) == 0
    result = json.loads((tmp_path / "a.json").read_text())
    assert result["miou"] == pytest.approx(_runs.metrics(undisturbed, "eval")[-1]["val_miou"], abs=1e-9)
    assert (tmp_path / "a.csv").read_text().startswith("class,iou,accuracy,pixels")
    assert (tmp_path / "a.png").exists()
    assert _runs.inline([*command, "--window", "32", "--scales", "1", "1.5", "--flip", "--short-side", "40"]) == 0
    assert "mIoU" in capsys.readouterr().out

    for scale in ("0", "inf", "nan"):
        assert _runs.inline([*command, "--scales", scale]) == 2
        assert "expected positive numbers" in capsys.readouterr().err

    odd = Image.fromarray(shapes.draw(7, size=(37, 61))[0])
    (tmp_path / "images").mkdir()
    odd.save(tmp_path / "images" / "odd.jpg")
    odd.save(tmp_path / "images" / "odd.png")
    (tmp_path / "images" / "broken.png").write_bytes(b"no image")
    predict = ["segment", "predict", f"--weights={weights}", "--device=cpu", f"--output={tmp_path / 'out'}"]
    assert _runs.inline([*predict, str(tmp_path / "images"), "--short-side=20", "--max-side=30"]) == 0
    masks = sorted((tmp_path / "out").glob("*.png"))
    assert len(masks) == len(list((tmp_path / "out").glob("*.overlay.jpg"))) == 2
    mask = Image.open(masks[0])
    assert mask.size == Image.open(masks[0].with_suffix(".overlay.jpg")).size == (61, 37)
    assert np.asarray(mask).max() < len(shapes.CLASSES)


def test_the_averaged_weights_load_like_the_others(undisturbed: Path) -> None:
    """Batch norm counts its batches in an integer, which is not averaged but belongs to the model."""
    average = load_segmenter(str(undisturbed / "checkpoints" / "ema.safetensors")).model
    last = load_segmenter(str(undisturbed / "checkpoints" / "last.safetensors")).model
    counts = [
        [value for name, value in model.state_dict().items() if name.endswith("num_batches_tracked")]
        for model in (average, last)
    ]
    assert counts[0] == counts[1] == [torch.tensor(9)] * len(counts[0])
    assert len(counts[0]) > 0


def test_the_weights_know_the_split_and_the_layout_of_their_run(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = undisturbed / "checkpoints" / "last.safetensors"
    metadata = read_metadata(weights)
    prepared = json.loads(metadata["preprocessing"])
    assert (prepared["layout"], prepared["val_split"], prepared["ignore_index"]) == ("auto", "val", 255)
    metadata["preprocessing"] = json.dumps(prepared | {"layout": "ade20k", "val_split": "holdout"})
    save_file(load_file(weights), tmp_path / "ade.safetensors", metadata=metadata)
    data = shapes.write(tmp_path / "shapes", train=1, val=2)
    (data / "masks").rename(data / "annotations")
    for kind in ("images", "annotations"):
        (data / kind / "val").rename(data / kind / "holdout")
    command = ["segment", "eval", f"--weights={tmp_path / 'ade.safetensors'}", f"--data={data}", "--workers=0"]
    assert _runs.inline([*command, "--device=cpu"]) == 0
    assert f"on {data} [holdout]" in capsys.readouterr().out
    assert _runs.inline([*command, "--split=val"]) == 2
    assert f"no folder {data / 'images' / 'validation'}" in capsys.readouterr().err


@pytest.mark.parametrize(("steps", "accumulate", "warns"), [(40_000, 1, True), (1000, 2, False), (1100, 2, True)])
def test_a_recipe_for_large_data_warns_on_small_ones(
    steps: int, accumulate: int, warns: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = shapes.write(tmp_path / "shapes", train=18, val=1)
    overrides = [f"data.path={data}", "data.batch_size=8", "data.workers=0"]
    overrides += [f"schedule.steps={steps}", f"optim.accumulate={accumulate}"]
    recipe = dict(defaults=Segmentation.defaults(), folder=Segmentation.recipes, overrides=overrides)
    task = Segmentation(load_recipe("fpn_inline_pvt_tiny", **recipe))
    with caplog.at_level("WARNING"):
        task.open_data(Ranks(torch.device("cpu")))
    said = [record.message for record in caplog.records if "schedule.steps" in record.message]
    assert len(said) == warns
    if steps == 40_000:
        assert "schedule.steps=40000 shows each of the 18 training images 20,000 times" in said[0]
        assert "give schedule.steps=200 for 100 times, or use the recipe finetune" in said[0]


def test_data_that_do_not_name_their_classes(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The weights name them. A class that neither occurs nor is predicted has no figures."""
    data = shapes.write(tmp_path / "shapes", train=1, val=1)
    (data / "classes.txt").unlink()
    for path in (data / "masks/val").iterdir():
        Image.fromarray(np.zeros_like(np.asarray(Image.open(path)))).save(path)
    weights = undisturbed / "checkpoints" / "last.safetensors"
    assert _runs.inline(["segment", "eval", f"--weights={weights}", f"--data={data}", "--workers=0"]) == 0
    shown = capsys.readouterr().out
    assert [name for name in shapes.CLASSES if f"  {name} " in shown] == list(shapes.CLASSES)
    assert "accuracy       –" in shown
    assert "nan" not in shown


def test_an_evaluation_may_skip_more_images(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = shapes.write(tmp_path / "shapes", train=1, val=4)
    for name in ("1000.png", "1001.png"):
        (data / "images" / "val" / name).write_bytes(b"no image")
    weights = undisturbed / "checkpoints" / "last.safetensors"
    command = ["segment", "eval", f"--weights={weights}", f"--data={data}", "--workers=0", "--device=cpu"]
    assert _runs.inline(command) == 2
    assert "2 unreadable images, more than the limit of 1" in capsys.readouterr().err
    assert _runs.inline([*command, "--max-broken=0.5"]) == 0
    assert "2 images, " in capsys.readouterr().out


def test_other_classes(undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = shapes.write(tmp_path / "other", train=8, val=2)
    (other / "classes.txt").write_text("nothing\nblock\nball\nroof\nextra\n")
    weights = undisturbed / "checkpoints" / "last.safetensors"
    assert _runs.inline(["segment", "eval", f"--weights={weights}", f"--data={other}", "--device=cpu"]) == 2
    assert "has other classes than the weights: nothing, block" in capsys.readouterr().err
    start = [*arguments(tmp_path / "run", f"model.weights={weights}", "schedule.steps=1"), "schedule.warmup_steps=0"]
    start[start.index(f"--data={shapes.folder()}")] = f"--data={other}"
    assert _runs.inline(start) == 2
    assert "does not fit the model: 4 of another shape: auxiliary.classifier" in capsys.readouterr().err
    log = tmp_path / "log.txt"
    assert _runs.run([*start, "model.reset_head=true", "optim.lr=1e-12"], log=log) == 0, log.read_text()
    assert "no curves.png: matplotlib is not installed" in log.read_text()
    assert (tmp_path / "run" / "examples.png").exists()  # needs Pillow alone
    before, after = _runs.weights(undisturbed), _runs.weights(tmp_path / "run")
    assert after["head.classifier.1.weight"].shape[0] == 5
    for name, value in before.items():
        if name.startswith("backbone."):
            assert torch.allclose(after[name], value, atol=1e-6), name


@pytest.mark.slow
def test_frozen_layers_layer_decay_and_checkpointing(undisturbed: Path, tmp_path: Path) -> None:
    """Recomputed activations change nothing, and a frozen stem keeps its weights."""
    log = tmp_path / "log.txt"
    assert _runs.run(arguments(tmp_path / "recomputed", "model.checkpointing=true"), log=log) == 0
    losses = [[record["loss"] for record in _runs.metrics(run)] for run in (undisturbed, tmp_path / "recomputed")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)

    settings = ("model.freeze=1", "optim.layer_decay=0.5")
    assert _runs.run(arguments(tmp_path / "frozen", *settings), log=log) == 0
    flags = {"data": {"path": shapes.folder()}}
    plan = plan_run("upernet_inline_swin_tiny", task=Segmentation, overrides=TINY, flags=flags)
    task = Segmentation(plan.config)
    task.open_data(Ranks(torch.device("cpu")))
    start, end = task.build_model().state_dict(), _runs.weights(tmp_path / "frozen")
    changed = {name for name, value in start.items() if not torch.equal(value, end[name])}
    assert not any(name.startswith("backbone.model.patch_embed.") for name in changed)
    assert any(name.startswith("backbone.model.stages.0.") for name in changed)
    assert "backbone.norms.0.weight" in changed


def test_errors_are_one_line(undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predict = ["segment", "predict", f"--weights={undisturbed / 'checkpoints/last.safetensors'}", shapes.folder()]
    cases = {
        "no recipe: name one": ["segment", "train"],
        "unknown recipe 'upernet'": ["segment", "train", "upernet"],
        "no data: give --data FOLDER with images/train": ["segment", "train", "fpn_inline_pvt_tiny"],
        "data.batch_size=1: UperNet's batch norm": [*arguments(tmp_path), "data.batch_size=1"],
        "unknown setting data.mixup": ["segment", "train", "fpn_inline_pvt_tiny", "data.mixup=1"],
        "UperNet has no argument 'width'; expected some of": [*arguments(tmp_path), "model.head_kwargs={width: 8}"],
        "inline_swin_tiny cannot be built with": [*arguments(tmp_path), "model.head_kwargs={dim: a}"],
        "set dim and pyramid_dim to 1 or more": [*arguments(tmp_path), "model.head_kwargs={dim: 0}"],
        "model.auxiliary_weight=-1.0: expected 0 or more": [*arguments(tmp_path), "model.auxiliary_weight=-1"],
        "Swin has no argument 'width'; expected some of": [*arguments(tmp_path), "model.kwargs={width: 8}"],
        "--window is 1 2 3; expected a side, or height": [*predict, "--window", "1", "2", "3"],
        "--scales is 0.0; expected positive numbers": [*predict, "--scales", "0"],
        "--short-side is -3; expected at least 0": [*predict, "--short-side", "-3"],
        "the short side is 3000 and the long side at most 2048": [*predict, "--short-side", "3000"],
        "the short side is 20 and the long side at most 10": [*predict, "--short-side", "20", "--max-side", "10"],
        "--workers is -1; expected at least 0": [*predict, "--workers=-1"],
        "x.pth does not exist": ["segment", "predict", "--weights=x.pth", shapes.folder()],
    }
    for message, argv in cases.items():
        assert _runs.inline([*argv, f"--output={tmp_path / 'run'}"]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_split_whose_only_image_is_damaged(
    undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = shapes.write(tmp_path / "shapes", train=1, val=1)
    (data / "images/val/1000.png").write_bytes(b"")
    weights = undisturbed / "checkpoints" / "last.safetensors"
    assert _runs.inline(["segment", "eval", f"--weights={weights}", f"--data={data}", "--workers=0"]) == 2
    assert "nothing to evaluate: none of the 1 images could be read" in capsys.readouterr().err


# From the published settings: rate, weight decay, steps, warm-up, power, drop path.
UPERNET = (6e-5, 0.01, 160_000, 1500, 1.0, 0.3)
FPN = (2e-4, 1e-4, 40_000, 500, 0.9, None)


def test_a_recipe_for_every_published_row() -> None:
    rows = [f"fpn_{kind}_pvt_{size}" for kind in ("inline", "softmax") for size in ("tiny", "small", "medium", "large")]
    rows += [f"upernet_{kind}_swin_{size}" for kind in ("inline", "softmax") for size in ("tiny", "small", "base")]
    assert set(recipe_names(Segmentation.recipes)) == {*rows, "camvid_fpn", "camvid_upernet", "finetune"}
    for row in rows:
        rate, decay, steps, warmup, power, drop_path = UPERNET if row.startswith("upernet") else FPN
        config = load_recipe(row, defaults=Segmentation.defaults(), folder=Segmentation.recipes)
        assert row == f"{config.model.head}_{config.model.name}"
        assert drop_path is None or config.model.drop_path == drop_path
        assert (config.data.crop, config.data.scale, config.data.layout) == (512, [0.5, 2.0], "auto")
        assert config.model.auxiliary_weight == 0.4
        schedule = config.build_schedule(steps_per_epoch=1263, world_size=1)
        assert schedule.total_steps == steps
        assert config.optim.weight_decay == decay
        for ranks, batch in ((1, 16), (8, 2)):
            changed = load_recipe(
                row,
                defaults=Segmentation.defaults(),
                folder=Segmentation.recipes,
                overrides=[f"data.batch_size={batch}"],
            ).build_schedule(steps_per_epoch=1263, world_size=ranks)
            assert changed.rate(warmup) == pytest.approx(rate * (1 - warmup / steps) ** power)
            assert changed.rate(steps // 2) == pytest.approx(rate * 0.5**power)
            assert changed.rate(0) == 0


def test_a_plan_knows_its_task(tmp_path: Path) -> None:
    plan = plan_run("camvid_fpn", task=Segmentation, output=str(tmp_path))
    assert plan.task is Segmentation
    assert plan.config.data.ignore_index == 11
