"""Semantic segmentation: train a backbone under UperNet or Semantic FPN, evaluate it, segment images with it.

For several GPUs: torchrun --nproc-per-node 8 -m inline_attention segment train RECIPE --data PATH
"""

import argparse
import math
from itertools import islice
from typing import TYPE_CHECKING

from inline_attention.cli import _dense
from inline_attention.cli._options import check_at_least
from inline_attention.cli._output import autocast_dtype, check_writable, image_progress, parse_size
from inline_attention.cli._training import run_training
from inline_attention.environment import choose_device
from inline_attention.printing import STANDARD_OUTPUT, say, say_text, table

if TYPE_CHECKING:
    from inline_attention.tasks.segmentation.weights import TrainedSegmenter
    from inline_attention.training.loop import Outcome
    from inline_attention.training.task import Task


def configure(parser: argparse.ArgumentParser) -> None:
    evaluate, _ = _dense.add_actions(
        parser,
        command="segment",
        model="segmenter",
        description=__doc__,
        task=_task,
        data="folder with images/SPLIT, masks/SPLIT and classes.txt, or ADE20K or Cityscapes as distributed",
        add_options=_add_options,
        measures="measure mIoU and accuracy on images with masks",
        predicts="assign a class to every pixel of images",
        output="segmented",
    )
    own = "default: that of the training run"
    evaluate.add_argument(
        "--layout", choices=("auto", "folders", "ade20k", "cityscapes"), help=f"layout of the data ({own})"
    )
    evaluate.add_argument("--ignore-index", type=int, metavar="N", help=f"value of mask pixels to ignore ({own})")


def _add_options(trained: argparse.ArgumentParser) -> None:
    trained.add_argument(
        "--window", type=int, nargs="+", metavar="N", help="side of the sliding window, or height and width"
    )
    trained.add_argument(
        "--scales", type=float, nargs="+", metavar="S", help="scales to average over, such as 0.75 1 1.25"
    )
    trained.add_argument("--flip", action="store_true", help="average over the image and its mirror image")
    trained.add_argument(
        "--short-side", type=int, metavar="N", help="resize the short side of an image to N pixels; 0: do not resize"
    )
    trained.add_argument("--max-side", type=int, metavar="N", help="largest length of the long side in pixels")


def run(args: argparse.Namespace) -> int:
    return {"train": _train, "models": _models, "eval": _eval, "predict": _predict}[args.action](args)


def _train(args: argparse.Namespace) -> int:
    return run_training(args, task=_task(), describe_outcome=_describe_outcome)


def _task() -> "type[Task]":
    from inline_attention.tasks.segmentation.task import Segmentation

    return Segmentation


def _describe_outcome(outcome: "Outcome") -> str:
    summary = outcome.summary
    result = (
        f"mIoU {summary['val_miou']:.2f}%, mAcc {summary['val_macc']:.2f}% on the validation split "
        f"(best {summary['best_miou']:.2f}%, epoch {summary['best_epoch']})"
    )
    return _dense.describe_outcome(outcome, command="segment", result=result)


def _models(args: argparse.Namespace) -> int:
    from inline_attention.tasks.segmentation.model import HEADS
    from inline_attention.tasks.segmentation.published import COST_CLASSES, COST_SIZE, SEGMENTERS, count_cost

    def known(value: float | None) -> str:
        return "–" if value is None else f"{value:g}"

    rows = []
    for backbone, facts in SEGMENTERS.items():
        cost = count_cost(backbone, facts.head)
        counted = (f"{cost.params / 1e6:.2f}", f"{cost.macs / 1e9:.1f}")
        published = map(known, (facts.params, facts.macs, facts.miou, facts.macc))
        rows.append([f"{facts.head}_{backbone}", HEADS[facts.head][0], *counted, *published])
    say_text(table(["recipe", "head", "params, M", "MACs, G", "published params", "MACs", "mIoU", "mAcc"], rows))
    say(f"MACs of one {COST_SIZE[0]}×{COST_SIZE[1]} image with {COST_CLASSES} classes; mIoU and mAcc on ADE20K.")
    return 0


