"""The paper's analyses on any models and images: figures, tables and numbers; `all` adds one page with everything.

MODEL is a name of this library or of timm, with arguments if need be: inline_deit_tiny,attention=linear. A weights file
of this library says by itself which model it is for. Without models, those that come with the package are compared;
without images, two photographs are looked at.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inline_attention.printing import say

if TYPE_CHECKING:
    import torch

    from inline_attention.analysis import Analysis, Findings, Subject
    from inline_attention.data import EvalLoader

DEFAULT_MODEL = "inline_deit_tiny"  # untrained, where the package has no weights


def configure(parser: argparse.ArgumentParser) -> None:
    from inline_attention.analysis import analysis_class, analysis_names

    parser.add_argument("analysis", choices=(*analysis_names(), "all"))
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
    from inline_attention.cli._output import choose_device, image_progress

    device = choose_device(args.device)
    analyses = [build(name, args) for name in (analysis_names() if args.analysis == "all" else [args.analysis])]
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    subjects = open_subjects(args, device) if any(analysis.needs_models for analysis in analyses) else []
    total = max((subject.facts["images"] for subject in subjects), default=0)
    done = []
    for analysis in analyses:
        progress = partial(image_progress, total=analysis.count(total))
        findings = analysis.run(subjects, progress=progress)
        write(findings, subjects if analysis.needs_models else [], out)
        print_summary(findings)
        if findings.warning is not None:
            say(f"warning: {findings.warning} (--data, --images)", file=sys.stderr)
        done.append(findings)
    if args.analysis == "all":
        write_report(done, subjects, out, device)
        say("", out / "report.html")
    return 0


def build(name: str, args: argparse.Namespace) -> "Analysis":
    """An analysis with the options that were given."""
    from inline_attention.analysis import analysis_class

    cls = analysis_class(name)
    given = {field.name: getattr(args, field.name) for field in fields(cls)}
    values = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    return cls(**{key: value for key, value in values.items() if value is not None})


def open_subjects(args: argparse.Namespace, device: "torch.device") -> list["Subject"]:
    """The models, each with a loader of the images as it wants them."""
    from functools import partial

    import torch

    from inline_attention.analysis import Subject
    from inline_attention.analysis.base import label_subjects
    from inline_attention.analysis.hooks import attention_kinds
    from inline_attention.cli._output import parse_size
    from inline_attention.cli.predict import find_images
    from inline_attention.data import open_eval_data, open_files
    from inline_attention.data.samples import sample_photographs
    from inline_attention.models.shipped import shipped_models
    from inline_attention.training.classifier import load_classifier, model_name

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
            model=model_name(classifier.model),
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


def write(findings: "Findings", subjects: Sequence["Subject"], out: Path) -> None:
    """NAME.json, NAME.csv, NAME.png and NAME.svg"""
    from inline_attention.analysis.figures import save
    from inline_attention.analysis.report import to_plain
    from inline_attention.cli._output import write_csv, write_json

    name, results, summaries = findings.name, findings.results, findings.summaries
    content: dict[str, Any] = dict(analysis=name, parameters=findings.parameters, warning=findings.warning)
    if subjects:
        content["models"] = [
            dict(label=s.label, **s.facts, summary=summaries[s.label], result=results[s.label]) for s in subjects
        ]
    else:
        for result in results.values():
            content.update(to_plain(result))
    write_json(str(out / f"{name}.json"), to_plain(content))
    write_csv(str(out / f"{name}.csv"), *findings.table)
    save(findings.figure, out / name)


def print_summary(findings: "Findings") -> None:
    say("", findings.name)
    for label, summary in findings.summaries.items():
        words = []
        for key, value in summary.items():
            if isinstance(value, dict):
                words.append(f"{key} " + ", ".join(f"{name} {number:.3f}" for name, number in value.items()))
            elif value is not None:
                words.append(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}")
        say(f"  {label}: {'; '.join(words).replace('_', ' ')}")


def write_report(
    analyses: Sequence["Findings"], subjects: Sequence["Subject"], out: Path, device: "torch.device"
) -> None:
    import datetime

    import torch

    from inline_attention._version import __version__
    from inline_attention.analysis.report import html_report

    facts = {
        "inline-attention": __version__,
        "torch": torch.__version__,
        "device": str(device),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    }
    sections = [(findings, (out / f"{findings.name}.png").read_bytes()) for findings in analyses]
    page = html_report(sections, facts=facts, models={subject.label: subject.facts for subject in subjects})
    (out / "report.html").write_text(page, encoding="utf-8")
