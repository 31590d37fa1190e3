"""Run the paper's analyses on any models and images: figures, tables and numbers. `all` also writes one report page.

MODEL is a name of this library or of timm, with arguments if needed: inline_deit_tiny,attention=linear. It is not
needed for a weights file of this library, which names its model. Without models, those that come with the package are
compared. Without images, two photographs of the package are used.
"""

import argparse
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from inline_attention.cli._options import add_device, add_img_size, add_loading, add_output
from inline_attention.cli._output import image_progress, parse_size
from inline_attention.environment import choose_device
from inline_attention.printing import say

if TYPE_CHECKING:
    from inline_attention.analysis import Analysis, Findings, Subject


def configure(parser: argparse.ArgumentParser) -> None:
    from inline_attention.analysis import analysis_class, analysis_names

    parser.add_argument("analysis", choices=(*analysis_names(), "all"), help="the measurement, or all of them")
    parser.add_argument(
        "arguments",
        nargs="*",
        default=[],  # without it, argparse calls MODEL required
        metavar="MODEL",
        help="the model; several are compared (default: those with weights in the package)",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        metavar="W",
        default=[],
        help="for each model a file, URL, 'pretrained' or 'none' (random weights)",
    )
    parser.add_argument("--labels", nargs="+", metavar="L", help="names of the models in figures")
    images = parser.add_mutually_exclusive_group()
    images.add_argument("--data", metavar="PATH", help="images with known classes: folder, digits, hfds/NAME, …")
    images.add_argument("--images", nargs="+", metavar="IMAGE", help="image files or folders")
    add_output(parser)
    parser.add_argument("--split", metavar="NAME", help="split of --data (default: val)")
    parser.add_argument("--max-images", type=int, metavar="N", help="use N images, evenly spaced in --data")
    add_img_size(parser)
    add_loading(parser, batch_size=8)
    add_device(parser)
    for name, users in options().items():
        field = next(field for field in fields(analysis_class(users[0])) if field.name == name)
        default = " ".join(map(str, field.default)) if isinstance(field.default, tuple) else field.default
        help_ = f"{', '.join(users)}: {field.metadata['help']}" + ("" if default is None else f" (default: {default})")
        metavar = ("Y", "X") if field.metadata["nargs"] == 2 else field.name[0].upper()
        parser.add_argument(
            f"--{name}", type=field.metadata["type"], nargs=field.metadata["nargs"], metavar=metavar, help=help_
        )


def options() -> dict[str, list[str]]:
    """The options of all analyses, each with the analyses that have it."""
    from inline_attention.analysis import analysis_class, analysis_names

    found: dict[str, list[str]] = {}
    for analysis in analysis_names():
        for field in fields(analysis_class(analysis)):
            found.setdefault(field.name, []).append(analysis)
    return found


def run(args: argparse.Namespace) -> int:
    from functools import partial

    from inline_attention.analysis import analysis_names
    from inline_attention.analysis.report import write_findings, write_report
    from inline_attention.analysis.subjects import open_subjects

    device = choose_device(args.device)
    names = analysis_names() if args.analysis == "all" else (args.analysis,)
    for option, users in options().items():
        if getattr(args, option) is not None and not {*names} & {*users}:
            raise ValueError(f"--{option} is an option of {' and '.join(users)}, not of {args.analysis}")
    analyses = [build(name, args) for name in names]
    given = args.arguments or args.weights or args.data or args.images
    if given and not any(analysis.needs_models for analysis in analyses):
        raise ValueError(f"{args.analysis} uses no model and no images: leave them out")
    if args.split is not None and args.data is None:
        raise ValueError(f"--split {args.split} is a split of --data: give --data too")
    subjects: list[Subject] = []
    if any(analysis.needs_models for analysis in analyses):
        subjects = open_subjects(
            args.arguments,
            args.weights,
            data=args.data,
            images=args.images or (),
            labels=args.labels,
            split=args.split or "val",
            max_images=args.max_images,
            img_size=parse_size(args.img_size),
            batch_size=args.batch_size,
            workers=args.workers,
            device=device,
        )
    out = args.output
    out.mkdir(parents=True, exist_ok=True)
    total = max((subject.facts["images"] for subject in subjects), default=0)
    done = []
    for analysis in analyses:
        progress = partial(image_progress, total=analysis.count(total))
        findings = analysis.run(subjects, progress=progress)
        write_findings(findings, subjects if analysis.needs_models else [], out)
        print_summary(findings)
        if findings.warning is not None:
            say(f"warning: {findings.warning} (--data, --images)", file=sys.stderr)
        done.append(findings)
    say("", write_report(done, subjects, out, device=device) if args.analysis == "all" else out / f"{names[0]}.png")
    return 0


def build(name: str, args: argparse.Namespace) -> "Analysis":
    """An analysis with its options from the command line."""
    from inline_attention.analysis import analysis_class

    cls = analysis_class(name)
    options = {field.name: getattr(args, field.name) for field in fields(cls)}
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return cls(**{key: value for key, value in values.items() if value is not None})


def print_summary(findings: "Findings") -> None:
    say("", findings.name)
    for label, summary in findings.summaries.items():
        figures = {key.replace("_", " "): value for key, value in summary.items() if value is not None}
        tables = {key: figures.pop(key) for key, value in [*figures.items()] if isinstance(value, dict)}
        parts = (
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in figures.items()
        )
        say(f"  {label}: {'; '.join(parts)}")
        for key, values in tables.items():
            numbers = (f"{name.replace('_', ' ')}: {number:.4g}" for name, number in values.items())
            say(f"    {key}: {'; '.join(numbers)}")
