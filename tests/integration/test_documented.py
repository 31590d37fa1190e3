"""Every command line and every Python block of the documentation works: it is run, on small data and for a short time.

A command is run as it is written, in a folder where the files that it names have been made: a picture for `photo.jpg`,
a folder of classes for `--data imagenette`. What would take long is shortened by further options at its end (SHORTER).
Commands that need more than this machine has are only parsed and, for training, their settings checked (NOT_RUN).
"""

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import documented
import numpy as np
import pytest
import shapes
import timm
import torch
from coco_shapes import draw_shapes, draw_yolo
from documented import PAGES, ROOT, Block, Command
from PIL import Image

from inline_attention import create_model, linearize
from inline_attention.cli import COMMANDS, build_parser, main, parse
from inline_attention.data import DataConfig
from inline_attention.layers import ATTENTIONS
from inline_attention.models.weights import save_weights
from inline_attention.tasks.classification.classifier import preprocessing
from study import __main__ as study

COMMANDS_BY_TEXT = {str(command): command for page in PAGES for command in documented.commands(page)}
LINES = [command for command in COMMANDS_BY_TEXT.values() if not command.is_mention]

KNOWN = ("n01443537", "n01644900")  # classes that the package's models know
# Placeholders that are not files, with values that a reader might use.
WORDS = {
    "NAME": "inline_deit_tiny",
    "MODEL": "softmax_deit_study",
    "RECIPE": "quickstart",
    "H": "64",
    "W": "96",
    "$attention": "linear",
    "$run": "mine",
}

TRAINING = ["data.workers=0", "data.batch_size=2", "model.weights=null", "log.tensorboard=false", "--device", "cpu"]
TIMED = ["--quick", "--device", "cpu"]
# (first words of a command, options that shorten it); the first match is used.
SHORTER: dict[str, list[str]] = {
    "train --resume": ["--device", "cpu"],
    "train --list-recipes": [],
    "train quickstart": ["schedule.epochs=1", "schedule.warmup_epochs=0", "--device", "cpu"],
    "train": [*TRAINING, "schedule.epochs=1", "schedule.warmup_epochs=0", "schedule.cooldown_epochs=0",
              "data.img_size=32", "run.precision=fp32", "run.compile=false"],
    "segment train --resume": ["--device", "cpu"],
    "segment train": [*TRAINING, "schedule.steps=1", "schedule.warmup_steps=0", "data.crop=64",
                      "data.short_side=null", "data.ignore_index=255", "run.precision=fp32"],
    "segment eval": ["--split", "val", "--ignore-index", "255", "--device", "cpu",
                     "--workers", "0"],
    "segment predict": ["--device", "cpu"],
    "detect train --resume": ["--device", "cpu"],
    "detect train": [*TRAINING, "data.short_side=64", "data.train_short_sides=[64]", "model.regions=8",
                     "schedule.epochs=1", "schedule.drop_at=[]", "schedule.warmup_steps=0", "run.precision=fp32"],
    "detect eval": ["--device", "cpu", "--workers", "0"],
    "detect predict": ["--device", "cpu"],
    "linearize --resume": ["--device", "cpu", "--no-report"],
    "linearize": ["data.workers=0", "data.batch_size=2", "match.steps=1", "schedule.epochs=1", "log.tensorboard=false",
                  "--device", "cpu", "--no-report"],
    "eval": ["--img-size", "64", "--batch-size", "4", "--workers", "0", "--device", "cpu"],
    "predict": ["--device", "cpu"],
    "analyze": ["--max-images", "2", "--batch-size", "2", "--workers", "0", "--device", "cpu"],
    "bench op": [*TIMED, "--case", "1,4,1x8"],
    "bench table": [],
    "bench break-even": [*TIMED, "--sides", "2", "4"],
    "bench dense": [*TIMED, "--img-size", "64", "--batch-size", "1", "--infer", "--modes", "eager"],
    "bench profile": ["--img-sizes", "32", "--batch-sizes", "1", "--mode", "eager", "--device", "cpu"],
    "bench": [*TIMED, "--img-sizes", "32", "--batch-sizes", "1", "--modes", "eager"],
}  # fmt: skip

