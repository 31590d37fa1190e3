"""Both stages on digits of 8 pixels, with teachers of two blocks: what they learn, resume, write and refuse."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import training_runs as _runs
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import inline_attention
from inline_attention.bench import linearization as report
from inline_attention.bench.linearization import SCALES
from inline_attention.cli import main
from inline_attention.data import DataConfig, open_eval_data
from inline_attention.models import create_model
from inline_attention.models.schema import ARCHITECTURE, ARGUMENTS
from inline_attention.models.weights import load_model, save_weights
from inline_attention.tasks.classification.classifier import preprocessing
from inline_attention.tasks.linearization import plan_linearization, stages
from inline_attention.tasks.linearization.stages import prepare
from inline_attention.tasks.linearization.task import Distillation, LabelledDistillation, LogitDistillation, Matching
from inline_attention.training.distributed import Ranks

SMALL: dict[str, Any] = dict(embed_dim=16, depth=2, num_heads=2, patch_size=2, img_size=8, in_chans=1)
SETTINGS = (
    "data.batch_size=32", "optim.rate_batch=null", "data.workers=0", "data.in_memory=true", "match.steps=6",
    "schedule.epochs=2",
    "schedule.warmup_epochs=0", "log.tensorboard=false", "log.every_steps=1",
)  # fmt: skip


def write_teacher(path: Path, *, num_classes: int = 10) -> Path:
    """A softmax transformer whose attention is not uniform, so that its linear form is not exact."""
    torch.manual_seed(0)
    model = create_model("softmax_deit_tiny", num_classes=num_classes, **SMALL)
    for name, parameter in model.named_parameters():
        if "qkv.weight" in name:
            nn.init.normal_(parameter, std=0.5)
    metadata = {"preprocessing": preprocessing(DataConfig(in_chans=1, mean=[0.3], std=[0.4], eval_transform="resize"))}
    if num_classes:
        metadata["class_names"] = json.dumps([str(digit) for digit in range(num_classes)])
    return save_weights(model, path, metadata=metadata)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_teacher(tmp_path_factory.mktemp("teacher") / "teacher.safetensors")


def words(teacher: Path, output: Path, *more: str, data: str | None = None, name: tuple[str, ...] = ()) -> list[str]:
    return [
        "linearize", *name, "--weights", str(teacher), "--data", data or _runs.images(), "--output", str(output),
        "--device", "cpu", "--deterministic", *SETTINGS, *more,
    ]  # fmt: skip


def run(argv: list[str]) -> int:
    """Without the stages' pictures, which take longer than the stages."""
    with _runs.without_pictures():
        return main(argv)


