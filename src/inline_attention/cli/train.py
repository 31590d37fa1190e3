"""Train a model. Without arguments: a small InLine-DeiT on the embedded digits, about a minute on a laptop.

The same command runs under torchrun: torchrun --nproc-per-node 8 -m inline_attention train inline_deit_tiny --data PATH
"""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inline_attention.training.loop import Outcome

HELP = "train a model; without arguments a small one, in about a minute"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help="name of a recipe or a .yaml file (quickstart)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, such as optim.lr=1e-3")
    parser.add_argument("--data", metavar="PATH", help="folder with train/ and val/, or what data.path accepts")
    parser.add_argument("--output", metavar="DIR", help="run folder (runs/RECIPE-TIME)")
    parser.add_argument("--resume", metavar="auto|PATH", help="continue the run in --output, or one elsewhere")
    parser.add_argument("--seed", type=int, metavar="N")
    parser.add_argument("--deterministic", action="store_true", help="deterministic algorithms alone")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda", "mps"))
    parser.add_argument("--print-config", action="store_true", help="show every setting and exit")
    parser.add_argument("--list-recipes", action="store_true", help="show the recipes and exit")
    _allow_any_order(parser)


def _allow_any_order(parser: argparse.ArgumentParser) -> None:
    """Let settings stand between and behind options. argparse can do that, but not by itself for a subcommand."""
    in_order = parser.parse_known_args

    def in_any_order(args: Any = None, namespace: Any = None) -> Any:
        parser.parse_known_args = in_order  # type: ignore[method-assign]  # what parse_known_intermixed_args calls
        try:
            return parser.parse_known_intermixed_args(args, namespace)
        finally:
            parser.parse_known_args = in_any_order  # type: ignore[method-assign]

    parser.parse_known_args = in_any_order  # type: ignore[method-assign]


def run(args: argparse.Namespace) -> int:
    from inline_attention.training import settings
    from inline_attention.training.config import recipe_names
    from inline_attention.training.run_folder import plan_run

    if args.list_recipes:
        print("\n".join(recipe_names()))
        return 0
    overrides = list(args.overrides)
    recipe = args.recipe
    if recipe is not None and "=" in recipe:  # no recipe was given, the first setting took its place
        recipe, overrides = None, [recipe, *overrides]
    plan = plan_run(recipe, overrides=overrides, flags=_flags(args), output=args.output, resume=args.resume)
    if args.print_config:
        print(settings.to_yaml(plan.config), end="")
        return 0

    from inline_attention.training.loop import train

    outcome = train(plan)
    if outcome.signal:
        return 128 + outcome.signal
    if outcome.is_first_rank:
        print(_farewell(outcome))
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


def _farewell(outcome: "Outcome") -> str:
    summary, folder = outcome.summary, outcome.folder
    best = folder / "checkpoints" / "best.safetensors"
    lines = [
        "",
        f"accuracy  top-1 {summary['val_top1']:.2f}%, top-5 {summary['val_top5']:.2f}% on the validation split "
        f"(best {summary['best_top1']:.2f}%, epoch {summary['best_epoch']})",
        f"time      {summary['seconds']:.0f} s of training, {summary['images_per_second']:,.0f} images/s",
        f"curves    {folder / 'curves.png'}",
        f"weights   {best}",
    ]
    if summary["skipped_images"]:
        lines.append(f"skipped   {summary['skipped_images']} unreadable images")
    lines += ["", "next:"]
    if summary["recipe"] == "quickstart":
        lines += [
            "  inline train inline_deit_tiny --data FOLDER    your images: FOLDER/train/CLASS, FOLDER/val/CLASS",
            "  inline train --list-recipes                    the published models",
        ]
    lines += [
        f"  inline predict {summary['model']} --weights {best} IMAGE",
        f"  inline eval {summary['model']} --weights {best} --data FOLDER",
    ]
    return "\n".join(lines)