def _load(args: argparse.Namespace) -> "TrainedSegmenter":
    """The segmenter, with the options that change its inference."""
    from inline_attention.tasks.segmentation.weights import load_segmenter

    check_at_least(args, short_side=0, max_side=1, workers=0)
    window = parse_size(args.window, option="--window")
    trained = load_segmenter(args.weights)
    config = trained.data
    if window is not None:
        config.window = list(window)
    if args.scales is not None:
        if not all(0 < scale < math.inf for scale in args.scales):
            raise ValueError(f"--scales is {' '.join(map(str, args.scales))}; expected positive numbers")
        config.eval_scales = args.scales
    if args.flip:
        config.eval_flip = True
    if args.short_side is not None:
        config.short_side = args.short_side or None
    if args.max_side is not None:
        config.max_side = args.max_side
    if config.short_side is not None and config.short_side > config.max_side:
        raise ValueError(
            f"the short side is {config.short_side} and the long side at most {config.max_side}: lower --short-side or "
            "raise --max-side"
        )
    config.workers = args.workers
    config.validate()
    return trained


def _eval(args: argparse.Namespace) -> int:
    from inline_attention.tasks.segmentation.data import open_eval_images
    from inline_attention.tasks.segmentation.evaluation import evaluate
    from inline_attention.tasks.segmentation.pictures import draw_examples
    from inline_attention.tasks.segmentation.sources import lists_classes
    from inline_attention.tasks.segmentation.task import write_per_class

    check_writable(args.csv, args.examples, json=args.json)
    check_at_least(args, ignore_index=0, max_broken=0)
    device = choose_device(args.device)
    trained = _load(args)
    config = trained.data
    config.path, config.max_broken = args.data, args.max_broken
    if args.layout is not None:
        config.layout = args.layout
    if args.split is not None:
        config.val_split = args.split
    if args.ignore_index is not None:
        config.ignore_index = args.ignore_index
    if not lists_classes(config):
        config.classes = trained.class_names
    images = open_eval_images(config)
    if images.class_names != trained.class_names:
        raise ValueError(
            f"{args.data} has other classes than the weights: {', '.join(images.class_names)}; "
            f"the weights have {', '.join(trained.class_names)} (set --ignore-index if the last one listed is no class)"
        )
    with image_progress("evaluating", total=images.num_images) as on_images:
        result = evaluate(
            trained.model.to(device),
            images,
            config=config,
            device=device,
            amp_dtype=autocast_dtype(args.precision),
            examples=8 if args.examples else 0,
            on_images=on_images,
        )
    scores = result.scores
    if args.json != STANDARD_OUTPUT:
        say(f"{trained.title} on {args.data} [{config.val_split}]")
        say(f"mIoU {scores.miou:.3f}%  mAcc {scores.macc:.3f}%  pixels {scores.pixel_accuracy:.3f}%")
        for name, *values in zip(trained.class_names, scores.iou.tolist(), scores.accuracy.tolist(), strict=True):
            iou, accuracy = ("–".rjust(7) if math.isnan(value) else f"{value:6.2f}%" for value in values)
            say(f"  {name:<20} IoU {iou}  accuracy {accuracy}")
        speed = result.images / result.seconds
        say(f"{result.images} images, {speed:.1f} images/s on {device}, {result.skipped} unreadable")
    if args.csv:
        write_per_class(scores, trained.class_names, args.csv)
    if args.examples:
        draw_examples(result.examples, trained.class_names, args.examples)
    figures = {"miou": scores.miou, "macc": scores.macc, "pixel_accuracy": scores.pixel_accuracy}
    _dense.write_result(args, trained, figures, images=result.images, seconds=result.seconds, skipped=images.skipped)
    return 0


def _predict(args: argparse.Namespace) -> int:
    from inline_attention.tasks.segmentation.prediction import SegmentedFile, segment_files

    def describe(file: SegmentedFile) -> str:
        return ", ".join(f"{name} {share:.0%}" for name, share in islice(file.shares.items(), 4) if share >= 0.005)

    return _dense.predict(args, _load, segment_files, doing="segmenting", describe=describe, files="masks and overlays")
