"""One vocabulary over all commands: an option has one name, one meaning, and a line of help."""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from inline_attention.cli import COMMANDS, build_parser, main

# What the shared options take: type, number of values, choices.
SHARED = {
    "--img-size": (int, "+", None),
    "--batch-size": (int, None, None),
    "--workers": (int, None, None),
    "--precision": (None, None, ("bf16", "fp16", "fp32")),
    "--csv": (Path, None, None),
}
# Other names for the same things.
SYNONYMS = {"--out", "--amp", "--dtype", "--batch", "--size", "--image-size", "--bs", "--model-path", "--checkpoint"}


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of commands that run something."""
    nested = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not nested:
        yield parser
    for action in nested:
        for child in action.choices.values():
            yield from leaves(child)


def options() -> dict[str, list[tuple[str, argparse.Action]]]:
    """Option → (command, what it does) of every command that has it"""
    found = defaultdict(list)
    for command in COMMANDS:
        for leaf in leaves(build_parser(command)):
            for action in leaf._actions:
                for name in action.option_strings:
                    found[name].append((leaf.prog, action))
    return found


def test_an_option_means_the_same_everywhere() -> None:
    found = options()
    assert SYNONYMS & found.keys() == set()
    for name, expected in SHARED.items():
        assert len(found[name]) >= 3, name
        for command, action in found[name]:
            choices = tuple(action.choices) if action.choices else None
            assert (action.type, action.nargs, choices) == expected, f"{command} {name}"
    files = [action for _, action in found["--json"]]
    assert {action.metavar for action in files} == {"FILE"}
    assert all(action.nargs is None for action in files)


def test_every_option_has_a_line_of_help() -> None:
    silent = {f"{command} {name}" for name, uses in options().items() for command, action in uses if not action.help}
    assert silent == set()


@pytest.mark.parametrize("words", [["train"], ["segment", "train"], ["detect", "train"]], ids=" ".join)
def test_help_shows_the_settings_with_their_comments(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    _, _, listed = capsys.readouterr().out.partition("settings, with their defaults")
    shown = dict(line.strip().split("=", 1) for line in listed.splitlines()[1:])
    assert shown["optim.accumulate"].split(maxsplit=1) == ["1", "batches per update; part of the global batch"]
    assert shown["model.kwargs"].split(maxsplit=1) == ["{}", "further arguments of create_model"]
    assert shown["data.batch_size"].endswith("per rank")


@pytest.mark.parametrize(
    "words", [["models", "inline_deit*"], ["info", "inline_deit_tiny"], ["env"]], ids=lambda w: w[0]
)
def test_json_can_take_the_place_of_text(words: list[str], tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--json", "-"]) == 0
    alone = json.loads(capsys.readouterr().out)
    file = tmp_path / "result.json"
    assert main([*words, "--json", str(file)]) == 0
    assert json.loads(file.read_text(encoding="utf-8")) == alone
    assert capsys.readouterr().out  # text, besides
    assert main([*words, "--json", str(tmp_path)]) == 2
