"""Detection and instance segmentation: train, evaluate and look at Mask R-CNN and Cascade Mask R-CNN.

The data are in COCO's format: FOLDER/annotations/instances_SPLIT.json and the images in FOLDER/SPLIT/.
"""

import argparse
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inline_attention.cli._training import configure_training, run_training

if TYPE_CHECKING:
    from inline_attention.training.loop import Outcome

HELP = "find objects and their outlines: train, eval, predict"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="train|eval|predict", required=True)

    train = actions.add_parser("train", help="train a detector", description=__doc__)
    configure_training(train, data="folder with annotations/ and the images", recipe="name of a recipe or a .yaml file")
    train.set_defaults(act=_train)

    evaluate = actions.add_parser("eval", help="average precision on annotated images", description=__doc__)
    evaluate.add_argument("--weights", required=True, metavar="FILE", help="weights of `inline detect train`")
    evaluate.add_argument("--data", required=True, metavar="PATH", help="folder with annotations/ and the images")
    evaluate.add_argument("--split", default="val2017", help="split to evaluate on (default: val2017)")
    evaluate.add_argument("--csv", metavar="FILE", help="write average precision per class")
    evaluate.set_defaults(act=_evaluate)

    predict = actions.add_parser("predict", help="find objects in images", description=__doc__)
    predict.add_argument("images", nargs="+", metavar="IMAGE|FOLDER", help="files, or folders (searched to any depth)")
    predict.add_argument("--weights", required=True, metavar="FILE", help="weights of `inline detect train`")
    predict.add_argument("--output", metavar="DIR", help="folder for annotated pictures")
    predict.add_argument("--min-score", type=float, default=0.5, help="leave out less sure ones (default: 0.5)")
    predict.set_defaults(act=_predict)

    for action in (evaluate, predict):
        action.add_argument("--short-side", type=int, metavar="N", help="images are resized to (default: as trained)")
        action.add_argument("--max-side", type=int, metavar="N", help="and are no longer than (default: as trained)")
        action.add_argument("--workers", type=int, help="loader processes (default: by the machine)")
        action.add_argument("--device", help="cpu, cuda or mps (default: the best there is)")
        action.add_argument("--amp", choices=("bfloat16", "float16"), help="compute in this precision (autocast)")
        action.add_argument("--json", metavar="FILE", help="write the result")


def run(args: argparse.Namespace) -> int:
    return args.act(args)


def _train(args: argparse.Namespace) -> int:
    from inline_attention.dense.detection.task import Detection

    return run_training(args, task=Detection, farewell=_farewell)


def _farewell(outcome: "Outcome") -> str:
    summary, folder = outcome.summary, outcome.folder
    best = folder / "checkpoints" / "best.safetensors"
    lines = [
        "",
        f"precision box AP {summary['val_box_ap']:.2f} (AP50 {summary['val_box_ap50']:.2f}), "
        f"mask AP {summary['val_mask_ap']:.2f} (AP50 {summary['val_mask_ap50']:.2f}) on the validation split; "
        f"best box AP {summary['best_box_ap']:.2f}, epoch {summary['best_epoch']}",
        f"time      {summary['seconds']:.0f} s of training, {summary['images_per_second']:,.1f} images/s",
        f"classes   {folder / 'per_class.csv'}",
        f"weights   {best}",
        *([f"skipped   {summary['skipped_images']} unreadable images"] if summary["skipped_images"] else []),
        "",
        "next:",
        f"  inline detect predict --weights {best} --output FOLDER IMAGE",
        f"  inline detect eval --weights {best} --data FOLDER",
    ]
    return "\n".join(lines)