# (pattern, why a command is not run)
NOT_RUN = {
    r"torchrun ": "needs several processes; tests/integration/test_distributed.py starts them",
    r"make |python -m pip |pip|pip-compile |git ": "sets up an installation",
    r"python -c .*runpy": "not part of timm's package; tests/tasks/classification/test_timm_script.py",
    r"inline .*(--weights pretrained|model.weights=pretrained)(?!.*_study)(?<!_study)": "downloads published weights",
    r"inline linearize deit_small": "downloads published weights; tests/tasks/linearization has a model of timm",
    r"inline train study/": "one of the study's runs, on a GPU",
    r"inline segment train .*model.weights=runs/study": "begins from one of the study's runs",
    r"inline bench (kernels|tune|sweep .*(fused|--cast-weights))": "needs a GPU",
    r"python -m study": "takes long or needs the trained grid; tests/integration/test_runs.py makes a small one",
    r"inline .*\|": "a synopsis, with alternatives in it",
    r"inline explore": "serves until Ctrl-C; test_explore_starts below",
}
# Run by `make test`; the rest takes longer.
FAST = re.compile(
    r"inline (models|info|env|convert|predict|bench table|train --list|train quickstart --print|analyze inj)"
)


def reason_not_to_run(command: Command) -> str | None:
    text = str(command)
    if "_study" in text and "pretrained" in text:
        return None  # these weights come with the package
    return next((reason for pattern, reason in NOT_RUN.items() if re.match(pattern, text)), None)


def inline_words(command: Command) -> list[str]:
    """The arguments of `main`, with names in place of placeholders."""
    words = list(command.words)
    if "inline_attention" in words:  # python or torchrun -m inline_attention
        words = words[words.index("inline_attention") :]
    words = [WORDS.get(word, word) for word in words[1:] if word not in ("…", "...")]
    for name, value in WORDS.items():
        if name.startswith("$"):
            words = [word.replace(name, value) for word in words]
    return words


def shorter(words: list[str]) -> list[str]:
    text = " ".join(words) + " "
    return next((more for start, more in SHORTER.items() if text.startswith(f"{start} ")), [])


# The files that commands name.


def task_of(words: list[str]) -> str:
    return words[0] if words[0] in ("segment", "detect", "linearize") else "classify"


