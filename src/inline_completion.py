"""Scripts that make shells complete the command `inline`. They need neither PyTorch nor this package when they run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

SHELLS = ("bash", "zsh", "fish")
HOW = """\
bash: echo 'eval "$(inline completion bash)"' >> ~/.bashrc
zsh:  echo 'eval "$(inline completion zsh)"' >> ~/.zshrc     (after compinit)
fish: inline completion fish > ~/.config/fish/completions/inline.fish"""
# Commands that take the name of a recipe, and the folder of their recipes in the package
_RECIPES = {"train": "classification", "segment train": "segmentation", "detect train": "detection"}


def script(shell: str, package: Path, commands: Mapping[str, str]) -> str:
    """package: its folder; commands: name → help."""
    words: dict[str, list[str]] = json.loads((package / "cli" / "words.json").read_text(encoding="utf-8"))
    for command, task in _RECIPES.items():
        folder = package / "tasks" / task / "recipes"
        words[command] = [*sorted(path.stem for path in folder.glob("*.yaml")), *words[command]]
    words["completion"] = list(SHELLS)
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell](words, commands)


def _with_actions(words: Mapping[str, Sequence[str]]) -> str:
    """The commands whose next word is an action, as a pattern of `case`"""
    return "|".join(sorted({name.partition(" ")[0] for name in words if " " in name}))


def _cases(words: Mapping[str, Sequence[str]], commands: Mapping[str, str], indent: str) -> str:
    lines = [f'"") found="{" ".join([*commands, "--help", "--version"])}" ;;']
    lines += [f'"{name}") found="{" ".join(found)}" ;;' for name, found in words.items()]
    return "\n".join(indent + line for line in lines)


def _bash(words: Mapping[str, Sequence[str]], commands: Mapping[str, str]) -> str:
    return f"""\
_inline() {{
    local found="" key=""
    if ((COMP_CWORD > 1)); then
        key="${{COMP_WORDS[1]}}"
        case "$key" in {_with_actions(words)})
            if ((COMP_CWORD > 2)); then key="$key ${{COMP_WORDS[2]}}"; fi ;;
        esac
    fi
    case "$key" in
{_cases(words, commands, "        ")}
    esac
    COMPREPLY=($(compgen -W "$found" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _inline inline
"""


def _zsh(words: Mapping[str, Sequence[str]], commands: Mapping[str, str]) -> str:
    return f"""\
#compdef inline
_inline() {{
    local found="" key=""
    if ((CURRENT > 2)); then
        key="${{words[2]}}"
        case "$key" in {_with_actions(words)})
            if ((CURRENT > 3)); then key="$key ${{words[3]}}"; fi ;;
        esac
    fi
    case "$key" in
{_cases(words, commands, "        ")}
    esac
    compadd -- ${{=found}}
    if ((CURRENT > 2)); then _files; fi
}}
compdef _inline inline
"""


def _fish(words: Mapping[str, Sequence[str]], commands: Mapping[str, str]) -> str:
    first = "complete -c inline -n __fish_use_subcommand"
    lines = [f"{first} -f -a {name} -d {_quoted(text)}" for name, text in commands.items()]
    lines += [f"{first} -l {option}" for option in ("help", "version")]
    for name, found in words.items():
        command, _, action = name.partition(" ")
        actions = [word for word in found if f"{name} {word}" in words]
        seen = f"__fish_seen_subcommand_from {command}"
        if action:
            seen += f"; and __fish_seen_subcommand_from {action}"
        elif actions:
            seen += f"; and not __fish_seen_subcommand_from {' '.join(actions)}"
        for word in found:
            given = f"-l {word.removeprefix('--')} -r" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c inline -n '{seen}' {given}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return "'" + text.replace("'", r"\'") + "'"
