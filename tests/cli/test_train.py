import json
import socket
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from inline_attention.cli import main
from inline_attention.models.published import PUBLISHED, Published
from inline_attention.tasks.classification import Classification, load_classifier
from inline_attention.tasks.detection.task import Detection
from inline_attention.tasks.linearization import Matching
from inline_attention.tasks.segmentation.task import Segmentation
from inline_attention.training.config import recipe_names
from inline_attention.training.settings import to_yaml
from inline_attention.training.task import Task

SHORT = ["schedule.epochs=2", "schedule.warmup_epochs=1", "log.tensorboard=false", "--device", "cpu"]


def test_print_config_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["train", "inline_swin_base", "optim.lr=1e-3", "--data", "photos", "--seed", "3", "--print-config"]) == 0
    )
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["recipe"], config["seed"], config["data"]["path"]) == ("inline_swin_base", 3, "photos")
    assert (config["optim"]["lr"], config["model"]["drop_path"], config["data"]["batch_size"]) == (1e-3, 0.5, 64)
    assert {"schedule", "ema", "run", "checkpoint", "log"} <= config.keys()


def test_settings_without_a_recipe_are_those_of_the_quickstart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "schedule.epochs=7", "--print-config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["recipe"], config["schedule"]["epochs"], config["data"]["path"]) == ("quickstart", 7, "digits")


