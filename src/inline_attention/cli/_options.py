"""Options that several commands share, each with one name, one meaning and one line of help."""

import argparse
from pathlib import Path
from typing import Any

PRECISIONS = ("bf16", "fp16", "fp32")


def add_action(actions: Any, name: str, text: str, **kwargs: Any) -> argparse.ArgumentParser:
    """Add a subcommand. The text is its line in the list of subcommands, and begins its own help."""
    kwargs.setdefault("description", f"{text[0].upper()}{text[1:]}.")
    return actions.add_parser(name, help=text, **kwargs)


def add_device(parser: argparse.ArgumentParser, *, mps: bool = True) -> None:
    """mps: whether the command runs on Apple's GPUs."""
    text = "cpu, cuda, cuda:N or mps (default: the best available)"
    parser.add_argument("--device", metavar="D", help=text if mps else text.replace(", cuda:N or mps", " or cuda:N"))


def add_precision(parser: argparse.ArgumentParser, *, default: str) -> None:
    """default: text for the help. `args.precision` is None without the option."""
    parser.add_argument(
        "--precision", choices=PRECISIONS, help=f"number format of matrix products (default: {default})"
    )


def add_weights(parser: argparse.ArgumentParser, *, otherwise: str | None = None) -> None:
    """otherwise: help text about the weights that are used without the option. None makes it required."""
    text = "weights file, its URL, or 'pretrained' for the published weights"
    parser.add_argument(
        "--weights",
        metavar="W",
        required=otherwise is None,
        help=text if otherwise is None else f"{text} (default: {otherwise})",
    )


def add_img_size(parser: argparse.ArgumentParser, *, default: str = "that of the model") -> None:
    parser.add_argument(
        "--img-size",
        type=int,
        nargs="+",
        metavar="N",
        help=f"image side, or height and width, in pixels (default: {default})",
    )


def add_eval_transform(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--eval-transform",
        choices=("published", "timm", "resize"),
        help="how images are resized and cropped (default: as the weights say)",
    )


def add_loading(parser: argparse.ArgumentParser, *, batch_size: int | None = None) -> None:
    """Add --workers, and --batch-size if a default is given."""
    if batch_size is not None:
        parser.add_argument(
            "--batch-size", type=int, default=batch_size, metavar="N", help=f"images in a batch (default: {batch_size})"
        )
    parser.add_argument("--workers", type=int, metavar="N", help="processes that load images (default: up to 8)")


def check_at_least(args: argparse.Namespace, **minimum: float) -> None:
    """ValueError for an option whose number is below its minimum. None means that it was not given."""
    for name, least in minimum.items():
        value = getattr(args, name)
        if value is not None and not value >= least:  # NaN is not
            raise ValueError(f"--{name.replace('_', '-')} is {value}; expected at least {least}")


def add_max_broken(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-broken", type=float, default=0.01, metavar="P", help="allowed share of unreadable images (default: 0.01)"
    )


def add_output(parser: argparse.ArgumentParser, *, default: str | None = None) -> None:
    """default: a folder. None makes the option required."""
    text = "folder for the results" + ("" if default is None else f" (default: {default})")
    parser.add_argument(
        "--output",
        metavar="DIR",
        type=Path,
        required=default is None,
        default=None if default is None else Path(default),
        help=text,
    )


def add_results(parser: argparse.ArgumentParser, *, csv: str | None = None) -> None:
    """Add --json, and --csv if its content is described."""
    parser.add_argument(
        "--json", metavar="FILE", help="write the results as JSON to FILE; - prints them instead of text"
    )
    if csv is not None:
        parser.add_argument("--csv", metavar="FILE", type=Path, help=f"write {csv} to FILE")
