"""Finds the command lines and Python blocks in the pages of the documentation."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in [*ROOT.glob("*.md"), *(path for top in ("docs", "src", "study") for path in (ROOT / top).rglob("*.md"))]
    if path.name != "CHANGELOG.md"  # says what was, not what to type
)
SHELL = ("", "bash", "sh", "console")
PROGRAMS = ("inline", "torchrun", "make", "python", "pip", "pip-compile", "git")
# Lines of shell scripts around commands.
SCRIPT = re.compile(r"(for|do|done|if|fi|then|\[|scontrol|\w+=\S*$|\w+=\$\()")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of the page, counted from 1
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """One command line, without comments, prompts and variables set before it."""

    page: Path
    words: tuple[str, ...]
    is_mention: bool = False  # a command's name in a sentence

    def __str__(self) -> str:
        return shlex.join(self.words)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)
    return [Block(page, text[: match.start()].count("\n") + 1, match[1], match[2]) for match in found]


def commands(page: Path) -> list[Command]:
    """Of the shell blocks, in order, then of the code in sentences and tables. ValueError for a line that is neither a
    known program's nor a shell script's."""
    found = []
    for block in blocks(page):
        if block.language in SHELL:
            found += [Command(page, tuple(words)) for words in _shell_lines(block)]
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`((?:inline|make|torchrun) [^`\n]+)`", prose):
        words = tuple(_split(code))
        is_mention = len(words) <= 3 and all(re.fullmatch("[a-z]+", word) for word in words[1:])
        found.append(Command(page, words, is_mention=is_mention))
    return list(dict.fromkeys(found))


def _shell_lines(block: Block) -> list[list[str]]:
    lines = [line.strip() for line in block.text.replace("\\\n", " ").split("\n")]
    if any(line.startswith("$ ") for line in lines):  # the others are what the commands printed
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    lines = [line for line in lines if line and not line.startswith("#")]
    if not block.language and lines and _program(lines[0]) is None and not SCRIPT.match(lines[0]):
        return []  # a listing, a formula, the output of something
    found = []
    for line in lines:
        if _program(line) is not None:
            found.append(_split(line))
        elif not SCRIPT.match(line):
            raise ValueError(f"{block}: unknown command {line!r}; tests/documented.py lists the programs")
    return found


def _split(line: str) -> list[str]:
    """The words of a line, from the program's name on. `{a,b}` is expanded and `$name` left as it is."""
    words = [part for word in shlex.split(line, comments=True) for part in _expand(word)]
    while words and (re.fullmatch(r"\w+=\S*", words[0]) or words[0] == "srun"):
        words.pop(0)
    return words


def _program(line: str) -> str | None:
    try:
        words = _split(line)
    except ValueError:  # no shell syntax
        return None
    return words[0] if words and words[0] in PROGRAMS else None


def _expand(word: str) -> list[str]:
    """runs/{a,b}/last → runs/a/last runs/b/last. What holds blanks is a setting in YAML."""
    match = re.fullmatch(r"([^{\s]*)\{([^{}\s]*,[^{}\s]*)\}(\S*)", word)
    return [f"{match[1]}{part}{match[3]}" for part in match[2].split(",")] if match else [word]