def _evaluate(args: argparse.Namespace) -> int:
    import torch

    from inline_attention.cli._output import choose_device, image_progress, write_json
    from inline_attention.dense.detection.average_precision import METRICS
    from inline_attention.dense.detection.coco import read_coco
    from inline_attention.dense.detection.data import DetectionEvalLoader
    from inline_attention.dense.detection.evaluate import evaluate
    from inline_attention.dense.detection.predictor import load_detector, with_classes
    from inline_attention.dense.detection.task import write_per_class

    device = choose_device(args.device)
    detector = load_detector(args.weights, short_side=args.short_side, max_side=args.max_side, workers=args.workers)
    data = with_classes(read_coco(args.data, args.split), detector.class_names)
    loader = DetectionEvalLoader(data, config=detector.data)
    with image_progress("evaluating", total=loader.num_images) as on_images:
        amp_dtype = getattr(torch, args.amp) if args.amp else None
        result = evaluate(detector.model.to(device), loader, device=device, amp_dtype=amp_dtype, on_images=on_images)
    precision = result.precision
    print(f"{detector.title} on {args.data} [{args.split}], short side {detector.data.short_side}")
    print("      " + "".join(f"{name:>7}" for name in METRICS))
    for kind, figures in (("box", precision.box), ("mask", precision.mask)):
        print(f"{kind:6}" + "".join(f"{'–' if value is None else f'{value:.2f}':>7}" for value in figures.values()))
    print(
        f"{precision.images} images, {result.images_per_second:.2f} images/s on {device}, {result.skipped} unreadable"
    )
    if args.csv:
        write_per_class(precision, Path(args.csv))
    if args.json:
        facts = {
            "model": detector.title,
            "weights": args.weights,
            "data": args.data,
            "split": args.split,
            "short_side": detector.data.short_side,
            "max_side": detector.data.max_side,
            "device": str(device),
            "images": precision.images,
            "skipped_images": [image._asdict() for image in loader.skipped],
            "images_per_second": result.images_per_second,
            "box": precision.box,
            "mask": precision.mask,
            "per_class": {name: {"box": box, "mask": mask} for name, (box, mask) in precision.per_class.items()},
        }
        write_json(args.json, facts)
    return 0


def _predict(args: argparse.Namespace) -> int:
    import torch

    from inline_attention.cli._output import choose_device, image_progress, write_json
    from inline_attention.cli.predict import find_images
    from inline_attention.dense.detection.data import DetectionEvalLoader
    from inline_attention.dense.detection.evaluate import detect
    from inline_attention.dense.detection.pictures import draw_file
    from inline_attention.dense.detection.predictor import as_records, load_detector, without_annotations

    paths = find_images(args.images)
    device = choose_device(args.device)
    detector = load_detector(args.weights, short_side=args.short_side, max_side=args.max_side, workers=args.workers)
    detector.data.max_broken = len(paths)
    loader = DetectionEvalLoader(without_annotations(paths, detector.class_names), config=detector.data)
    if args.output:
        Path(args.output).mkdir(parents=True, exist_ok=True)
    found: dict[str, list[dict[str, Any]]] = {}
    with image_progress("looking", total=len(paths)) as on_images:
        amp_dtype = getattr(torch, args.amp) if args.amp else None
        for result in detect(detector.model.to(device), loader, device=device, amp_dtype=amp_dtype):
            path = paths[result.image_id]
            found[str(path)] = as_records(result, detector.class_names, min_score=args.min_score)
            if args.output:
                # Numbered: files of different folders may share a name.
                picture = Path(args.output) / f"{result.image_id:04d}-{path.stem}.png"
                draw_file(path, result, class_names=detector.class_names, min_score=args.min_score).save(picture)
            on_images(1)
    for image, objects in found.items():
        counts = Counter(record["class"] for record in objects)
        print(f"{image}: " + (", ".join(f"{count} × {name}" for name, count in counts.items()) or "nothing"))
    if args.json:
        images = [{"image": image, "objects": objects} for image, objects in found.items()]
        skipped = [image._asdict() for image in loader.skipped]
        write_json(args.json, {"model": detector.title, "images": images, "skipped_images": skipped})
    return 0 if found else 1
