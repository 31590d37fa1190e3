"""Detection and instance segmentation: train a backbone under Faster R-CNN, Mask R-CNN or a cascade; find objects.

Data are a COCO folder (annotations/instances_SPLIT.json, images in SPLIT/) or a YOLO folder (data.yaml).
For several GPUs: torchrun --nproc-per-node 8 -m inline_attention detect train RECIPE --data PATH
"""

import argparse
from collections import Counter
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from inline_attention.cli import _dense
from inline_attention.cli._options import check_at_least
from inline_attention.cli._output import autocast_dtype, check_writable, image_progress
from inline_attention.cli._training import run_training
from inline_attention.environment import choose_device
from inline_attention.printing import STANDARD_OUTPUT, say, say_text, table

if TYPE_CHECKING:
    from inline_attention.tasks.detection.weights import TrainedDetector
    from inline_attention.training.loop import Outcome
    from inline_attention.training.task import Task


def configure(parser: argparse.ArgumentParser) -> None:
    evaluate, predict = _dense.add_actions(
        parser,
        command="detect",
        model="detector",
        description=__doc__,
        task=_task,
        data="COCO folder (annotations/instances_SPLIT.json, images in SPLIT/) or YOLO folder (data.yaml)",
        add_options=_add_options,
        measures="measure average precision on annotated images",
        predicts="find objects in images",
        output="detected",
    )
    evaluate.add_argument("--layout", choices=("auto", "coco", "yolo"), help="layout of the data (default: auto)")
    predict.add_argument(
        "--min-score", type=float, default=0.5, metavar="P", help="leave out objects below this score (default: 0.5)"
    )


def _add_options(trained: argparse.ArgumentParser) -> None:
    own = "default: that of the weights"
    trained.add_argument(
        "--short-side", type=int, metavar="N", help=f"resize the short side of an image to N pixels ({own})"
    )
    trained.add_argument("--max-side", type=int, metavar="N", help=f"largest length of the long side in pixels ({own})")


def run(args: argparse.Namespace) -> int:
    return {"train": _train, "models": _models, "eval": _eval, "predict": _predict}[args.action](args)


def _train(args: argparse.Namespace) -> int:
    return run_training(args, task=_task(), describe_outcome=_describe_outcome)


def _task() -> "type[Task]":
    from inline_attention.tasks.detection.task import Detection

    return Detection


def _describe_outcome(outcome: "Outcome") -> str:
    summary = outcome.summary
    figures = [
        f"{kind} AP {summary[f'val_{kind}_ap']:.2f}% (AP50 {summary[f'val_{kind}_ap50']:.2f}%)"
        for kind in ("box", "mask")
        if f"val_{kind}_ap" in summary
    ]
    result = (
        f"{', '.join(figures)} on the validation split "
        f"(best box AP {summary['best_box_ap']:.2f}%, epoch {summary['best_epoch']})"
    )
    return _dense.describe_outcome(outcome, command="detect", result=result)


def _models(args: argparse.Namespace) -> int:
    from inline_attention.tasks.detection.published import (
        COST_BOXES,
        COST_CLASSES,
        COST_MASKS,
        COST_SIZE,
        DETECTORS,
        count_cost,
    )

    counted = cache(count_cost)  # two schedules of one model
    rows = []
    for recipe, facts in DETECTORS.items():
        for kind in ("softmax", "inline"):
            cost = counted(facts.backbone.replace("softmax", kind), facts.head)
            published = (facts.params, facts.macs, facts.box_ap, facts.mask_ap) if kind == "softmax" else (None,) * 4
            ours = (f"{cost.params / 1e6:.2f}", f"{cost.macs / 1e9:.1f}", f"{cost.backbone / 1e9:.1f}")
            known = ("–" if value is None else f"{value:g}" for value in published)
            rows.append([recipe.replace("softmax", kind), *ours, *known])
    header = ["recipe", "params, M", "MACs, G", "of them backbone", "published params", "MACs", "box AP", "mask AP"]
    say_text(table(header, rows))
    height, width = COST_SIZE
    say(
        f"MACs of one {height}×{width} image with {COST_CLASSES} classes, {COST_BOXES} boxes and "
        f"{COST_MASKS} masks; AP on COCO's val2017."
    )
    return 0


def _load(args: argparse.Namespace) -> "TrainedDetector":
    """The detector, with the options that change how images are prepared."""
    from inline_attention.tasks.detection.weights import load_detector

    check_at_least(args, short_side=1, max_side=1, workers=0)
    trained = load_detector(args.weights)
    config = trained.data
    config.short_side = config.short_side if args.short_side is None else args.short_side
    config.max_side = config.max_side if args.max_side is None else args.max_side
    config.workers = args.workers
    config.validate()
    return trained


def _eval(args: argparse.Namespace) -> int:
    from inline_attention.tasks.detection.annotations import with_classes
    from inline_attention.tasks.detection.average_precision import METRICS
    from inline_attention.tasks.detection.data import DetectionEvalLoader
    from inline_attention.tasks.detection.evaluation import evaluate
    from inline_attention.tasks.detection.layouts import read_split
    from inline_attention.tasks.detection.pictures import draw_examples
    from inline_attention.tasks.detection.task import write_per_class

    check_writable(args.csv, args.examples, json=args.json)
    check_at_least(args, max_broken=0)
    device = choose_device(args.device)
    trained = _load(args)
    config = trained.data
    if args.split is not None:
        config.val_split = args.split
    config.path, config.layout, config.max_broken = args.data, args.layout or "auto", args.max_broken
    config.validate()
    data = read_split(config, config.val_split, masks=trained.model.has_masks)
    loader = DetectionEvalLoader(with_classes(data, trained.class_names), config=config)
    with image_progress("evaluating", total=loader.num_images) as on_images:
        result = evaluate(
            trained.model.to(device),
            loader,
            device=device,
            amp_dtype=autocast_dtype(args.precision),
            on_images=on_images,
        )
    precision = result.precision
    if args.json != STANDARD_OUTPUT:
        say(f"{trained.title} on {args.data} [{config.val_split}], short side {config.short_side}")
        say("      " + "".join(f"{name:>7}" for name in METRICS))
        for kind, figures in precision.by_kind().items():
            say(f"{kind:6}" + "".join(f"{'–' if value is None else f'{value:.2f}':>7}" for value in figures.values()))
        speed = precision.images / result.seconds
        say(f"{precision.images} images, {speed:.1f} images/s on {device}, {result.skipped} unreadable")
    if args.csv:
        write_per_class(precision, args.csv)
    if args.examples:
        draw_examples(result.examples, trained.class_names, args.examples)
    facts: dict[str, Any] = {
        "short_side": config.short_side,
        "max_side": config.max_side,
        **precision.by_kind(),
        "per_class": precision.per_class,
    }
    _dense.write_result(args, trained, facts, images=precision.images, seconds=result.seconds, skipped=loader.skipped)
    return 0


def _predict(args: argparse.Namespace) -> int:
    from inline_attention.tasks.detection.prediction import DetectedFile, detect_files

    if not 0 <= args.min_score <= 1:
        raise ValueError(f"--min-score is {args.min_score:g}; expected a score from 0 to 1")

    def describe(file: DetectedFile) -> str:
        counts = Counter(record["class"] for record in file.objects)
        return ", ".join(f"{count} × {name}" for name, count in counts.items()) or "nothing"

    predict = partial(detect_files, min_score=args.min_score)
    return _dense.predict(args, _load, predict, doing="detecting", describe=describe, files="pictures and objects.json")
