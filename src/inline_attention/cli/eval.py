"""Accuracy of a trained model on a data set: top-1, top-5, by class, and its speed.

A class folder belongs to the model's class of the same name; a model of all ImageNet classes can be evaluated on a
part of them.
"""

import argparse
from pathlib import Path

from inline_attention.cli._options import (
    add_device,
    add_eval_transform,
    add_img_size,
    add_loading,
    add_precision,
    add_results,
    add_weights,
)
from inline_attention.cli._output import autocast_dtype, check_writable, image_progress, parse_size
from inline_attention.environment import choose_device
from inline_attention.printing import STANDARD_OUTPUT, say, write_csv, write_json


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="needed only if the weights do not name their model")
    add_weights(parser)
    parser.add_argument("--data", required=True, help="folder, digits, hfds/NAME, wds/FOLDER or tfds/NAME")
    parser.add_argument("--split", default="val", help="split to evaluate on (default: val; all: every image)")
    parser.add_argument(
        "--split-file",
        metavar="FILE",
        help="table of a folder without splits (default: split.csv of the weights' run)",
    )
    add_img_size(parser)
    add_eval_transform(parser)
    parser.add_argument("--by-position", action="store_true", help="match classes by their order, not their names")
    parser.add_argument("--num-classes", type=int, help="number of classes, if the data do not list them (wds/)")
    add_loading(parser, batch_size=64)
    parser.add_argument("--max-broken", type=float, default=0.01, help="stop above this share of unreadable images")
    add_device(parser)
    add_precision(parser, default="fp32")
    add_results(parser, csv="the accuracy of each class")


def run(args: argparse.Namespace) -> int:
    from inline_attention.data import open_eval_data
    from inline_attention.data.tables import WHOLE, with_split_of
    from inline_attention.tasks.classification.classifier import load_classifier, model_name
    from inline_attention.tasks.classification.evaluation import evaluate

    check_writable(args.csv, args.json)
    device = choose_device(args.device)
    classifier = load_classifier(
        args.model, args.weights, img_size=parse_size(args.img_size), eval_transform=args.eval_transform
    )
    config = classifier.data
    config.path, config.val_split, config.num_classes = args.data, args.split, args.num_classes
    config.batch_size, config.workers, config.max_broken = args.batch_size, args.workers, args.max_broken
    config.split_file = args.split_file
    if args.split != WHOLE:
        config = with_split_of(Path(args.weights).parent.parent, config)  # weights are in RUN/checkpoints
    loader = open_eval_data(config, class_names=None if args.by_position else classifier.class_names)
    model = classifier.model.to(device)
    with image_progress("evaluating", total=loader.num_images) as on_images:
        amp_dtype = autocast_dtype(args.precision)
        result = evaluate(model, loader, device=device, amp_dtype=amp_dtype, on_images=on_images)

    name = model_name(classifier.model)
    if args.json != STANDARD_OUTPUT:
        say(f"{name} on {args.data} [{args.split}] at {config.size[0]}×{config.size[1]}")
        say(f"top-1 {result.top1:.3f}%  top-5 {result.top5:.3f}%  loss {result.loss:.4f}")
        say(f"{result.images} images, {result.images_per_second:.1f} images/s on {device}, {result.skipped} unreadable")
    names = classifier.class_names or loader.class_names
    if args.csv:
        rows = (
            (name, correct, total, f"{correct / total:.4f}")
            for name, (correct, total) in zip(names, result.per_class.tolist(), strict=True)
            if total
        )
        write_csv(args.csv, ("class", "correct", "total", "accuracy"), rows)
    if args.json:
        facts = {
            "model": name,
            "weights": args.weights,
            "data": args.data,
            "split": args.split,
            "img_size": list(config.size),
            "eval_transform": config.eval_transform,
            "device": str(device),
            **{key: getattr(result, key) for key in ("top1", "top5", "loss", "images", "skipped", "seconds")},
            "images_per_second": result.images_per_second,
            "skipped_images": [image._asdict() for image in loader.skipped],
        }
        write_json(args.json, facts)
    return 0
