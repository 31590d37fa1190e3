"""Detection and instance segmentation: train a backbone under Mask R-CNN or its cascade, evaluate it, find objects.

Data are in COCO's format: FOLDER/annotations/instances_SPLIT.json and the images in FOLDER/SPLIT/.
Training runs under torchrun too: torchrun --nproc-per-node 8 -m inline_attention detect train RECIPE --data PATH
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inline_attention.cli._training import configure_training, run_training

if TYPE_CHECKING:
    from inline_attention.training.loop import Outcome

HELP = "detection and instance segmentation: train, eval, predict, models"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    train = actions.add_parser("train", help="train a detector", description=__doc__)
    configure_training(
        train,
        data="folder with annotations/instances_SPLIT.json and the images in SPLIT/",
        recipe="name of a recipe or a .yaml file; --list-recipes shows them",
    )

    actions.add_parser("models", help="published models: parameters, cost, results")

    trained = argparse.ArgumentParser(add_help=False)
    trained.add_argument("--weights", required=True, help="file that `inline detect train` wrote")
    trained.add_argument(
        "--short-side", type=int, metavar="N", help="resize images to this (default: the weights' own)"
    )
    trained.add_argument(
        "--max-side", type=int, metavar="N", help="and no longer than this (default: the weights' own)"
    )
    trained.add_argument("--workers", type=int, help="loader processes (default: by the machine)")
    trained.add_argument("--device", help="cpu, cuda or mps (default: the best there is)")
    trained.add_argument("--amp", choices=("bfloat16", "float16"), help="compute in this precision (autocast)")

    evaluate = actions.add_parser("eval", parents=[trained], help="average precision on images with annotations")
    evaluate.add_argument("--data", required=True, metavar="PATH", help="folder of the data set")
    evaluate.add_argument("--split", default="val2017", help="split to evaluate on (default: val2017)")
    evaluate.add_argument("--csv", metavar="FILE", type=Path, help="write average precision per class")
    evaluate.add_argument("--json", metavar="FILE", help="write the result")

    predict = actions.add_parser("predict", parents=[trained], help="find objects in images")
    predict.add_argument("images", nargs="+", metavar="IMAGE|FOLDER", help="files, or folders (searched to any depth)")
    predict.add_argument("--output", metavar="DIR", type=Path, default=Path("detected"), help="default: detected")
    predict.add_argument("--min-score", type=float, default=0.5, help="leave out what is less sure (default: 0.5)")


def run(args: argparse.Namespace) -> int:
    return {"train": _train, "models": _models, "eval": _eval, "predict": _predict}[args.action](args)


def _train(args: argparse.Namespace) -> int:
    from inline_attention.dense.detection.task import Detection

    return run_training(args, task=Detection, farewell=_farewell)


def _farewell(outcome: "Outcome") -> str:
    summary, folder = outcome.summary, outcome.folder
    best = folder / "checkpoints" / "best.safetensors"
    lines = [
        "",
        f"result    box AP {summary['val_box_ap']:.2f}% (AP50 {summary['val_box_ap50']:.2f}%), "
        f"mask AP {summary['val_mask_ap']:.2f}% (AP50 {summary['val_mask_ap50']:.2f}%) on the validation split "
        f"(best box AP {summary['best_box_ap']:.2f}%, epoch {summary['best_epoch']})",
        f"time      {summary['seconds']:.0f} s of training, {summary['images_per_second']:,.1f} images/s",
        f"classes   {folder / 'per_class.csv'}",
        f"weights   {best}",
    ]
    if summary["skipped_images"]:
        lines.append(f"skipped   {summary['skipped_images']} unreadable images")
    return "\n".join([*lines, "", "next:", f"  inline detect predict --weights {best} IMAGE"])


def _models(args: argparse.Namespace) -> int:
    from functools import cache

    from inline_attention.bench.record import table
    from inline_attention.dense.detection.cost import count_cost
    from inline_attention.dense.published import (
        DETECTOR_COST_BOXES,
        DETECTOR_COST_CLASSES,
        DETECTOR_COST_MASKS,
        DETECTOR_COST_SIZE,
        DETECTORS,
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
    print(table(header, rows))
    height, width = DETECTOR_COST_SIZE
    print(
        f"MACs of one {height}×{width} image with {DETECTOR_COST_CLASSES} classes, {DETECTOR_COST_BOXES} boxes and "
        f"{DETECTOR_COST_MASKS} masks; AP on COCO's val2017."
    )
    return 0


def _load(args: argparse.Namespace) -> Any:
    """The detector, with what the command line says of its images."""
    from inline_attention.dense.detection.weights import load_detector

    trained = load_detector(args.weights)
    config = trained.data
    config.short_side = config.short_side if args.short_side is None else args.short_side
    config.max_side = config.max_side if args.max_side is None else args.max_side
    config.workers = args.workers
    config.validate()
    return trained


def _eval(args: argparse.Namespace) -> int:
    import torch

    from inline_attention.cli._output import check_writable, choose_device, image_progress, write_json
    from inline_attention.dense.detection.average_precision import METRICS
    from inline_attention.dense.detection.coco import read_coco
    from inline_attention.dense.detection.data import DetectionEvalLoader, with_classes
    from inline_attention.dense.detection.evaluate import evaluate
    from inline_attention.dense.detection.task import write_per_class

    check_writable(args.csv, args.json)
    device = choose_device(args.device)
    trained = _load(args)
    config = trained.data
    loader = DetectionEvalLoader(with_classes(read_coco(args.data, args.split), trained.class_names), config=config)
    with image_progress("evaluating", total=loader.num_images) as on_images:
        result = evaluate(
            trained.model.to(device),
            loader,
            device=device,
            amp_dtype=getattr(torch, args.amp) if args.amp else None,
            on_images=on_images,
        )
    precision = result.precision
    print(f"{trained.title} on {args.data} [{args.split}], short side {config.short_side}")
    print("      " + "".join(f"{name:>7}" for name in METRICS))
    for kind, figures in (("box", precision.box), ("mask", precision.mask)):
        print(f"{kind:6}" + "".join(f"{'–' if value is None else f'{value:.2f}':>7}" for value in figures.values()))
    speed = precision.images / result.seconds
    print(f"{precision.images} images, {speed:.1f} images/s on {device}, {result.skipped} unreadable")
    if args.csv:
        write_per_class(precision, args.csv)
    if args.json:
        facts = {
            "model": trained.title,
            "weights": args.weights,
            "data": args.data,
            "split": args.split,
            "short_side": config.short_side,
            "max_side": config.max_side,
            "box": precision.box,
            "mask": precision.mask,
            "per_class": {name: {"box": box, "mask": mask} for name, (box, mask) in precision.per_class.items()},
            "images": precision.images,
            "seconds": result.seconds,
            "skipped_images": [image._asdict() for image in loader.skipped],
        }
        write_json(args.json, facts)
    return 0


def _predict(args: argparse.Namespace) -> int:
    import torch

    from inline_attention.cli._output import choose_device, free_name, image_progress, write_json
    from inline_attention.cli.predict import find_images
    from inline_attention.data.sources import utf8_name
    from inline_attention.dense.detection.average_precision import as_records
    from inline_attention.dense.detection.data import DetectionEvalLoader, without_annotations
    from inline_attention.dense.detection.evaluate import detect
    from inline_attention.dense.detection.pictures import draw
    from inline_attention.dense.images import read_image

    if not 0 <= args.min_score <= 1:
        raise ValueError(f"--min-score is {args.min_score:g}; expected a score from 0 to 1")
    paths = find_images(args.images)
    device = choose_device(args.device)
    trained = _load(args)
    config = trained.data
    config.max_broken = len(paths)
    if args.workers is None and len(paths) < 16:
        config.workers = 0
    loader = DetectionEvalLoader(without_annotations(paths, trained.class_names), config=config)
    args.output.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    with image_progress("looking", total=len(paths)) as on_images:
        amp_dtype = getattr(torch, args.amp) if args.amp else None
        for result in detect(trained.model.to(device), loader, device=device, amp_dtype=amp_dtype):
            path = paths[result.image_id]
            picture = args.output / f"{free_name(paths, result.image_id)}.jpg"
            drawn = draw(read_image(path), result, class_names=trained.class_names, min_score=args.min_score)
            drawn.save(picture, quality=92)
            objects = as_records(result, trained.class_names, min_score=args.min_score)
            found.append({"image": utf8_name(path), "picture": utf8_name(picture), "objects": objects})
            counts = Counter(record["class"] for record in objects)
            print(
                f"{utf8_name(path)}: " + (", ".join(f"{count} × {name}" for name, count in counts.items()) or "nothing")
            )
            on_images(1)
    skipped = [image._asdict() for image in loader.skipped]
    write_json(str(args.output / "objects.json"), {"model": trained.title, "images": found, "skipped_images": skipped})
    print(f"{len(found)} pictures and objects.json in {args.output}")
    return 0 if found else 1
