"""Semantic segmentation: train a backbone under UperNet or Semantic FPN, evaluate it, segment images with it.

Training runs under torchrun too: torchrun --nproc-per-node 8 -m inline_attention segment train RECIPE --data PATH
"""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inline_attention.cli._training import configure_training, run_training

if TYPE_CHECKING:
    from inline_attention.training.loop import Outcome

HELP = "semantic segmentation: train, eval, predict, models"


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    train = actions.add_parser("train", help="train a segmenter", description=__doc__)
    configure_training(
        train,
        data="folder with images/SPLIT, masks/SPLIT and classes.txt, or what data.layout says",
        recipe="name of a recipe or a .yaml file; --list-recipes shows them",
    )

    actions.add_parser("models", help="published models: parameters, cost, results")

    trained = argparse.ArgumentParser(add_help=False)
    trained.add_argument("--weights", required=True, help="file that `inline segment train` wrote")
    trained.add_argument("--window", type=int, nargs="+", metavar="N", help="in windows: side, or height and width")
    trained.add_argument("--scales", type=float, nargs="+", metavar="S", help="average over them, as 0.75 1 1.25")
    trained.add_argument("--flip", action="store_true", help="average over the image and its mirror image")
    trained.add_argument("--short-side", type=int, metavar="N", help="resize images to this; 0: leave them")
    trained.add_argument("--workers", type=int, help="loader processes (default: by the machine)")
    trained.add_argument("--device", help="cpu, cuda or mps (default: the best there is)")
    trained.add_argument("--amp", choices=("bfloat16", "float16"), help="compute in this precision (autocast)")

    evaluate = actions.add_parser("eval", parents=[trained], help="mIoU and accuracy on images with masks")
    evaluate.add_argument("--data", required=True, metavar="PATH", help="folder of the data set")
    evaluate.add_argument("--layout", choices=("folders", "ade20k", "cityscapes"), default="folders")
    evaluate.add_argument("--split", default="val", help="split to evaluate on (default: val)")
    evaluate.add_argument("--ignore-index", type=int, default=255, help="number that counts for nothing (default: 255)")
    evaluate.add_argument("--csv", metavar="FILE", type=Path, help="write IoU and accuracy per class")
    evaluate.add_argument("--json", metavar="FILE", help="write the result")
    evaluate.add_argument("--examples", metavar="FILE", type=Path, help="draw the first images with their predictions")

    predict = actions.add_parser("predict", parents=[trained], help="segment images")
    predict.add_argument("images", nargs="+", metavar="IMAGE|FOLDER", help="files, or folders (searched to any depth)")
    predict.add_argument("--output", metavar="DIR", type=Path, default=Path("segmented"), help="default: segmented")


def run(args: argparse.Namespace) -> int:
    return {"train": _train, "models": _models, "eval": _eval, "predict": _predict}[args.action](args)


def _train(args: argparse.Namespace) -> int:
    from inline_attention.dense.segmentation.task import Segmentation

    return run_training(args, task=Segmentation, farewell=_farewell)


def _farewell(outcome: "Outcome") -> str:
    summary, folder = outcome.summary, outcome.folder
    best = folder / "checkpoints" / "best.safetensors"
    lines = [
        "",
        f"result    mIoU {summary['val_miou']:.2f}%, mAcc {summary['val_macc']:.2f}% on the validation split "
        f"(best {summary['best_miou']:.2f}%, epoch {summary['best_epoch']})",
        f"time      {summary['seconds']:.0f} s of training, {summary['images_per_second']:,.1f} images/s",
        f"classes   {folder / 'per_class.csv'}",
        f"pictures  {folder / 'examples.png'}",
        f"weights   {best}",
    ]
    if summary["skipped_images"]:
        lines.append(f"skipped   {summary['skipped_images']} unreadable images")
    return "\n".join([*lines, "", "next:", f"  inline segment predict --weights {best} IMAGE"])


def _models(args: argparse.Namespace) -> int:
    from inline_attention.bench.record import table
    from inline_attention.dense.published import COST_CLASSES, COST_SIZE, SEGMENTERS
    from inline_attention.dense.segmentation.cost import count_cost
    from inline_attention.dense.segmentation.model import HEADS

    def known(value: float | None) -> str:
        return "–" if value is None else f"{value:g}"

    rows = []
    for backbone, facts in SEGMENTERS.items():
        cost = count_cost(backbone, facts.head)
        counted = (f"{cost.params / 1e6:.2f}", f"{cost.macs / 1e9:.1f}")
        published = map(known, (facts.params, facts.macs, facts.miou, facts.macc))
        rows.append([f"{facts.head}_{backbone}", HEADS[facts.head][0], *counted, *published])
    print(table(["recipe", "head", "params, M", "MACs, G", "published params", "MACs", "mIoU", "mAcc"], rows))
    print(f"MACs of one {COST_SIZE[0]}×{COST_SIZE[1]} image with {COST_CLASSES} classes; mIoU and mAcc on ADE20K.")
    return 0


