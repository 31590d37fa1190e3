"""Detection and instance segmentation: train a backbone under Mask R-CNN or its cascade, evaluate it, find objects.

Data are in COCO's format: FOLDER/annotations/instances_SPLIT.json and the images in FOLDER/SPLIT/.
Training runs under torchrun too: torchrun --nproc-per-node 8 -m inline_attention detect train RECIPE --data PATH
"""

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

from inline_attention.cli import _dense
from inline_attention.cli._training import run_training
from inline_attention.printing import say, say_text, table

if TYPE_CHECKING:
    from inline_attention.tasks.detection.weights import TrainedDetector
    from inline_attention.training.loop import Outcome
    from inline_attention.training.task import Task


def configure(parser: argparse.ArgumentParser) -> None:
    _, predict = _dense.add_actions(
        parser,
        command="detect",
        model="detector",
        description=__doc__,
        task=_task,
        data="folder with annotations/instances_SPLIT.json and the images in SPLIT/",
        add_options=_add_options,
        measures="average precision on images with annotations",
        predicts="find objects in images",
        output="detected",
    )
    predict.add_argument("--min-score", type=float, default=0.5, help="leave out what is less sure (default: 0.5)")


def _add_options(trained: argparse.ArgumentParser) -> None:
    own = "default: the weights' own"
    trained.add_argument("--short-side", type=int, metavar="N", help=f"resize images to this ({own})")
    trained.add_argument("--max-side", type=int, metavar="N", help=f"and no longer than this ({own})")


def run(args: argparse.Namespace) -> int:
    return {"train": _train, "models": _models, "eval": _eval, "predict": _predict}[args.action](args)


def _train(args: argparse.Namespace) -> int:
    return run_training(args, task=_task(), describe_outcome=_describe_outcome)


def _task() -> "type[Task]":
    from inline_attention.tasks.detection.task import Detection

    return Detection


def _describe_outcome(outcome: "Outcome") -> str:
    summary = outcome.summary
    result = (
        f"box AP {summary['val_box_ap']:.2f}% (AP50 {summary['val_box_ap50']:.2f}%), "
        f"mask AP {summary['val_mask_ap']:.2f}% (AP50 {summary['val_mask_ap50']:.2f}%) on the validation split "
        f"(best box AP {summary['best_box_ap']:.2f}%, epoch {summary['best_epoch']})"
    )
    return _dense.describe_outcome(outcome, command="detect", result=result, files={"classes": "per_class.csv"})


def _models(args: argparse.Namespace) -> int:
    from functools import cache

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
    """The detector, with what the command line says of its images."""
    from inline_attention.tasks.detection.weights import load_detector

    trained = load_detector(args.weights)
    config = trained.data
    config.short_side = config.short_side if args.short_side is None else args.short_side
    config.max_side = config.max_side if args.max_side is None else args.max_side
    config.workers = args.workers
    config.validate()
    return trained


def _eval(args: argparse.Namespace) -> int:
    from inline_attention.cli._output import (
        STANDARD_OUTPUT,
        autocast_dtype,
        check_writable,
        choose_device,
        image_progress,
    )
    from inline_attention.tasks.detection.average_precision import METRICS
    from inline_attention.tasks.detection.coco import read_coco
    from inline_attention.tasks.detection.data import DetectionEvalLoader, with_classes
    from inline_attention.tasks.detection.evaluation import evaluate
    from inline_attention.tasks.detection.task import write_per_class

    check_writable(args.csv, args.json)
    device = choose_device(args.device)
    trained = _load(args)
    config = trained.data
    if args.split is not None:
        config.val_split = args.split
    data = read_coco(args.data, config.val_split)
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
        for kind, figures in (("box", precision.box), ("mask", precision.mask)):
            say(f"{kind:6}" + "".join(f"{'–' if value is None else f'{value:.2f}':>7}" for value in figures.values()))
        speed = precision.images / result.seconds
        say(f"{precision.images} images, {speed:.1f} images/s on {device}, {result.skipped} unreadable")
    if args.csv:
        write_per_class(precision, args.csv)
    facts: dict[str, Any] = {
        "short_side": config.short_side,
        "max_side": config.max_side,
        "box": precision.box,
        "mask": precision.mask,
        "per_class": {name: {"box": box, "mask": mask} for name, (box, mask) in precision.per_class.items()},
    }
    _dense.write_result(args, trained, facts, images=precision.images, seconds=result.seconds, skipped=loader.skipped)
    return 0


def _predict(args: argparse.Namespace) -> int:
    from inline_attention.cli._output import autocast_dtype, choose_device, free_name, image_progress, write_json
    from inline_attention.data.decode import read_image
    from inline_attention.tasks.detection.average_precision import as_records
    from inline_attention.tasks.detection.data import DetectionEvalLoader, without_annotations
    from inline_attention.tasks.detection.evaluation import detect
    from inline_attention.tasks.detection.pictures import draw

    if not 0 <= args.min_score <= 1:
        raise ValueError(f"--min-score is {args.min_score:g}; expected a score from 0 to 1")
    device = choose_device(args.device)
    paths, trained = _dense.open_for_prediction(args, _load)
    loader = DetectionEvalLoader(without_annotations(paths, trained.class_names), config=trained.data)
    found: list[dict[str, Any]] = []
    with image_progress("detecting", total=len(paths)) as on_images:
        model, amp_dtype = trained.model.to(device), autocast_dtype(args.precision)
        for result in detect(model, loader, device=device, amp_dtype=amp_dtype):
            path = paths[result.image_id]
            picture = args.output / f"{free_name(paths, result.image_id)}.jpg"
            drawn = draw(read_image(path), result, class_names=trained.class_names, min_score=args.min_score)
            drawn.save(picture, quality=92)
            objects = as_records(result, trained.class_names, min_score=args.min_score)
            found.append({"image": str(path), "picture": str(picture), "objects": objects})
            counts = Counter(record["class"] for record in objects)
            say(f"{path}: " + (", ".join(f"{count} × {name}" for name, count in counts.items()) or "nothing"))
            on_images(1)
    skipped = [image._asdict() for image in loader.skipped]
    write_json(str(args.output / "objects.json"), {"model": trained.title, "images": found, "skipped_images": skipped})
    say(f"{len(found)} pictures and objects.json in {args.output}")
    return 0 if found else 1