@pytest.fixture(scope="module")
def finished(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of both stages, with its report."""
    folder = tmp_path_factory.mktemp("run") / "run"
    assert main(words(teacher, folder)) == 0
    return folder


def test_the_report(finished: Path, teacher: Path) -> None:
    report = json.loads((finished / "report.json").read_text())
    quality = {row["model"]: row for row in report["quality"]}
    assert list(quality) == ["teacher", "carried over", "matched", "distilled"]
    assert quality["teacher"]["agreement"] == 100
    assert quality["teacher"]["cosine"] == pytest.approx(100, abs=1e-3)
    assert all(row["images"] == 41 and row["top1"] is not None for row in quality.values())
    assert quality["matched"]["cosine"] > quality["carried over"]["cosine"]
    sizes = [(row["model"], row["img_size"]) for row in report["speed"]]
    assert sizes == [(name, [side, side]) for side in (8, 8, 16, 24, 32) for name in ("teacher", "student")]
    assert [row["batch"] for row in report["speed"][::2]] == [1, 4, 1, 1, 1]
    weights = sum(tensor.nbytes for tensor in load_model(teacher).state_dict().values())
    assert all(row["images_per_second"] > 0 and row["peak_bytes"] > weights for row in report["speed"])
    attentions = [(row["layers"], row["keys"], row["batch"]) for row in report["attention"]]
    both = ["blocks.0.attn", "blocks.1.attn"]
    assert attentions == [(both, 17, 1), (both, 17, 4)]  # 4 × 4 patches, a class token
    assert all(row["softmax"] > 0 and row["linear"] > 0 for row in report["attention"])
    assert [len(records) > 1 for records in report["curves"].values()] == [True, True]
    assert "| carried over" in (finished / "report.md").read_text()
    assert (finished / "report.png").stat().st_size > 10_000


def test_the_student_is_the_teacher_with_linear_attention(finished: Path, teacher: Path) -> None:
    student = load_model(finished / "student.safetensors")
    assert len(student.linearization.report.linear()) == 2
    assert {name for name in student.state_dict() if ".local." not in name} == load_model(teacher).state_dict().keys()
    assert inline_attention.load_model(finished / "student.safetensors")(torch.randn(1, 1, 8, 8)).shape == (1, 10)


def test_no_checkpoint_holds_the_teacher(finished: Path) -> None:
    names = load_model(finished / "student.safetensors").state_dict().keys()
    files = list(finished.rglob("*.safetensors"))
    assert len(files) >= 6
    for path in files:
        with safe_open(path, "pt") as file:
            assert set(file.keys()) == names


@pytest.mark.slow
def test_a_complete_run_that_is_resumed_writes_its_report_again(
    finished: Path, teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SCALES, "cpu", ((1,), 1))
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    for name in ("report.json", "report.md", "report.png", "student.safetensors"):
        (folder / name).unlink()
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert main(["linearize", "--resume", str(folder), "--no-report"]) == 0
    assert_same_student(folder, finished)
    assert not (folder / "report.json").exists()
    assert all(path.read_bytes() == content for path, content in before.items())
    assert main([*words(teacher, folder), "--resume", "auto"]) == 0  # a job script repeats the same command
    assert (folder / "report.png").exists()


@pytest.fixture(scope="module")
def saved_often(teacher: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "run"
    assert run(words(teacher, folder, "checkpoint.every_steps=4", "--no-report")) == 0
    return folder


@pytest.mark.parametrize("stage", ["match", "distill"])
def test_a_stopped_run_ends_with_the_same_bits(stage: str, finished: Path, saved_often: Path, tmp_path: Path) -> None:
    """A kill inside a stage: the checkpoints after it, its summary and the later stage are missing."""
    folder = tmp_path / "run"
    shutil.copytree(saved_often, folder)
    assert_same_student(folder, finished)
    if stage == "match":
        shutil.rmtree(folder / "distill")
    for path in (folder / stage / "summary.json", folder / "student.safetensors"):
        path.unlink()
    checkpoints = sorted((folder / stage / "checkpoints").glob("step-*"))
    shutil.rmtree(checkpoints[-1])
    assert len(checkpoints) == 2
    assert run(["linearize", "--resume", str(folder / stage), "--no-report"]) == 0
    assert_same_student(folder, finished)


def assert_same_student(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "student.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_layers_learn_on_the_inputs_of_the_teacher(teacher: Path, tmp_path: Path) -> None:
    """The student's blocks get what the teacher's get, although its attention is another; and one call does it."""
    task = build(Matching, teacher)
    student, inputs = task.build_model().train(), {}
    for owner, model in (("student", student), ("teacher", task.teacher)):
        for number, block in enumerate(model.blocks):  # type: ignore[arg-type, union-attr]
            block.attn.qkv.register_forward_pre_hook(
                lambda module, args, key=(owner, number): inputs.setdefault(key, []).append(args[0].detach())
            )
    images = next(iter(task.data.val)).images
    with torch.no_grad():
        task.teacher(images)
    task.losses(student, next(task.data.train.epoch(0)), epoch=0, step=0)["layers"].backward()
    trained = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in student.named_parameters() if ".attn." in name}
    inputs.clear()
    with torch.no_grad():
        student(images)  # in training mode
        assert len(task.errors) == 2 + 2
        task.teacher(images)
    for number in range(2):
        (ours, *more), theirs = inputs["student", number], inputs["teacher", number]
        assert not more
        assert all(torch.equal(ours, each) for each in theirs)
    with torch.no_grad():
        assert not torch.allclose(student.eval()(images), task.teacher(images), atol=1e-3)


def build(kind: type, teacher: Path, *overrides: str, data: str | None = None) -> Any:
    """A task of one rank with its data open."""
    flags = {"data": {"path": data or _runs.images()}, "model": {"weights": str(teacher)}, "device": "cpu"}
    plan = plan_linearization(overrides=[*SETTINGS, *overrides], flags=flags)
    task = kind(plan.config)
    task.open_data(Ranks(torch.device("cpu")))
    return task


def test_the_loss_of_a_classifier(teacher: Path) -> None:
    """Against the definition, image by image."""
    task = build(LabelledDistillation, teacher, "data.mixup=0", "distill.labels=0.3", "distill.temperature=3")
    student = task.build_model()
    batch = next(task.data.train.epoch(0))
    with torch.no_grad():
        losses = task.losses(student, batch, epoch=0, step=0)
        ours, theirs = student(batch.images).double(), task.teacher(batch.images).double()
    divergence, wrong = 0.0, 0.0
    for logits, taught, label in zip(ours, theirs, batch.targets, strict=True):
        p, q = (taught / 3).softmax(0), (logits / 3).softmax(0)
        divergence += float((p * (p / q).log()).sum()) / len(ours)
        wrong -= float(logits.softmax(0)[label].log()) / len(ours)
    assert float(losses["teacher"]) == pytest.approx(0.7 * 9 * divergence, rel=1e-4)
    assert float(losses["class"]) == pytest.approx(0.3 * wrong, rel=1e-4)
    assert "class" not in build(LogitDistillation, teacher).losses(student, batch, epoch=0, step=0)


def test_a_model_without_a_head_learns_the_features_of_all_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = write_teacher(tmp_path / "backbone.safetensors", num_classes=0)
    task = build(Distillation, teacher, "data.mixup=0")
    student = task.build_model()
    batch = next(task.data.train.epoch(0))
    loss = task.losses(student, batch, epoch=0, step=0)["features"].item()
    ours, theirs = student.forward_features(batch.images), task.teacher.forward_features(batch.images)
    assert ours.shape == (32, 17, 16)
    expected = sum(float((a - b).square().sum() / b.square().sum()) for a, b in zip(ours, theirs, strict=True)) / 32
    assert loss == pytest.approx(expected, rel=1e-5)

    folder = tmp_path / "run"
    monkeypatch.setitem(SCALES, "cpu", ((1,), 1))  # the times of several sizes are tested elsewhere
    assert run(words(teacher, folder, "match.steps=1", "schedule.epochs=1")) == 0
    quality = json.loads((folder / "report.json").read_text())["quality"]
    assert all(row["top1"] is None and row["agreement"] is None for row in quality)
    assert all(0 < row["knn_top1"] <= 100 for row in quality)
    assert load_model(folder / "student.safetensors")(torch.randn(1, 1, 8, 8)).shape == (1, 16)
    advised = capsys.readouterr().out
    assert "inline predict" not in advised
    assert f"inline eval --weights {folder / 'student.safetensors'} --data FOLDER --knn 20" in advised


@pytest.mark.slow
def test_without_labels_any_images_will_do(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images at several depths, without splits and classes; and softmax layers that are chosen on them."""
    pictures = tmp_path / "pictures"
    for number, path in enumerate(sorted(Path(_runs.images()).rglob("*.png"))[:40]):
        target = pictures / ("deep/er" if number % 3 else ".") / f"{number}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    folder = tmp_path / "run"
    monkeypatch.setitem(SCALES, "cpu", ((1,), 1))
    more = ("--no-labels", "--keep-softmax", "auto:1", "data.batch_size=6", "match.steps=2")
    assert main(words(teacher, folder, *more, data=str(pictures))) == 0
    quality = json.loads((folder / "report.json").read_text())["quality"]
    assert [row["images"] for row in quality] == [4] * 4
    assert all(row["top1"] is None and row["agreement"] is not None for row in quality)
    layers = load_model(folder / "student.safetensors").linearization.report.layers
    assert sorted(layer.is_linear for layer in layers) == [False, True]
    summary = json.loads((folder / "distill" / "summary.json").read_text())
    assert summary["best_agreement"] >= summary["val_agreement"]
    # The choice is not made again.
    assert main([*words(teacher, folder, *more, data=str(pictures)), "--resume", "auto", "--no-report"]) == 0
    with pytest.raises(ValueError, match=r"was begun with another model: model.keep_softmax=\['auto:2'\]"):
        plan_linearization(flags={"model": {"keep_softmax": ["auto:2"]}}, resume=str(folder))


def test_a_folder_of_classes_without_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages, the choice of layers and the report divide it in the same way."""
    teacher, folder, classes = write_teacher(tmp_path / "t.safetensors"), tmp_path / "run", tmp_path / "classes"
    shutil.copytree(Path(_runs.images()) / "train", classes)
    monkeypatch.setitem(SCALES, "cpu", ((1,), 1))
    opened: list[tuple[str, set[str]]] = []

    def record(data: DataConfig, *, split: str | None = None, **options: Any) -> Any:
        loader = open_eval_data(data, split=split, **options)
        opened.append((split or data.val_split, {loader.path(index) for index in range(loader.num_images)}))
        return loader

    for module in (stages, report):
        monkeypatch.setattr(module, "open_eval_data", record)
    more = ("--keep-softmax", "auto:1", "match.steps=1", "--epochs", "0")
    assert run(words(teacher, folder, *more, data=str(classes))) == 0
    with (folder / "match" / "split.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [split for split, _ in opened] == ["train", "val", "train", "val"]  # checked, chosen on, reported
    for split, paths in opened:
        assert paths <= {str(classes / row["file"]) for row in rows if row["split"] == split}
    quality = json.loads((folder / "report.json").read_text())["quality"]
    assert {row["images"] for row in quality} == {sum(row["split"] == "val" for row in rows)}


def test_layers_are_kept_by_their_positions(teacher: Path) -> None:
    student = build(Matching, teacher, "model.keep_softmax=[-1]").build_model()
    assert [layer.name for layer in student.linearization.report.linear()] == ["blocks.0.attn"]


@pytest.mark.parametrize("anchors", [1, 4])
def test_without_training(anchors: int, teacher: Path, tmp_path: Path) -> None:
    """The file is the model that `linearize` makes."""
    options = ["--epochs", "0", "match.steps=0", "--no-report", "--anchors", str(anchors)]
    assert main(words(teacher, tmp_path / "run", *options)) == 0
    expected = load_model(teacher)
    inline_attention.linearize(expected, anchors=anchors)
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(load_model(tmp_path / "run" / "student.safetensors").eval()(images), expected.eval()(images))
    assert not (tmp_path / "run" / "match").exists()


def test_more_epochs_continue_a_complete_run(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    assert run(["linearize", "--resume", str(folder), "--epochs", "3", "--no-report"]) == 0
    assert json.loads((folder / "distill" / "summary.json").read_text())["epochs"] == 3


def test_bf16_and_an_average(teacher: Path, tmp_path: Path) -> None:
    more = ("run.precision=bf16", "ema.decay=0.5", "ema.batch=null", "match.steps=2", "schedule.epochs=1")
    assert run(words(teacher, tmp_path / "run", *more, "--no-report")) == 0
    for stage in ("match", "distill"):
        assert (tmp_path / "run" / stage / "checkpoints" / "ema.safetensors").exists()
    assert _runs.metrics(tmp_path / "run" / "distill", "eval")[-1]["ema_top1"] is not None


@pytest.mark.slow
def test_compiled(teacher: Path, tmp_path: Path) -> None:
    for name, more in (("eager", ()), ("compiled", ("run.compile=true",))):
        assert main(words(teacher, tmp_path / name, *more, "--no-report")) == 0
    for stage in ("match", "distill"):
        eager, compiled = (
            [r["loss"] for r in _runs.metrics(tmp_path / name / stage)] for name in ("eager", "compiled")
        )
        assert compiled == pytest.approx(eager, rel=1e-3)


@pytest.mark.slow
def test_two_ranks(teacher: Path, finished: Path, tmp_path: Path) -> None:
    """Two processes with half of each batch learn what one learns."""
    log = tmp_path / "log.txt"
    argv = words(teacher, tmp_path / "run", "data.batch_size=16", "--no-report")
    assert _runs.run_ranks(argv, 2, log=log) == [0, 0], log.read_text()
    assert log.read_text().count("student   ") == 1
    for stage in ("match", "distill"):
        one, two = ([r["loss"] for r in _runs.metrics(folder / stage)] for folder in (finished, tmp_path / "run"))
        assert two == pytest.approx(one, rel=1e-4)


@pytest.mark.slow
def test_two_ranks_and_parameters_without_a_gradient(tmp_path: Path) -> None:
    """The norm after pooling, which the features of all tokens do not pass."""
    teacher, log = tmp_path / "teacher.pth", tmp_path / "log.txt"
    torch.save(timm.create_model("test_vit2", img_size=32, num_classes=0).state_dict(), teacher)
    own = ("data.img_size=32", "model.kwargs.num_classes=0", "match.steps=1", "--no-labels", "--no-report")
    assert _runs.run_ranks(words(teacher, tmp_path / "run", *own, name=("test_vit2",)), 2, log=log) == [0, 0], (
        log.read_text()
    )
    assert len(_runs.metrics(tmp_path / "run" / "distill")) > 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", ""], "no data: give --data FOLDER"),
        (["softmax_deit_tiny", "--weights", "pretrained", "--data", "nowhere"], "data path 'nowhere' does not exist"),
        (["--weights", "pretrained"], "no teacher: name a model"),
        (["softmax_deit_tiny", "--weights", "pretrained"], "Or give a file of the teacher with --weights"),
        (["softmax_deit_tiny", "model.kwargs.depht=3"], "depht"),
        (["model.weights=null"], 'model.weights=None: expected "pretrained" or a file'),
        (["--attention", "flash"], "attention='flash' is unknown"),
        (["--anchors", "0"], "anchors=0; expected 1 or more"),
        (["--keep-softmax", "auto:9"], "the model has 2 attentions to convert"),
        (["--keep-softmax", "auto:1,blocks.0.attn"], "expected names, or auto:K alone"),
        (["--keep-softmax", "*"], "model.keep_softmax=['*'] keeps all attentions, which leaves none to convert: "),
        (["--keep-softmax", "stem"], "matches none of blocks.0.attn, blocks.1.attn"),
        (
            ["--keep-softmax", "0,1"],
            "model.keep_softmax=['0', '1'] keeps all attentions, which leaves none to convert: ",
        ),
        (["--keep-softmax", "*", "match.steps=0", "--epochs", "0"], "or train the teacher further as a control"),
        (["--keep-softmax", "2"], "keep_softmax has 2, but the model has 2 attentions"),
        (["--keep-softmax", "auto"], "expected the number of layers to keep, such as 'auto:2'"),
        (["--epochs", "-1"], "--epochs -1: expected 0 or more"),
        (["--resume", "nowhere"], "--resume nowhere: expected a folder of `inline linearize`"),
        (["match.steps=-1"], "match.steps=-1: expected 0 or more"),
    ],
)
def test_errors(
    more: list[str], message: str, teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = (more.pop(0),) if more[0].startswith("softmax") else ()
    assert main(words(teacher, tmp_path / "run", *more, name=name)) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_one_image(teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    shutil.copy(next(Path(_runs.images()).rglob("*.png")), pictures)
    assert main(words(teacher, tmp_path / "run", "--no-labels", data=str(pictures))) == 2
    assert "has one image: expected two or more, one of them for validation" in capsys.readouterr().err


def test_a_teacher_without_softmax(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linear = save_weights(create_model("inline_deit_tiny", num_classes=10, **SMALL), tmp_path / "linear.safetensors")
    assert main(words(linear, tmp_path / "run")) == 2
    message = capsys.readouterr().err
    assert "there is nothing to convert in DeiT: " in message
    assert "it is not softmax attention" in message


def test_other_classes_than_the_teachers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = write_teacher(tmp_path / "teacher.safetensors", num_classes=4)
    assert main(words(teacher, tmp_path / "run")) == 2
    message = capsys.readouterr().err
    assert "6 of the 10 classes of the data are not among the model's 4: '4', '5'" in message
    assert "Any images will do with --no-labels" in message
    assert not (tmp_path / "run").exists()


def test_a_folder_of_another_command(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("recipe: quickstart\n")
    for option in ("--resume", "--output"):
        assert main(["linearize", "test_vit", option, str(tmp_path)]) == 2
        assert "holds a run of another command: expected a folder of `inline linearize`" in capsys.readouterr().err
    assert main(["train", "--resume", str(finished / "match")]) == 2
    assert "is of `inline linearize`, not of `inline train`" in capsys.readouterr().err


def test_nothing_to_continue(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a model, there is nothing to begin either."""
    command = ["linearize", "--resume", "auto", "--output", str(tmp_path / "run"), "--print-config"]
    assert main(command) == 2
    assert "run holds no run to continue; to begin one there, name a model" in capsys.readouterr().err
    assert main([*command, "softmax_deit_tiny"]) == 0


def test_the_plan_of_a_timm_model_names_its_arguments(tmp_path: Path) -> None:
    """A student of timm's registry, whose size differs from the registered one."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=24, num_heads=2, num_classes=10)
    path = tmp_path / "vit.safetensors"
    save_weights(model, path)
    flags = {
        "model": {"name": "vit_tiny_patch16_224", "weights": str(path)},
        "data": {"path": "digits", "img_size": 32},
    }
    overrides = ["model.kwargs={depth: 2, embed_dim: 24, num_heads: 2, num_classes: 10}", "match.steps=240"]
    said: list[str] = []
    plan = prepare(plan_linearization(flags=flags, overrides=overrides), device=torch.device("cpu"), log=said.append)
    assert [name for name, _ in plan.stages] == ["match", "distill"]
    assert "blocks.1.attn" in said[-1]


def test_a_control_trains_the_softmax_teacher_further(
    teacher: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    control = tmp_path / "control"
    assert run(words(teacher, control, "--keep-softmax", "*", "match.steps=0", "schedule.epochs=1")) == 0
    assert "this run is a control, which trains the teacher further" in capsys.readouterr().out
    report = json.loads((control / "report.json").read_text())
    quality = {row["model"]: row for row in report["quality"]}
    assert quality["carried over"]["agreement"] == 100
    assert quality["distilled"]["cosine"] < 100
    assert report["attention"] == []
    before, after = load_model(teacher), load_model(control / "student.safetensors")
    assert before.state_dict().keys() == after.state_dict().keys()
    assert [type(m) for m in before.modules()] == [type(m) for m in after.modules()]


@pytest.mark.parametrize(("rate", "warned"), [("8e-3", True), ("5e-4", False)])
def test_the_recipes_rate_is_high_for_a_large_teacher(
    rate: str, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = dict(img_size=32, depth=2, embed_dim=24, num_heads=2, num_classes=10)
    model = timm.create_model("vit_tiny_patch16_224", **arguments)
    path = tmp_path / "vit.safetensors"
    save_weights(model, path, metadata={ARCHITECTURE: "vit_tiny_patch16_224", ARGUMENTS: json.dumps(arguments)})
    flags = {"model": {"name": "", "weights": str(path)}, "data": {"path": "digits"}}
    for limit in (10_000, 10_000_000):
        said: list[str] = []
        monkeypatch.setattr(stages, "LARGE_TEACHER", limit)
        plan = plan_linearization(flags=flags, overrides=[f"optim.lr={rate}"])
        prepare(plan, device=torch.device("cpu"), log=said.append)
        assert any("Try optim.lr=5e-4" in text for text in said) == (warned and limit == 10_000)


def test_the_arguments_of_a_timm_model_come_from_its_file(tmp_path: Path) -> None:
    arguments = dict(img_size=32, depth=2, embed_dim=24, num_heads=2, num_classes=10)
    model = timm.create_model("vit_tiny_patch16_224", **arguments)
    path = tmp_path / "vit.safetensors"
    save_weights(model, path, metadata={ARCHITECTURE: "vit_tiny_patch16_224", ARGUMENTS: json.dumps(arguments)})
    flags = {"model": {"name": "", "weights": str(path)}, "data": {"path": "digits"}}
    plan = prepare(plan_linearization(flags=flags), device=torch.device("cpu"))
    assert [name for name, _ in plan.stages] == ["distill"]
