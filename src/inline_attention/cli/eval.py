"""Accuracy of a trained model on a data set: top-1, top-5, by class, its calibration and its speed.

If an image may have several labels: mean average precision and F1 at a probability of 0.5.

Class folders are matched to the model's classes by name, so an ImageNet model can be evaluated on some of its classes.
The same command runs under torchrun: torchrun --nproc-per-node 8 -m inline_attention eval …
"""

import argparse
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inline_attention.cli._options import (
    add_device,
    add_eval_transform,
    add_img_size,
    add_loading,
    add_max_broken,
    add_precision,
    add_results,
    add_weights,
    check_at_least,
)
from inline_attention.cli._output import autocast_dtype, check_writable, image_progress, model_title, parse_size
from inline_attention.printing import STANDARD_OUTPUT, say, write_csv, write_json

if TYPE_CHECKING:
    from inline_attention.data import DataConfig
    from inline_attention.tasks.classification import Classifier, EvalResult, MultiLabelResult
    from inline_attention.training.distributed import Ranks


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a name of `inline models`; needed only if the weights do not name it"
    )
    add_weights(parser)
    parser.add_argument(
        "--data", metavar="PATH", required=True, help="folder, digits, hfds/NAME, wds/FOLDER or tfds/NAME"
    )
    parser.add_argument("--split", metavar="NAME", default="val", help="split to evaluate on, or all (default: val)")
    parser.add_argument(
        "--split-file",
        metavar="FILE",
        help="split table of a folder without splits (default: split.csv of the training run)",
    )
    add_img_size(parser)
    add_eval_transform(parser)
    parser.add_argument("--by-position", action="store_true", help="match classes by their order, not their names")
    parser.add_argument(
        "--num-classes", type=int, metavar="N", help="number of classes, if wds/, hfds/ or tfds/ do not list them"
    )
    parser.add_argument(
        "--real", action="store_true", help="also measure accuracy with ImageNet's reassessed labels (ReaL)"
    )
    parser.add_argument(
        "--knn", type=int, metavar="K", help="instead of the classifier, let the K nearest training images vote"
    )
    parser.add_argument("--train-split", metavar="NAME", help="split that votes with --knn (default: train)")
    add_loading(parser, batch_size=64)
    add_max_broken(parser)
    add_device(parser)
    add_precision(parser, default="fp32")
    add_results(parser, csv="the accuracy of each class")


def run(args: argparse.Namespace) -> int:
    from inline_attention.data.tables import WHOLE, with_split_of
    from inline_attention.tasks.classification.classifier import load_classifier
    from inline_attention.training.distributed import join_ranks

    if args.knn is not None and (args.csv or args.real):
        raise ValueError("--knn has no accuracy by class and no ReaL labels: leave out --csv and --real")
    if args.knn is not None and args.by_position:
        raise ValueError("--knn does not use the classes of the model: leave out --by-position")
    if args.knn is None and args.train_split is not None:
        raise ValueError(f"--train-split {args.train_split} names the images that vote: give --knn K too")
    check_at_least(args, batch_size=1, workers=0, max_broken=0, num_classes=1, knn=1)
    check_writable(args.csv, json=args.json)
    with join_ranks(args.device) as ranks:
        size = parse_size(args.img_size)
        classifier = ranks.together(
            lambda: load_classifier(args.model, args.weights, img_size=size, eval_transform=args.eval_transform)
        )
        config = classifier.data
        config.path, config.val_split, config.num_classes = args.data, args.split, args.num_classes
        config.batch_size, config.workers, config.max_broken = args.batch_size, args.workers, args.max_broken
        config.split_file = args.split_file
        if args.split != WHOLE:
            config = with_split_of(_run_of(args.weights), config)
        classifier.model.to(ranks.device)
        if classifier.multi_label and (args.real or args.knn is not None):
            raise ValueError("the model gives an image several labels: leave out --real and --knn")
        measure = _measure if args.knn is None else _measure_neighbours
        facts = measure(args, classifier, config, ranks)
    if ranks.is_first and args.json:
        write_json(args.json, facts)
    return 0


