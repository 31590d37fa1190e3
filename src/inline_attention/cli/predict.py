"""The most probable classes of images, or all their labels, by a trained model.

MODEL is a name that `inline models` lists. It is not needed for a weights file of this library, which names its model.
Without model and weights, the InLine model that comes with the package is used.
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
    check_at_least,
)
from inline_attention.cli._output import autocast_dtype, check_writable, image_progress, parse_size
from inline_attention.environment import choose_device
from inline_attention.printing import STANDARD_OUTPUT, say, write_csv, write_json

DEFAULT_MODEL = "inline_deit_study"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "inline predict [MODEL] IMAGE|FOLDER … [--weights W] [options]"
    parser.add_argument(
        "arguments",
        nargs="+",
        metavar="[MODEL] IMAGE|FOLDER",
        help="optionally a model's name; then files, or folders (searched to any depth)",
    )
    add_weights(parser, otherwise="those of the package")
    parser.add_argument("--topk", type=int, metavar="K", help="at most K classes for each image (default: 5)")
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="P",
        help="only classes of at least this probability (default: 0.5 if the model gives an image several labels)",
    )
    add_img_size(parser)
    add_eval_transform(parser)
    add_loading(parser, batch_size=32)
    add_device(parser)
    add_precision(parser, default="fp32")
    add_results(parser, csv="one line for each prediction")


def run(args: argparse.Namespace) -> int:
    from inline_attention.data import open_files
    from inline_attention.data.sources import find_images
    from inline_attention.tasks.classification.classifier import load_classifier, model_name
    from inline_attention.tasks.classification.multi_label import THRESHOLD
    from inline_attention.tasks.classification.prediction import Guess, predict

    name, images = split_model(args.arguments)
    paths = find_images(images)
    name, weights = choose_weights(name, args.weights)
    check_at_least(args, topk=1, batch_size=1, workers=0)
    if args.threshold is not None and not 0 <= args.threshold <= 1:
        raise ValueError(f"--threshold is {args.threshold:g}; expected a probability, 0 to 1")
    check_writable(args.csv, json=args.json)
    device = choose_device(args.device)
    classifier = load_classifier(name, weights, img_size=parse_size(args.img_size), eval_transform=args.eval_transform)
    topk, threshold = args.topk, args.threshold
    if classifier.multi_label:
        threshold = THRESHOLD if threshold is None else threshold
    else:
        topk = topk or 5
    config = classifier.data
    config.batch_size, config.max_broken = args.batch_size, len(paths)
    config.workers = args.workers if args.workers is not None else (0 if len(paths) <= args.batch_size else None)
    loader = open_files(paths, config=config)
    found = []
    with image_progress("predicting", total=len(paths)) as on_images:
        amp_dtype = autocast_dtype(args.precision)
        options = dict(topk=topk, threshold=threshold, amp_dtype=amp_dtype)
        for prediction in predict(classifier, loader, device=device, **options):
            found.append((str(paths[prediction.sample]), prediction.guesses))
            on_images(1)

    for path, guesses in found if args.json != STANDARD_OUTPUT else ():
        say(path)
        for guess in guesses:
            say(f"  {guess.probability:7.2%}  {guess.description or guess.name}")
        if not guesses:
            say(f"  no class of {threshold:.0%} or more")
    if args.csv:
        header = ("image", "rank", *Guess._fields)
        rows = ((path, rank, *guess) for path, guesses in found for rank, guess in enumerate(guesses, start=1))
        write_csv(args.csv, header, rows)
    if args.json:
        predictions = [{"image": path, "guesses": [guess._asdict() for guess in guesses]} for path, guesses in found]
        skipped = [image._asdict() for image in loader.skipped]
        write_json(
            args.json,
            {
                "model": model_name(classifier.model),
                "multi_label": classifier.multi_label,
                "predictions": predictions,
                "skipped_images": skipped,
            },
        )
    if not found:
        raise ValueError("no image could be read")
    return 0


def split_model(arguments: list[str]) -> tuple[str | None, list[str]]:
    """[MODEL] IMAGE … → the model's name, or None, and the images."""
    import timm

    from inline_attention.data.sources import IMAGE_EXTENSIONS
    from inline_attention.models.registry import WEIGHTS_SUFFIXES, suggest_names

    for argument in arguments:
        if Path(argument).suffix in WEIGHTS_SUFFIXES:
            raise ValueError(f"{argument!r} is a file of weights, not an image: give it with --weights")
    first = Path(arguments[0])
    # A folder may have the name of a model.
    if first.suffix.lower() in IMAGE_EXTENSIONS or (first.exists() and not timm.is_model(arguments[0])):
        return None, arguments
    if ":" not in arguments[0] and not timm.is_model(arguments[0]):  # timm reads "hf-hub:…" itself
        raise ValueError(f"there is no file, folder or model {arguments[0]!r}; {suggest_names(arguments[0])}")
    if len(arguments) == 1:
        raise ValueError(f"there are no images: give files or folders after the model {arguments[0]!r}")
    return arguments[0], arguments[1:]


def choose_weights(name: str | None, weights: str | None) -> tuple[str | None, str]:
    """The model and its weights, with defaults for what is left out."""
    from inline_attention.models.shipped import shipped_weights

    if weights is not None and (name is not None or weights != "pretrained"):
        return name, weights
    if shipped_weights(name or DEFAULT_MODEL):
        return name or DEFAULT_MODEL, "pretrained"
    raise ValueError(
        "no weights come with this installation: give --weights FILE, URL or 'pretrained' (with the model's name)"
        if name is None
        else f"there are no weights of {name} in the package: give --weights FILE, URL or 'pretrained'"
    )
