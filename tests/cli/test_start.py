"""What `inline` does before a command runs, and how foreign text reaches the terminal."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import training_runs
from PIL import Image

from inline_attention import __version__, create_model
from inline_attention.cli import COMMANDS, main
from inline_attention.cli._words import FILE, as_text
from inline_attention.data import DataConfig
from inline_attention.models.weights import save_weights
from inline_attention.printing import printable
from inline_attention.tasks.classification.classifier import preprocessing

START = "import sys; from inline_command import main; sys.exit(main())"


def test_every_command_has_a_file_and_every_file_is_a_command() -> None:
    import inline_attention.cli as package

    files = {path.stem for path in Path(package.__file__).parent.glob("*.py") if not path.stem.startswith("_")}
    assert files == set(COMMANDS)


def test_the_package_is_the_command_too() -> None:
    done = subprocess.run([sys.executable, "-m", "inline_attention", "trian"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "did you mean 'train'?" in done.stderr


LIGHT = """
import sys
from inline_command import main
try:
    status = main(sys.argv[1:])
except SystemExit as done:
    status = done.code
print("status", status)
print(*sorted({"torch", "timm", "numpy", "rich", "inline_attention"} & set(sys.modules)), sep="\\n")
"""


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (["--help"], 0, "table of the models"),
        (["--version"], 0, f"inline-attention {__version__}\n"),
        ([], 2, "name a command"),
        (["trian"], 2, "there is no command 'trian'; did you mean 'train'?"),
        (["--trian"], 2, "unrecognized arguments: --trian"),
        (["completion", "--help"], 0, "~/.bashrc"),
        (["completion", "bash"], 0, "complete -o default -F _inline inline"),
        (["completion", "zsh"], 0, "compdef _inline inline"),
        (["completion", "fish"], 0, "mask_rcnn_inline_pvt_tiny_1x"),
        (["completion", "tcsh"], 2, "invalid choice: 'tcsh'"),
    ],
    ids=["help", "version", "nothing", "typo", "option", "completion", "bash", "zsh", "fish", "shell"],
)
def test_no_library_is_imported_before_a_command_is_known(words: list[str], status: int, said: str) -> None:
    """On a terminal that shows ASCII only, because these words are printed before other characters are escaped"""
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", LIGHT, *words], capture_output=True, text=True, env=ascii_only)
    out, _, imported = done.stdout.partition(f"status {status}\n")
    assert said in out + done.stderr
    assert imported.split() == []


def test_the_words_that_shells_complete_are_those_of_the_parsers() -> None:
    assert FILE.read_text() == as_text(), "run python -m inline_attention.cli._words"


# What is typed, and some of what is offered. The last word is the one at the cursor.
TYPED = [
    ("inline ''", {"models", "train", "completion"}, {"--data"}),
    ("inline seg", {"segment"}, {"train"}),
    ("inline segment ''", {"train", "predict"}, {"segment", "--data"}),
    ("inline segment eval --ig", {"--ignore-index"}, {"--layout"}),
    ("inline detect train faster", {"faster_rcnn_inline_pvt_tiny_1x"}, {"mask_rcnn_inline_pvt_tiny_1x"}),
    ("inline predict --we", {"--weights"}, {"--data"}),
]
ASK = {
    "bash": """
        eval "$({python} -c '{start}' completion bash)"
        COMP_WORDS=({typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _inline; printf '%s\n' "${{COMPREPLY[@]}}"
    """,
    "zsh": """
        compdef() {{ :; }}; _files() {{ :; }}
        compadd() {{ shift; for word in "$@"; do [[ $word == $words[$CURRENT]* ]] && print -r -- $word; done }}
        eval "$({python} -c '{start}' completion zsh)"
        words=({typed}); CURRENT=$#words; _inline
    """,
    "fish": """
        {python} -c '{start}' completion fish | source
        complete -C "{line}"
    """,
}


@pytest.mark.parametrize("shell", ASK)
def test_a_shell_completes(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    for typed, offered, absent in TYPED:
        line = typed.replace("''", "")
        code = ASK[shell].format(python=sys.executable, start=START, typed=typed, line=line)
        done = subprocess.run([shell, "-c", code], capture_output=True, text=True)
        found = {line.split("\t")[0] for line in done.stdout.splitlines()}
        assert offered <= found, (typed, done.stdout, done.stderr)
        assert not absent & found, (typed, found)


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["train", "--lr", "1"], "inline train"),
        (["bench", "op", "--lr", "1"], "inline bench op"),
        (["segment", "train", "--lr", "1"], "inline segment train"),
        (["predict", "photo.jpg", "--lr", "1"], "inline predict"),
        (["models", "vit", "deit"], "inline models"),
    ],
)
def test_an_unknown_option_shows_the_usage_of_its_command(
    words: list[str], command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(words)
    assert done.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"usage: {command} ")
    assert f"{command}: error: unrecognized arguments: " in error


def test_only_what_is_required_is_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["analyze"])
    assert capsys.readouterr().err.endswith("required: analysis, --output\n")


@pytest.mark.parametrize("words", [["predict", "photo.jpg"], ["segment", "predict", "photo.jpg"]], ids=lambda w: w[0])
def test_a_misspelt_option_is_recognised(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--weights", "w", "--precison=fp16"])
    assert "--precison=fp16; did you mean --precision?" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="pipes are other there")
def test_a_reader_that_leaves_ends_a_command_quietly() -> None:
    """As in `inline models | head -1`."""
    process = subprocess.Popen(
        [sys.executable, "-c", START, "models"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    _, error = process.communicate(timeout=60)
    assert error == ""
    assert process.returncode == 141


def test_out_of_memory_is_one_line(weights: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", str(images), "--weights", str(weights), "--device", "cpu", "--img-size", str(10**7)]
    assert main(words) == 2
    assert "inline predict: out of memory: use smaller images" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is no signal to one process there")
@pytest.mark.parametrize("moment", ["torch._utils", pytest.param("inline_attention.layers", marks=pytest.mark.slow)])
def test_ctrl_c_while_libraries_load(moment: str) -> None:
    """`-X importtime` reports each module that has been imported: the signal is sent at a known moment."""
    listening = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "  # pytest may run under nohup
    )
    command = [sys.executable, "-X", "importtime", "-c", listening + START, "env"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.rpartition("|")[2].strip() == moment:
            process.send_signal(signal.SIGINT)
            break
    out, rest = process.communicate(timeout=60)
    said = [line for line in rest.splitlines() if not line.startswith("import time:")]
    assert said == ["inline env: interrupted"]
    assert out == ""
    assert process.returncode == 130


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is no signal to one process there")
def test_a_process_that_ignores_ctrl_c_goes_on_doing_so() -> None:
    """As under nohup."""
    ignoring = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); " + START
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-c", ignoring, "models", "inline_deit_tiny", "--json", "-"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "torch._utils" in line:
            process.send_signal(signal.SIGINT)
            break
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out)[0]["name"] == "inline_deit_tiny"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("brown bear, ×, 漢字, é", "brown bear, ×, 漢字, é"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("a\nb\tc\r", r"a\nb\tc\r"),
        ("\x9b2J", r"\x9b2J"),  # the one-byte form of an escape sequence
        ("\u202egnp.exe", r"\u202egnp.exe"),  # reverses the direction of writing
        (os.fsdecode(b"\xff.png"), r"\udcff.png"),
    ],
)
def test_printable(text: str, shown: str) -> None:
    assert printable(text) == shown


EVIL = "\x1b]0;title\x07[/bold]"


def evil_weights(folder: Path) -> Path:
    """A model whose classes carry escape sequences, in a file whose name is markup of rich."""
    torch.manual_seed(0)
    model = create_model(
        "inline_deit_tiny", img_size=8, embed_dim=16, depth=1, num_heads=2, patch_size=4, num_classes=2
    )
    metadata = {
        "class_names": json.dumps([f"{EVIL} 0", f"{EVIL} 1"]),
        "preprocessing": preprocessing(DataConfig(eval_transform="resize")),
    }
    return save_weights(model, folder / "[bold].safetensors", metadata=metadata)


def test_names_from_files_cannot_control_the_terminal(tmp_path: Path) -> None:
    """A class name with an escape sequence, an image and weights whose names are markup, a name that is not UTF-8, and
    an image that cannot be read."""
    weights = evil_weights(tmp_path)
    images = tmp_path / "images"
    images.mkdir()
    names = [b"\xff.png", b"\x1b[31m.png", b"[red].png"]
    for name in names:
        Image.new("RGB", (8, 8)).save(images / os.fsdecode(name))
    (images / "\x1b[2Jbroken.png").write_bytes(b"")
    results, log = [f"--json={tmp_path / 'out.json'}", f"--csv={tmp_path / 'out.csv'}"], tmp_path / "log.txt"
    status = training_runs.run(["predict", f"--weights={weights}", str(images), "--device=cpu", *results], log=log)
    printed = log.read_text()
    assert status == 0, printed
    assert r"\x1b]0;title\x07[/bold] 0" in printed
    assert r"\udcff.png" in printed
    assert r"\x1b[2Jbroken.png" in printed
    assert "\x1b" not in printed
    predictions = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))["predictions"]
    assert {os.fsencode(Path(entry["image"]).name) for entry in predictions} == set(names)
    assert r"\udcff.png" in (tmp_path / "out.csv").read_text(encoding="utf-8")


def test_names_that_are_markup_can_be_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = evil_weights(tmp_path)
    target = tmp_path / "[" / "bold]\x1b[31m.safetensors"
    target.parent.mkdir()
    assert main(["convert", str(weights), str(target)]) == 0
    assert target.exists()
    out = capsys.readouterr().out
    assert r"[/bold]\x1b[31m.safetensors" in out
    assert "\x1b" not in out
    assert main(["convert", str(weights), str(target)]) == 2  # the error names the file as well
    error = capsys.readouterr().err
    assert r"[/bold]\x1b[31m.safetensors exists" in error
    assert "\x1b" not in error