def test_a_recipe_file_may_have_an_equals_sign_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=0.1.yaml").write_text("optim: {lr: 0.1}\n")
    assert main(["train", "lr=0.1.yaml", "--print-config"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["recipe"], config["optim"]["lr"]) == ("lr=0.1", 0.1)
    assert main(["train", "data.path=list.yaml", "--print-config"]) == 0  # no such file: a setting
    assert yaml.safe_load(capsys.readouterr().out)["data"]["path"] == "list.yaml"


def test_settings_and_options_in_any_order(capsys: pytest.CaptureFixture[str]) -> None:
    orders = [
        ["inline_deit_tiny", "optim.lr=1e-3", "--seed", "3", "schedule.epochs=40", "--print-config", "model.freeze=1"],
        ["--seed", "3", "--print-config", "inline_deit_tiny", "optim.lr=1e-3", "schedule.epochs=40", "model.freeze=1"],
        ["inline_deit_tiny", "--print-config", "model.freeze=1", "optim.lr=1e-3", "schedule.epochs=40", "--seed=3"],
    ]
    shown = []
    for order in orders:
        assert main(["train", *order]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2]
    assert yaml.safe_load(shown[0])["schedule"]["epochs"] == 40
    with pytest.raises(SystemExit):
        main(["train", "--sed", "3"])


@pytest.mark.parametrize(
    ("command", "folder"),
    [
        ("train", Classification.recipes),
        ("segment train", Segmentation.recipes),
        ("detect train", Detection.recipes),
    ],
)
def test_recipes_are_listed_with_a_description(command: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--list-recipes"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == recipe_names(folder)
    descriptions = [description for _, description in lines]
    assert all(len(description.split()) >= 4 for description in descriptions)
    assert len(set(descriptions)) == len(descriptions)


@pytest.mark.parametrize("other", [Classification, Segmentation, Detection, Matching])
def test_a_run_of_another_command_is_named(
    other: type[Task], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = other.defaults().command
    (tmp_path / "config.yaml").write_text(to_yaml(other.defaults()))
    (tmp_path / "recipe.yaml").write_text(to_yaml(other.defaults()))
    for words in (["train"], ["segment", "train"], ["detect", "train"]):
        for source in (["--resume", str(tmp_path)], [str(tmp_path / "recipe.yaml")]):
            status = main([*words, *source, "--print-config"])
            assert status == (0 if " ".join(words) == command else 2)
            assert (
                status == 0 or f"is of `inline {command}`, not of `inline {' '.join(words)}`" in capsys.readouterr().err
            )


def test_a_folder_of_other_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a folder of `inline linearize`, which has a run folder for each stage."""
    (tmp_path / "match").mkdir()
    (tmp_path / "match" / "config.yaml").write_text(to_yaml(Matching.defaults()))
    for more in ([], ["--resume", "auto"]):
        assert main(["train", "quickstart", *SHORT, "--output", str(tmp_path), *more]) == 2
        assert f"{tmp_path} holds other runs (match): give another --output" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["match"]


def test_a_run_that_does_not_name_its_command_continues(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = to_yaml(Classification.defaults())
    (tmp_path / "config.yaml").write_text(text.replace("command: train\n", ""))
    assert main(["train", "--resume", str(tmp_path), "--print-config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["command"] == "train"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["command=detect"], "command=detect: expected one of train"),
        (["optim.lrr=1"], "unknown setting optim.lrr; did you mean optim.lr?"),
        (["schedule.epochs=many"], "schedule.epochs=many: expected int"),
        (["optim.name=AdamW"], "optim.name=AdamW is not known; did you mean adamw?"),
        (["inline_diet_tiny"], "unknown recipe 'inline_diet_tiny'; did you mean inline_deit_tiny?"),
        (["inline_deit_tiny"], "no data: give --data FOLDER"),
        (["inline_deit_tiny", "--data", "nowhere"], "nowhere"),
        (["mine.yaml"], "recipe file mine.yaml does not exist; give the path"),
        (["torn.yaml"], "torn.yaml is not YAML: while parsing"),
        (["circle.yaml"], "circle.yaml is not YAML: found unconstructable recursive node"),
        (["latin.yaml"], "unknown setting model.gr"),
        (["--resume", "auto"], "--resume auto continues the run in --output"),
        (
            ["--resume", "auto", "--output", "none"],
            "none holds no run to continue; to begin one there, name a recipe",
        ),
        (["model.name=inline_diet_tiny"], "there is no model 'inline_diet_tiny'; did you mean inline_deit_tiny"),
        (["model.kwargs.num_heads=5"], "num_heads"),
        (["model.kwargs.heads=5"], "has no argument 'heads'; expected some of"),
        (["model.kwargs.depth=many"], "depth='many'; expected a positive integer"),
        (["data.batch_size=63", "data.mixup=0.8"], "choose an even data.batch_size"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("torn.yaml").write_text("model: {name: x\n  data: [\n")
    Path("circle.yaml").write_text("model: &all {kwargs: *all}\n")
    Path("latin.yaml").write_bytes("model: {größe: 3}".encode("latin-1"))
    assert main(["train", *arguments, "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("inline train: ")
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.rglob("config.yaml")) == []


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--epochs=3", "schedule.epochs=…"),
        ("--batch-size=3", "data.batch_size=…"),
        ("--optimizer.lr=3", "optim.lr=…"),
        ("--optim.name=sgd", "optim.name=…"),
        ("--sed=3", "--seed"),
    ],
)
def test_an_unknown_option_names_the_setting(option: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings are options in timm's and torchtitan's scripts."""
    with pytest.raises(SystemExit):
        main(["train", "--device", "cpu", option, "model.freeze=1"])
    assert f"unrecognized arguments: {option}; did you mean {meant}?" in capsys.readouterr().err


def test_the_end_says_what_came_of_it_and_what_to_do_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    one = ["schedule.epochs=1", "schedule.warmup_epochs=0", "data.batch_size=1346"]
    assert main(["train", *SHORT, "model.kwargs.depth=1", *one]) == 0
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("quickstart-")
    summary = json.loads((folder / "summary.json").read_text())
    shown = capsys.readouterr().out
    assert " 1 update of 1346 images (1 epoch)," in shown
    assert f"top-1 {summary['val_top1']:.2f}%" in shown
    assert f"curves    runs/{folder.name}/curves.png" in shown
    weights = f"runs/{folder.name}/checkpoints/best.safetensors"
    assert f"inline predict --weights {weights} IMAGE" in shown
    assert "inline train finetune --data FOLDER" in shown
    assert (tmp_path / weights).exists()


def test_a_convolutional_network_of_timm_trains_and_its_file_knows_its_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is built without a size, so the file stores the size beside the preparation of the images."""
    small = ["model.name=test_convnext", "model.weights=null", "--data", "digits", "data.img_size=32"]
    assert main(["train", "finetune", *SHORT, "--output", str(tmp_path), *small]) == 0
    top1 = json.loads((tmp_path / "summary.json").read_text())["val_top1"]
    capsys.readouterr()
    assert main(["eval", "--weights", str(tmp_path / "checkpoints/last.safetensors"), "--data", "digits"]) == 0
    shown = capsys.readouterr().out
    assert "32×32" in shown
    assert f"top-1 {top1:.3f}%" in shown


@pytest.mark.slow
def test_quickstart_learns_to_read(tmp_path: Path) -> None:
    assert main(["train", "--output", str(tmp_path / "run"), "--device", "cpu"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["val_top1"] >= 97
    assert summary["epochs"] == 40


def write_colours(root: Path) -> Path:
    """Photographs of two kinds: reddish and bluish noise."""
    noise = np.random.default_rng(0)
    for split, count in (("train", 8), ("val", 4)):
        for label, shade in (("blue", (0, 0, 90)), ("red", (90, 0, 0))):
            folder = root / split / label
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = noise.integers(0, 160, (40, 50, 3)) + shade
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.jpg")
    return root


@pytest.mark.usefixtures("without_pictures")
def test_fine_tuning_needs_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first training command of the README: weights of the package, at their own size."""

    def no_connection(*args: object) -> None:
        raise AssertionError("a connection is opened")

    monkeypatch.setattr(socket.socket, "connect", no_connection)
    data = write_colours(tmp_path / "images")
    arguments = ["train", "finetune", "--data", str(data), "--output", str(tmp_path / "run"), "schedule.epochs=3"]
    assert main([*arguments, "data.batch_size=4", "data.workers=0", "log.tensorboard=false", "--device", "cpu"]) == 0
    weights = tmp_path / "run" / "checkpoints" / "best.safetensors"
    trained = load_classifier(None, str(weights))
    assert trained.data.img_size == [64, 64]
    assert trained.class_names == ["blue", "red"]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["best_top1"] == 100


def test_a_failed_download_names_options_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    data = write_colours(tmp_path / "images")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        url = f"http://127.0.0.1:{unused.getsockname()[1]}/?dl=1"
        monkeypatch.setitem(PUBLISHED, "inline_deit_tiny", Published(url=url))
        arguments = ["train", "finetune", "model.name=inline_deit_tiny", "--data", str(data)]
        assert main([*arguments, "--output", str(tmp_path / "run"), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    for option in ("model.weights=FILE", "model.weights=null", "model.name=inline_deit_study"):
        assert option in error
    assert "pretrained=" not in error


@pytest.mark.usefixtures("without_pictures")
def test_a_folder_without_splits_is_divided_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The split is written down, and is the same when the run continues and for `inline eval`."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(10):
            image = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
            image.save(tmp_path / "pets" / name / f"{number}.png")
    run, pets = tmp_path / "run", ["--data", str(tmp_path / "pets")]
    tiny = [
        "model.name=inline_deit_tiny",
        "model.weights=null",
        "data.img_size=8",
        "data.batch_size=4",
        "data.workers=0",
    ]
    kwargs = "model.kwargs={embed_dim: 16, depth: 1, num_heads: 2, patch_size: 4}"
    assert main(["train", "finetune", *pets, *tiny, kwargs, *SHORT, "--output", str(run), "--seed", "1"]) == 0
    assert "has no splits: 4 of 20 images are for validation" in caplog.text
    written = (run / "split.csv").read_text()
    assert written.splitlines()[0] == "file,label,split"
    assert written.count(",val") == 4  # 20% of each class
    more = ["schedule.epochs=3", "log.tensorboard=false", "--seed", "2"]
    assert main(["train", "--resume", "auto", "--output", str(run), *more]) == 0
    assert (run / "split.csv").read_text() == written
    best = ["--weights", str(run / "checkpoints" / "last.safetensors"), "--device", "cpu", "--workers", "0"]
    result = tmp_path / "result.json"
    assert main(["eval", *pets, *best, "--json", str(result)]) == 0
    summary = json.loads((run / "summary.json").read_text())
    assert json.loads(result.read_text())["images"] == 4
    assert json.loads(result.read_text())["top1"] == pytest.approx(summary["val_top1"])
    assert main(["eval", *pets, *best, "--json", str(result), "--split", "all"]) == 0
    assert json.loads(result.read_text())["images"] == 20
    (run / "split.csv").rename(tmp_path / "elsewhere.csv")
    assert main(["eval", *pets, *best]) == 2
    assert "has no splits: name the table of a run" in capsys.readouterr().err
    assert main(["eval", *pets, *best, "--split-file", str(tmp_path / "elsewhere.csv"), "--json", str(result)]) == 0
    assert json.loads(result.read_text())["images"] == 4
