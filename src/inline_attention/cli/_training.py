"""Options and run of the training commands: `inline train`, `inline segment train`, `inline detect train`."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inline_attention.cli import CommandParser
from inline_attention.printing import say, say_text

if TYPE_CHECKING:
    from inline_attention.training.loop import Outcome
    from inline_attention.training.task import Task


def configure_training(
    parser: argparse.ArgumentParser, *, data: str, recipe: str, task: "Callable[[], type[Task]]"
) -> None:
    """data, recipe: help texts. task: imports the task. It is called only when the task is needed."""
    parser.usage = f"{parser.prog} [RECIPE] [key=value ...] [options]"
    parser.add_argument(
        "arguments", nargs="*", metavar="[RECIPE] [key=value ...]", help=f"{recipe}; then settings, listed below"
    )
    add_run_options(parser, data=data)
    parser.add_argument("--list-recipes", action="store_true", help="show the recipes and exit")
    if isinstance(parser, CommandParser):
        parser.more_help = lambda: describe_settings(task())
        parser.settings = lambda: setting_names(task())


def add_run_options(parser: argparse.ArgumentParser, *, data: str) -> None:
    """The options of every command that trains."""
    parser.add_argument("--data", metavar="PATH", help=data)
    parser.add_argument("--output", metavar="DIR", help="run folder (default: runs/RECIPE-TIME)")
    parser.add_argument("--resume", metavar="auto|PATH", help="continue the run in --output (auto), or the one at PATH")
    parser.add_argument("--seed", type=int, metavar="N", help="seed of all random numbers (default: 0)")
    parser.add_argument("--deterministic", action="store_true", help="use deterministic algorithms only")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda", "mps"), help="device to train on (default: the best available)"
    )
    parser.add_argument("--print-config", action="store_true", help="show every setting and exit")


def setting_names(task: "type[Task]") -> list[str]:
    from inline_attention.training import settings

    return settings.keys(task.defaults())


def describe_settings(task: "type[Task]") -> str:
    """Every setting as `key=default`, with its comment."""
    from functools import reduce

    import yaml

    from inline_attention.training import settings

    config = task.defaults()
    plain = settings.to_mapping(config)
    lines = ["settings, with their defaults (a recipe changes some of them):"]
    for key, comment in settings.comments(config).items():
        value = reduce(dict.__getitem__, key.split("."), plain)
        text = yaml.safe_dump(value, default_flow_style=True, width=1000).split("\n")[0]
        lines.append(f"  {f'{key}={text}':<38}  {comment}".rstrip())
    return "\n".join(lines)


def split_settings(arguments: "Sequence[str]") -> tuple[str | None, list[str]]:
    """[RECIPE] key=value … → the recipe, or None, and the settings. The name of a recipe file may contain "="."""
    if not arguments:
        return None, []
    first = arguments[0]
    is_file = first.endswith((".yaml", ".yml")) and Path(first).is_file()
    if "=" in first and not is_file:
        return None, list(arguments)
    return first, list(arguments[1:])


def run_training(args: argparse.Namespace, *, task: "type[Task]", describe_outcome: "Callable[[Outcome], str]") -> int:
    from inline_attention.training import settings
    from inline_attention.training.config import describe_recipe, recipe_names
    from inline_attention.training.run_folder import plan_run

    if args.list_recipes:
        names = recipe_names(task.recipes)
        for name in names:
            say(f"{name:<{max(map(len, names))}}  {describe_recipe(name, task.recipes)}")
        return 0
    recipe, overrides = split_settings(args.arguments)
    plan = plan_run(
        recipe, task=task, overrides=overrides, flags=run_flags(args), output=args.output, resume=args.resume
    )
    if args.print_config:
        say_text(settings.to_yaml(plan.config).rstrip("\n"))
        return 0

    from inline_attention.training.loop import train

    outcome = train(plan)
    if outcome.signal:
        return 128 + outcome.signal
    if outcome.is_first_rank:
        say_text(describe_outcome(outcome))
    return 0


def run_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that the options of `add_run_options` stand for."""
    flags: dict[str, Any] = {}
    if args.data is not None:
        flags["data"] = {"path": args.data}
    if args.seed is not None:
        flags["seed"] = args.seed
    if args.deterministic:
        flags["deterministic"] = True
    if args.device is not None:
        flags["device"] = args.device
    return flags
