"""The paper's analyses of any models on any images, as figures, tables and numbers. `all` adds one page of them all.

MODEL is a name of this library or of timm, with arguments if needed: inline_deit_tiny,attention=linear. A weights file
of this library says which model it is for. Without models, those that come with the package are compared. Without
images, two photographs of the package are used.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inline_attention.cli._options import add_device, add_img_size, add_loading, add_output
from inline_attention.printing import say

if TYPE_CHECKING:
    import torch

    from inline_attention.analysis.suite import Analysis, Settings, Subject


def configure(parser: argparse.ArgumentParser) -> None:
    names = ("injectivity", "confusion", "locality", "maps", "masking", "rank", "all")
    parser.add_argument("analysis", choices=names)
    parser.add_argument(
        "arguments",
        nargs="*",
        metavar="MODEL",
        help="several are compared (default: those with weights in the package)",
    )
    parser.add_argument(
        "--weights", nargs="+", metavar="W", default=[], help="for each model a file, URL, 'pretrained' or 'none'"
    )
    parser.add_argument("--labels", nargs="+", metavar="L", help="what to call the models in figures")
    images = parser.add_mutually_exclusive_group()
    images.add_argument("--data", metavar="PATH", help="images with known classes: folder, digits, hfds/NAME, …")
    images.add_argument("--images", nargs="+", metavar="F", help="image files or folders")
    add_output(parser)
    parser.add_argument("--split", default="val", help="of --data (default: val)")
    parser.add_argument("--max-images", type=int, metavar="N", help="look at N, evenly spaced in --data")
    add_img_size(parser)
    add_loading(parser, batch_size=8)
    add_device(parser)
    parser.add_argument("--layers", nargs="+", metavar="L", help="names or numbers, -1 the last (default: all)")
    confusion = parser.add_argument_group("confusion", "thresholds, relative to the median distance")
    confusion.add_argument("--taus", type=float, nargs="+", metavar="T", help="rows are closer (0.03 0.1 0.3)")
    confusion.add_argument("--rhos", type=float, nargs="+", metavar="R", help="queries are further apart (0.3 1)")
    parser.add_argument("--side", type=int, help="locality: side of the neighbourhood (3)")
    parser.add_argument("--sides", type=int, nargs="+", metavar="N", help="masking: sides of the windows (3 5 7)")
    parser.add_argument("--seed", type=int, help="masking: of the random tokens (0)")
    parser.add_argument("--query", type=float, nargs=2, metavar=("Y", "X"), help="maps: place from 0 to 1 (0.5 0.5)")
    parser.add_argument("--head", type=int, help="maps: one head (default: the mean of all)")


def run(args: argparse.Namespace) -> int:
    from functools import partial

    from inline_attention.analysis.subjects import open_subjects
    from inline_attention.analysis.suite import ANALYSES, analyse
    from inline_attention.cli._output import choose_device, image_progress, parse_size

    device = choose_device(args.device)
    settings = read_settings(args)
    chosen = ANALYSES if args.analysis == "all" else (args.analysis,)
    out = args.output
    out.mkdir(parents=True, exist_ok=True)
    subjects: list[Subject] = []
    if chosen != ("injectivity",):
        subjects = open_subjects(
            args.arguments,
            args.weights,
            data=args.data,
            images=args.images or (),
            labels=args.labels,
            split=args.split,
            max_images=args.max_images,
            img_size=parse_size(args.img_size),
            batch_size=args.batch_size,
            workers=args.workers,
            device=device,
        )
    total = max((subject.facts["images"] for subject in subjects), default=0)
    done = []
    for name in chosen:
        count = min(total, settings.map_images) if name == "maps" else total
        analysis = analyse(name, subjects, settings, progress=partial(image_progress, total=count))
        write(analysis, subjects, out)
        print_summary(analysis)
        if analysis.warning is not None:
            say(f"warning: {analysis.warning} (--data, --images)", file=sys.stderr)
        done.append(analysis)
    if args.analysis == "all":
        write_report(done, subjects, out, device)
        say("", out / "report.html")
    return 0


def read_settings(args: argparse.Namespace) -> "Settings":
    from inline_attention.analysis.suite import Settings

    given: dict[str, Any] = {key: getattr(args, key) for key in ("side", "seed", "head")}
    for key in ("taus", "rhos", "sides", "query"):
        given[key] = tuple(getattr(args, key)) if getattr(args, key) else None
    if args.layers:
        given["layers"] = tuple(int(layer) if layer.lstrip("-").isdecimal() else layer for layer in args.layers)
    return Settings(**{key: value for key, value in given.items() if value is not None})


def write(analysis: "Analysis", subjects: Sequence["Subject"], out: Path) -> None:
    """NAME.json, NAME.csv, NAME.png and NAME.svg"""
    from inline_attention.analysis.plots import save
    from inline_attention.analysis.report import to_plain
    from inline_attention.cli._output import write_csv, write_json

    content: dict[str, Any] = dict(analysis=analysis.name, parameters=analysis.parameters, warning=analysis.warning)
    if analysis.name == "injectivity":
        content.update(to_plain(analysis.results["plane"]))
    else:
        content["models"] = [
            dict(label=s.label, **s.facts, summary=analysis.summaries[s.label], result=analysis.results[s.label])
            for s in subjects
        ]
    write_json(str(out / f"{analysis.name}.json"), to_plain(content))
    write_csv(str(out / f"{analysis.name}.csv"), *analysis.table)
    save(analysis.figure, out / analysis.name)


def print_summary(analysis: "Analysis") -> None:
    say("", analysis.name)
    for label, summary in analysis.summaries.items():
        words = []
        for key, value in summary.items():
            if isinstance(value, dict):
                words.append(f"{key} " + ", ".join(f"{name} {number:.3f}" for name, number in value.items()))
            elif value is not None:
                words.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
        say(f"  {label}: {'; '.join(words).replace('_', ' ')}")


def write_report(
    analyses: Sequence["Analysis"], subjects: Sequence["Subject"], out: Path, device: "torch.device"
) -> None:
    import datetime

    import torch

    from inline_attention._version import __version__
    from inline_attention.analysis.report import Section, html_report

    facts = {
        "inline-attention": __version__,
        "torch": torch.__version__,
        "device": str(device),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    sections = [
        Section(a.name, (out / f"{a.name}.png").read_bytes(), a.parameters, a.summaries, a.warning) for a in analyses
    ]
    page = html_report(sections, facts=facts, models={subject.label: subject.facts for subject in subjects})
    (out / "report.html").write_text(page, encoding="utf-8")
