"""The paper's analyses on any models and images: figures, tables and numbers; `all` adds one page with everything.

MODEL is a name of this library or of timm, with arguments if need be: inline_deit_tiny,attention=linear. A weights file
of this library says by itself which model it is for. Without models, those that come with the package are compared;
without images, two photographs are looked at.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inline_attention.printing import say

if TYPE_CHECKING:
    import torch

    from inline_attention.analysis.suite import Analysis, Settings, Subject
    from inline_attention.data import EvalLoader

DEFAULT_MODEL = "inline_deit_tiny"  # untrained, where the package has no weights


def configure(parser: argparse.ArgumentParser) -> None:
    names = ("injectivity", "confusion", "locality", "maps", "masking", "rank", "all")
    parser.add_argument("analysis", choices=names)
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="several are compared (default: those with weights in the package)"
    )
    parser.add_argument(
        "--weights", nargs="+", metavar="F", default=[], help="for each model a file, URL, 'pretrained' or 'none'"
    )
    parser.add_argument("--labels", nargs="+", metavar="L", help="what to call the models in figures")
    images = parser.add_mutually_exclusive_group()
    images.add_argument("--data", metavar="PATH", help="images with known classes: folder, digits, hfds/NAME, …")
    images.add_argument("--images", nargs="+", metavar="F", help="image files or folders")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for what is written")
    parser.add_argument("--split", default="val", help="of --data (default: val)")
    parser.add_argument("--max-images", type=int, metavar="N", help="look at N, evenly spaced in --data")
    parser.add_argument("--img-size", type=int, nargs="+", metavar="N", help="side, or height and width")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, help="loader processes (default: by the machine)")
    parser.add_argument("--device", help="cpu, cuda or mps (default: the best there is)")
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

    from inline_attention.analysis.suite import ANALYSES, analyse
    from inline_attention.cli._output import choose_device, image_progress

    device = choose_device(args.device)
    settings = read_settings(args)
    chosen = ANALYSES if args.analysis == "all" else (args.analysis,)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    subjects: list[Subject] = []
    if chosen != ("injectivity",):
        subjects = open_subjects(args, device)
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


def open_subjects(args: argparse.Namespace, device: "torch.device") -> list["Subject"]:
    """The models, each with a loader of the images as it wants them."""
    from functools import partial

    import torch

    from inline_attention.analysis.extract import attention_kinds
    from inline_attention.analysis.suite import Subject, label_subjects
    from inline_attention.cli._output import parse_size
    from inline_attention.cli.predict import find_images
    from inline_attention.data import open_eval_data, open_files
    from inline_attention.data.samples import sample_photographs
    from inline_attention.models.shipped import shipped_models
    from inline_attention.training.classifier import load_classifier

    weights: list[str | None] = [None if file == "none" else file for file in args.weights]
    models: list[str | None] = [*args.models]
    if not models and weights:
        models = [None] * len(weights)
    elif not models and (shipped := shipped_models()):
        models, weights = [*shipped], ["pretrained"] * len(shipped)
    models = models or [DEFAULT_MODEL]
    weights = weights or [None] * len(models)
    if len(weights) != len(models):
        raise ValueError(f"there are {len(models)} models and {len(weights)} weights; give 'none' for an untrained one")
    if args.max_images is not None and args.max_images < 1:
        raise ValueError(f"--max-images is {args.max_images}; expected at least 1")
    subjects = []
    for spec, file in zip(models, weights, strict=True):
        torch.manual_seed(0)  # untrained models are the same in every run
        name, arguments = parse_model(spec)
        classifier = load_classifier(name, file, img_size=parse_size(args.img_size), arguments=arguments)
        config = classifier.data
        config.batch_size, config.workers = args.batch_size, args.workers
        if args.data:
            config.path, config.val_split = args.data, args.split
            # Classes are those the model knows by name; an untrained one knows none.
            class_names = classifier.class_names if file else None
            loader = open_eval_data(config, class_names=class_names, max_images=args.max_images)
        else:
            paths = find_images(args.images) if args.images else sample_photographs()
            config.workers, config.max_broken = config.workers or 0, len(paths)
            loader = open_files(paths, config=config)
        loader.to(device)
        count = min(loader.num_images, args.max_images or loader.num_images)
        facts = dict(
            model=name or classifier.model.pretrained_cfg["architecture"],  # type: ignore[index]  # timm's description
            weights=file or "none: as initialised",
            attention=", ".join(attention_kinds(classifier.model)),
            img_size="×".join(map(str, config.size)),
            images=count,
        )
        batches = partial(first_batches, loader, count, labelled=bool(args.data and file))
        mean, std = config.statistics
        subjects.append(Subject(classifier.model.to(device).eval(), batches, mean, std, facts))
    return label_subjects(subjects, args.labels)


def first_batches(
    loader: "EvalLoader", count: int, *, labelled: bool
) -> Iterator[tuple["torch.Tensor", "torch.Tensor | None"]]:
    """`count` images of a loader, and their labels where those mean something."""
    left = count
    for batch in loader:
        images, targets = batch.images[:left], batch.targets[:left]
        left -= len(images)
        if len(images):  # all of a batch may be unreadable
            yield images, targets if labelled else None
        if left <= 0:
            return


def parse_model(spec: str | None) -> tuple[str | None, dict[str, Any]]:
    """NAME,key=value,… → the name and the arguments; values are YAML"""
    import yaml

    if spec is None:
        return None, {}
    name, *settings = spec.split(",")
    arguments = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key:
            raise ValueError(f"model {spec!r}: expected NAME,key=value,… such as {DEFAULT_MODEL},attention=linear")
        arguments[key] = yaml.safe_load(value)
    return name, arguments


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