def _load(args: argparse.Namespace) -> Any:
    """The segmenter, with what the command line says of its inference."""
    from inline_attention.cli._output import parse_size
    from inline_attention.dense.segmentation.weights import load_segmenter

    window = parse_size(args.window, option="--window")
    trained = load_segmenter(args.weights)
    config = trained.data
    if window is not None:
        config.window = window
    if args.scales is not None:
        config.eval_scales = args.scales
    if args.flip:
        config.eval_flip = True
    if args.short_side is not None:
        config.short_side = args.short_side or None
    config.workers = args.workers
    config.validate()
    return trained


def _eval(args: argparse.Namespace) -> int:
    import torch

    from inline_attention.cli._output import check_writable, choose_device, image_progress, write_json
    from inline_attention.dense.segmentation.data import open_eval_images
    from inline_attention.dense.segmentation.evaluate import evaluate
    from inline_attention.dense.segmentation.pictures import draw_examples
    from inline_attention.dense.segmentation.sources import lists_classes
    from inline_attention.dense.segmentation.task import write_per_class

    check_writable(args.csv, args.json)
    device = choose_device(args.device)
    trained = _load(args)
    config = trained.data
    config.path, config.layout, config.val_split, config.ignore_index = (
        args.data, args.layout, args.split, args.ignore_index,
    )  # fmt: skip
    if not lists_classes(config):
        config.classes = trained.class_names
    images = open_eval_images(config)
    if images.class_names != trained.class_names:
        raise ValueError(
            f"{args.data} has other classes than the weights: {', '.join(images.class_names)}; "
            f"the weights know {', '.join(trained.class_names)} (--ignore-index, if the last one listed is no class)"
        )
    with image_progress("evaluating", total=images.num_images) as on_images:
        result = evaluate(
            trained.model.to(device),
            images,
            config=config,
            device=device,
            amp_dtype=getattr(torch, args.amp) if args.amp else None,
            examples=8 if args.examples else 0,
            on_images=on_images,
        )
    scores = result.scores
    print(f"{trained.title} on {args.data} [{args.split}]")
    print(f"mIoU {scores.miou:.3f}%  mAcc {scores.macc:.3f}%  pixels {scores.pixel_accuracy:.3f}%")
    for name, *values in zip(trained.class_names, scores.iou.tolist(), scores.accuracy.tolist(), strict=True):
        iou, accuracy = ("–".rjust(7) if math.isnan(value) else f"{value:6.2f}%" for value in values)
        print(f"  {name:<20} IoU {iou}  accuracy {accuracy}")
    speed = result.images / result.seconds
    print(f"{result.images} images, {speed:.1f} images/s on {device}, {result.skipped} unreadable")
    if args.csv:
        write_per_class(scores, trained.class_names, args.csv)
    if args.examples:
        draw_examples(result.examples, trained.class_names, args.examples)
    if args.json:
        facts = {
            "model": trained.title,
            "weights": args.weights,
            "data": args.data,
            "split": args.split,
            "miou": scores.miou,
            "macc": scores.macc,
            "pixel_accuracy": scores.pixel_accuracy,
            "images": result.images,
            "seconds": result.seconds,
            "skipped_images": [image._asdict() for image in images.skipped],
        }
        write_json(args.json, facts)
    return 0


def _predict(args: argparse.Namespace) -> int:
    import numpy as np
    import torch
    from PIL import Image

    from inline_attention.cli._output import choose_device, free_name, image_progress
    from inline_attention.cli.predict import find_images
    from inline_attention.data.sources import utf8_name
    from inline_attention.dense.segmentation.data import open_image_files
    from inline_attention.dense.segmentation.evaluate import Predictor
    from inline_attention.dense.segmentation.pictures import overlay, save_mask

    paths = find_images(args.images)
    device = choose_device(args.device)
    trained = _load(args)
    config = trained.data
    config.max_broken = len(paths)
    if args.workers is None and len(paths) < 16:
        config.workers = 0
    predictor = Predictor(
        trained.model.to(device),
        config=config,
        device=device,
        amp_dtype=getattr(torch, args.amp) if args.amp else None,
    )
    args.output.mkdir(parents=True, exist_ok=True)
    written = 0
    with image_progress("segmenting", total=len(paths)) as on_images:
        for batch in open_image_files(paths, config=config):
            for image in batch:
                (classes,) = predictor([image.pixels], [image.size])
                found = classes.cpu().numpy().astype(np.uint8)
                name = free_name(paths, image.sample_id)
                save_mask(found, args.output / f"{name}.png")
                pixels = image.pixels.permute(1, 2, 0).numpy()
                Image.fromarray(overlay(pixels, found)).save(args.output / f"{name}.overlay.jpg", quality=92)
                shares = np.bincount(found.ravel(), minlength=len(trained.class_names)) / found.size
                largest = [c for c in np.argsort(-shares)[:4] if shares[c] >= 0.005]
                listed = ", ".join(f"{trained.class_names[c]} {shares[c]:.0%}" for c in largest)
                print(f"{utf8_name(paths[image.sample_id])}: {listed}")
                written += 1
                on_images(1)
    print(f"{written} masks and overlays in {args.output}")
    return 0 if written else 1