def make_photograph(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(len(path.name))
    Image.fromarray(draw.integers(0, 256, (64, 80, 3), dtype=np.uint8)).save(path)


def make_data(folder: Path, task: str, *, classes: tuple[str, ...] = ("cat", "dog")) -> None:
    if task == "segment":
        shapes.write(folder, train=4, val=2)
    elif task == "detect" and folder.name == "yolo":
        draw_yolo(folder, splits={"train": 2, "val": 2})
    elif task == "detect":
        for split in ("train2017", "val2017", "train", "val"):
            draw_shapes(folder, split=split, images=2)
    elif folder.name == "scenes":  # an image has several labels
        names = ("", "cat", "dog", "cat|dog")
        for number in range(8):
            make_photograph(folder / f"{number}.png")
        rows = (f"{number}.png,{names[number % 4]}\n" for number in range(8))
        (folder / "labels.csv").write_text("file,labels\n" + "".join(rows))
    else:
        for split in ("train", "val"):
            for name in classes:
                for number in range(2):
                    make_photograph(folder / split / name / f"{number}.png")


def make_weights(path: Path, words: list[str]) -> None:
    """For the model that the command names: the classes of its data, and how images are prepared."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = next((word for word in words if timm.is_model(word)), "inline_deit_tiny")
    if path.suffix == ".pth":
        torch.save({"model": create_model("inline_swin_tiny").state_dict()}, path)
        return
    sizes = dict(img_size=32) if words[0] in ("analyze", "explore") else {}
    classes = [str(digit) for digit in range(10)] if "digits" in words else ["cat", "dog"]
    options: dict[str, Any] = dict(num_classes=len(classes))
    if path.stem in ATTENTIONS:  # explore takes a file for each attention
        options["attention"] = path.stem
    model = create_model("softmax_deit_tiny" if path.stem == "student" else name, **options, **sizes)
    if path.stem == "student":
        linearize(model)
    prepared = preprocessing(DataConfig(eval_transform="resize", **sizes))
    save_weights(model, path, metadata={"class_names": json.dumps(classes), "preprocessing": prepared})


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"root": tmp_path_factory.mktemp("runs")}


def finished_run(task: str, runs: dict[str, Path]) -> Path:
    """A run that the task's own command has made, once for all tests."""
    if task not in runs:
        folder, data = runs["root"] / task, runs["root"] / f"{task}-data"
        make_data(data, task, classes=KNOWN if task == "linearize" else ("cat", "dog"))
        recipe = dict(classify="train quickstart", segment="segment train camvid_fpn",
                      detect="detect train mask_rcnn_inline_pvt_tiny_1x",
                      linearize="linearize softmax_deit_study")[task].split()  # fmt: skip
        given = [] if task == "classify" else ["--data", str(data)]
        words = [*recipe, *given, "--output", str(folder)]
        assert main([*words, *shorter(words)]) == 0
        runs[task] = folder
    return runs[task]


def prepare(words: list[str], folder: Path, runs: dict[str, Path]) -> None:
    """Make what the command reads, below `folder`."""
    task = task_of(words)
    outputs = {words[i + 1] for i, word in enumerate(words) if word in ("--output", "--json", "--csv", "--picture")}
    if words[0] == "convert":
        outputs.add(words[2])
    shipped = words[0] in ("analyze", "eval", "linearize") and ("--weights" not in words or "pretrained" in words)
    classes = KNOWN if shipped else ("cat", "dog")
    for output in outputs:
        (folder / output).parent.mkdir(parents=True, exist_ok=True)
    for before, word in zip(["", *words], words, strict=False):
        path = folder / word
        if before == "--data" and word != "digits":
            for data in re.sub(r"\w+=", "", word).split(","):
                if not (folder / data).exists():
                    make_data(folder / data, task, classes=classes)
        elif before == "--output" and "--resume" in words:
            shutil.copytree(finished_run(task, runs), path)
        elif word in outputs or path.exists():
            continue
        elif path.suffix in (".safetensors", ".pth") and task != "classify":
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(finished_run(task, runs) / "checkpoints" / "best.safetensors", path)
        elif path.suffix in (".safetensors", ".pth"):
            make_weights(path, words)
        elif path.suffix in (".jpg", ".png"):
            make_photograph(path)
        elif word.endswith("/"):
            make_photograph(path / "a.jpg")
        elif path.suffix == ".yaml" and (ROOT / word).is_file():  # the study's recipe
            path.parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / word, path)
        elif path.suffix == ".yaml":
            make_data(folder / "photos", task)
            path.write_text(next(b.text for page in PAGES for b in documented.blocks(page) if b.language == "yaml"))
        elif words[:2] == ["bench", "table"] and (word == "FILE" or path.suffix == ".json"):
            record = ROOT / word
            if not record.is_file():
                record = ROOT / "docs" / "results" / ("dense-h200.json" if "dense" in word else "kernels-h200.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(record, path)


# The tests.


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_command_can_be_parsed(
    page: Path,
    tmp_path: Path,
    runs: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Options exist and settings are known. A command in a sentence exists."""
    monkeypatch.chdir(tmp_path)
    for command in documented.commands(page):
        words = inline_words(command)
        if command.words[0] == "make":
            assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), command
        elif command.words[:3] == ("python", "-m", "study"):
            parse(study.build_parser(), command.words[3:])
        elif command.is_mention or "--help" in words:
            with pytest.raises(SystemExit) as done:
                main([*words, "--help"])
            assert done.value.code == 0, command
        elif words[0] in COMMANDS and "|" not in str(command):
            args = parse(build_parser(words[0]), words[1:])  # exits where it cannot
            if "train" in words[:2] and args.resume is None and not args.list_recipes:
                if any(word.endswith(".yaml") for word in words):
                    prepare(words, tmp_path, runs)
                assert main([*words, "--print-config"]) == 0, capsys.readouterr().err


def test_commands_are_found() -> None:
    """Without this test, the others would pass on pages without commands."""
    texts = set(COMMANDS_BY_TEXT)
    assert any(text.startswith("inline train finetune --data") for text in texts)
    assert any(text.startswith("torchrun --standalone") for text in texts)
    assert "inline models" in texts
    assert len(LINES) > 50


def test_a_line_that_is_no_known_command_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown command 'inlin train'"):
        documented._shell_lines(Block(ROOT / "README.md", 1, "bash", "inline models\ninlin train\n"))


def cases() -> list:
    found = []
    for command in LINES:
        if reason_not_to_run(command) is None:
            marks = [] if FAST.match(str(command)) else [pytest.mark.slow]
            found.append(pytest.param(command, id=str(command)[:80], marks=marks))
    return found


@pytest.mark.parametrize("command", cases())
def test_the_command_runs(
    command: Command,
    tmp_path: Path,
    runs: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command.words[0] == "inline", f"{command}: say in NOT_RUN why it is not run"
    words = inline_words(command)
    prepare(words, tmp_path, runs)
    monkeypatch.chdir(tmp_path)
    status = main([*words, *shorter(words)])
    assert status == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is no signal to one process there")
@pytest.mark.parametrize("command", [c for c in LINES if c.words[:2] == ("inline", "explore")], ids=str)
def test_explore_starts(command: Command, tmp_path: Path, runs: dict[str, Path]) -> None:
    words = inline_words(command)
    prepare(words, tmp_path, runs)
    # A shell's background job ignores Ctrl-C, and so do its children.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    start += "from inline_command import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", start, *words, "--port", "0", "--device", "cpu"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    first = process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert first.startswith("http://127.0.0.1:"), errors
    assert process.returncode == 0


# Python blocks: those of a page share their names, as in one session.

# What a page assumes to be there.
GIVEN = {
    "docs/weights.md": """
import timm
from inline_attention import create_model
my_model = other_model = create_model("inline_swin_tiny")
class_names = [f"class {number}" for number in range(1000)]
""",
}
# (pattern, in its place, why)
REPLACED = [
    (r"\.cuda\(\)", "", "there may be no GPU"),
    (r'"cuda"', '"cpu"', "there may be no GPU"),
    (r'(create_model\("inline_(?!\w*_study)\w+"), pretrained=True', r"\1", "published weights would be downloaded"),
    (r'"https://example.org/([\w.]+)"', r'"\1"', "there is no such address"),
    (
        r'plan_run\("(\w+)", overrides=\[(.*?)\]',
        r'plan_run("\1", overrides=[\2, *settings("\1")]',
        "short",
    ),
    (r"batch_size=64", "batch_size=2", "the data set has four images"),
    (r"torch\.randn\(1, 3, (\d+), (\d+)\)", "torch.randn(1, 3, 96, 160)", "short"),
]
# Blocks that need what a test does not have.
NOT_EXECUTED = {
    "pack_weights(": "needs a run of the study; tests/models/test_shipped.py packs one",
    "integrations.transformers": "downloads a model; tests/integrations/test_transformers.py builds small ones",
    "integrations.diffusers": "needs a pipeline; tests/integrations/test_diffusers.py builds a small transformer",
    "from transformers import": "needs transformers; tests/models/test_hub.py opens such a folder in every way",
    "push_to_hub(": "needs an account of the hub; tests/models/test_hub.py opens the folder",
    "upload_folder(": "needs an account of the hub; tests/models/test_hub.py opens the folder",
}
FAST_PAGES = ("README.md", "docs/attention.md", "src/inline_attention/models/study/README.md")


def python_pages() -> list:
    pages = {
        page.relative_to(ROOT).as_posix(): [b for b in documented.blocks(page) if b.language == "python"]
        for page in PAGES
    }
    return [
        pytest.param(name, found, id=name, marks=[] if name in FAST_PAGES else [pytest.mark.slow])
        for name, found in pages.items()
        if found
    ]


@pytest.mark.parametrize(("name", "found"), python_pages())
def test_python_blocks_run(name: str, found: list[Block], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in ("ckpt_epoch_299.pth", "checkpoint-42.pth.tar", "model.safetensors"):
        if any(file in block.text for block in found):
            torch.save({"model": create_model("inline_swin_tiny").state_dict()}, file)
    for folder in ("imagenette", "flowers"):
        make_data(tmp_path / folder, "classify")
    names = {"settings": lambda recipe: [word for word in shorter(["train", recipe]) if "=" in word]}
    exec(GIVEN.get(name, ""), names)
    for block in found:
        if any(start in block.text for start in NOT_EXECUTED):
            compile(block.text, str(block), "exec")
            continue
        text = block.text
        for pattern, replacement, _ in REPLACED:
            text = re.sub(pattern, replacement, text)
        exec(compile(text, str(block), "exec"), names)


def test_python_blocks_are_found() -> None:
    assert len(python_pages()) > 5