def _run_of(weights: str) -> Path | None:
    """The run folder of a weights file, which lies in RUN/checkpoints or below; None: it lies elsewhere."""
    from inline_attention.training.run_folder import CHECKPOINTS

    return next((folder.parent for folder in Path(weights).parents if folder.name == CHECKPOINTS), None)


def _describe(
    args: argparse.Namespace, classifier: "Classifier", config: "DataConfig", ranks: "Ranks"
) -> dict[str, Any]:
    from inline_attention.tasks.classification.classifier import model_name

    name = model_name(classifier.model)
    if ranks.is_first and args.json != STANDARD_OUTPUT:
        say(f"{model_title(classifier.model)} on {args.data} [{args.split}] at {config.size[0]}×{config.size[1]}")
    return {
        "model": name,
        "weights": args.weights,
        "data": args.data,
        "split": args.split,
        "img_size": list(config.size),
        "eval_transform": config.eval_transform,
        "device": str(ranks.device),
    }


def _measure(
    args: argparse.Namespace, classifier: "Classifier", config: "DataConfig", ranks: "Ranks"
) -> dict[str, Any]:
    """The figures of the classifier, printed and as facts for --json."""
    from inline_attention.data import open_eval_data
    from inline_attention.tasks.classification import evaluate, evaluate_multi_label

    names = None if args.by_position else classifier.class_names
    loader = ranks.together(
        lambda: open_eval_data(config, class_names=names, rank=ranks.rank, world_size=ranks.world_size)
    )
    facts = _describe(args, classifier, config, ranks)
    measure = evaluate_multi_label if classifier.multi_label else partial(evaluate, real_labels=args.real)
    with _progress("evaluating", loader.num_images, ranks) as on_images:
        result: EvalResult | MultiLabelResult = measure(
            classifier.model,
            loader,
            device=ranks.device,
            amp_dtype=autocast_dtype(args.precision),
            on_images=on_images,
        )
    skipped = [image._asdict() for images in ranks.gather(list(loader.skipped)) for image in images]
    if ranks.is_first and args.json != STANDARD_OUTPUT:
        say(result.summary())
        where = str(ranks.device) if ranks.world_size == 1 else f"{ranks.world_size} × {ranks.device.type}"
        say(f"{result.images} images, {result.images_per_second:.1f} images/s on {where}, {result.skipped} unreadable")
    if ranks.is_first and args.csv:
        write_csv(args.csv, *result.class_table(classifier.class_names or loader.class_names))
    return {**facts, **result.figures(), "skipped_images": skipped}


def _progress(title: str, images: int, ranks: "Ranks") -> AbstractContextManager[Any]:
    share = -(-images // ranks.world_size)  # rank 0 shows its own progress
    return image_progress(title, total=share) if ranks.is_first else nullcontext()


def _measure_neighbours(
    args: argparse.Namespace, classifier: "Classifier", config: "DataConfig", ranks: "Ranks"
) -> dict[str, Any]:
    """The accuracy of a vote of the nearest training images, printed and as facts for --json."""
    from inline_attention.data import open_eval_data
    from inline_attention.tasks.classification.knn import knn_accuracy

    bank, queries = ranks.together(
        lambda: [
            open_eval_data(replace(config, val_split=split), rank=ranks.rank, world_size=ranks.world_size)
            for split in (args.train_split or "train", args.split)
        ]
    )
    facts = _describe(args, classifier, config, ranks)
    with _progress("features", bank.num_images + queries.num_images, ranks) as on_images:
        top1, images = knn_accuracy(
            classifier.model,
            bank,
            queries,
            k=args.knn,
            ranks=ranks,
            amp_dtype=autocast_dtype(args.precision),
            on_images=on_images,
        )
    if ranks.is_first and args.json != STANDARD_OUTPUT:
        say(f"top-1 {top1:.3f}% by a vote of the {args.knn} nearest of {bank.num_images} training images")
        say(f"{images} images")
    return {**facts, "knn": args.knn, "knn_top1": top1, "images": images, "training_images": bank.num_images}
