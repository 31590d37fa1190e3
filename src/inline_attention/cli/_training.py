"""Arguments and behaviour that the training commands share: `inline train`, `inline segment train`, …"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inline_attention.printing import say

if TYPE_CHECKING:
    from inline_attention.training.loop import Outcome
    from inline_attention.training.task import Task


def configure_training(parser: argparse.ArgumentParser, *, data: str, recipe: str) -> None:
    """Add the arguments. data, recipe: help texts of these arguments."""
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help=recipe)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as optim.lr=1e-3")
    parser.add_argument("--data", metavar="PATH", help=data)
    parser.add_argument("--output", metavar="DIR", help="run folder (runs/RECIPE-TIME)")
    parser.add_argument("--resume", metavar="auto|PATH", help="continue the run in --output, or one elsewhere")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--deterministic", action="store_true", help="only deterministic algorithms")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"))
    parser.add_argument("--print-config", action="store_true", help="show every setting and exit")
    parser.add_argument("--list-recipes", action="store_true", help="show the recipes and exit")
    _allow_any_order(parser)


def _allow_any_order(parser: argparse.ArgumentParser) -> None:
    """Allow settings between and after options. argparse supports this, but not for a subcommand by itself."""
    in_order = parser.parse_known_args

    def in_any_order(args: Any = None, namespace: Any = None) -> Any:
        parser.parse_known_args = in_order  # type: ignore[method-assign]  # parse_known_intermixed_args calls it
        try:
            return parser.parse_known_intermixed_args(args, namespace)
        finally:
            parser.parse_known_args = in_any_order  # type: ignore[method-assign]

    parser.parse_known_args = in_any_order  # type: ignore[method-assign]


def run_training(args: argparse.Namespace, *, task: "type[Task]", describe_outcome: "Callable[[Outcome], str]") -> int:
    from inline_attention.training import settings
    from inline_attention.training.config import describe_recipe, recipe_names
    from inline_attention.training.run_folder import plan_run

    if args.list_recipes:
        names = recipe_names(task.recipes)
        for name in names:
            say(f"{name:<{max(map(len, names))}}  {describe_recipe(name, task.recipes)}")
        return 0
    overrides = list(args.overrides)
    recipe = args.recipe
    # Without a recipe the first setting takes its place. A recipe file may have "=" in its name.
    if recipe is not None and "=" in recipe and not (recipe.endswith((".yaml", ".yml")) and Path(recipe).is_file()):
        recipe, overrides = None, [recipe, *overrides]
    plan = plan_run(recipe, task=task, overrides=overrides, flags=_flags(args), output=args.output, resume=args.resume)
    if args.print_config:
        print(settings.to_yaml(plan.config), end="")
        return 0

    from inline_attention.training.loop import train

    outcome = train(plan)
    if outcome.signal:
        return 128 + outcome.signal
    if outcome.is_first_rank:
        print(describe_outcome(outcome))
    return 0


def _flags(args: argparse.Namespace) -> dict[str, object]:
    flags: dict[str, object] = {}
    if args.data is not None:
        flags["data"] = {"path": args.data}
    if args.seed is not None:
        flags["seed"] = args.seed
    if args.deterministic:
        flags["deterministic"] = True
    if args.device is not None:
        flags["device"] = args.device
    return flags
