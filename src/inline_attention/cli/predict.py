"""What a trained model sees in images: the most probable classes of each.

MODEL is a name that `inline models` lists. A weights file of this library says by itself which model it is for; without
both, the InLine model that comes with the package looks at the images.
"""

import argparse
from pathlib import Path

from inline_attention.printing import say

DEFAULT_MODEL = "inline_deit_study"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "inline predict [MODEL] IMAGE|FOLDER … [--weights W] [options]"
    parser.add_argument(
        "arguments",
        nargs="+",
        metavar="[MODEL] IMAGE|FOLDER",
        help="a model's name or none, then files, or folders (searched to any depth)",
    )
    parser.add_argument("--weights", help="file, URL, or 'pretrained' for the published weights")
    parser.add_argument("--topk", type=int, default=5, help="classes to show for each image (default: 5)")
    parser.add_argument("--img-size", type=int, nargs="+", metavar="N", help="side, or height and width")
    parser.add_argument("--eval-transform", choices=("published", "timm", "resize"), help="default: the weights' own")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, help="loader processes (default: by the machine)")
    parser.add_argument("--device", help="cpu, cuda or mps (default: the best there is)")
    parser.add_argument("--csv", metavar="FILE", help="write the predictions, a line each")
    parser.add_argument("--json", metavar="FILE", help="write the predictions")


def run(args: argparse.Namespace) -> int:
    from inline_attention.cli._output import (
        check_writable,
        choose_device,
        image_progress,
        parse_size,
        write_csv,
        write_json,
    )
    from inline_attention.data import open_files
    from inline_attention.data.sources import utf8_name
    from inline_attention.training.classifier import Guess, load_classifier, model_name, predict

    name, images = split_model(args.arguments)
    paths = find_images(images)
    name, weights = choose_weights(name, args.weights)
    if args.topk < 1:
        raise ValueError(f"--topk is {args.topk}; expected at least 1")
    check_writable(args.csv, args.json)
    device = choose_device(args.device)
    classifier = load_classifier(name, weights, img_size=parse_size(args.img_size), eval_transform=args.eval_transform)
    config = classifier.data
    config.batch_size, config.max_broken = args.batch_size, len(paths)
    config.workers = args.workers if args.workers is not None else (0 if len(paths) <= args.batch_size else None)
    loader = open_files(paths, config=config)
    found = []
    with image_progress("predicting", total=len(paths)) as on_images:
        for prediction in predict(classifier, loader, device=device, topk=args.topk):
            found.append((utf8_name(paths[prediction.sample]), prediction.guesses))
            on_images(1)

    for path, guesses in found:
        say(path)
        for guess in guesses:
            say(f"  {guess.probability:7.2%}  {guess.description or guess.name}")
    if args.csv:
        header = ("image", "rank", *Guess._fields)
        rows = ((path, rank, *guess) for path, guesses in found for rank, guess in enumerate(guesses, start=1))
        write_csv(args.csv, header, rows)
    if args.json:
        predictions = [{"image": path, "guesses": [guess._asdict() for guess in guesses]} for path, guesses in found]
        skipped = [image._asdict() for image in loader.skipped]
        write_json(
            args.json, {"model": model_name(classifier.model), "predictions": predictions, "skipped_images": skipped}
        )
    return 0 if found else 1


def split_model(arguments: list[str]) -> tuple[str | None, list[str]]:
    """[MODEL] IMAGE … → the model's name, or None, and the images."""
    import timm

    from inline_attention.data.sources import IMAGE_EXTENSIONS

    first = Path(arguments[0])
    # A folder may be called after a model; what is neither a model nor on the disk is a model's name to be corrected.
    if first.suffix.lower() in IMAGE_EXTENSIONS or (first.exists() and not timm.is_model(arguments[0])):
        return None, arguments
    if len(arguments) == 1:
        raise ValueError(f"there are no images: give files or folders after the model {arguments[0]!r}")
    return arguments[0], arguments[1:]


def choose_weights(name: str | None, weights: str | None) -> tuple[str | None, str]:
    """The model and its weights where one or both are left out."""
    from inline_attention.models.shipped import shipped_weights

    if weights is not None:
        return name, weights
    if shipped_weights(name or DEFAULT_MODEL):
        return name or DEFAULT_MODEL, "pretrained"
    raise ValueError(
        "no weights come with this installation: give --weights FILE, URL or 'pretrained' (with the model's name)"
        if name is None
        else f"there are no weights of {name} in the package: give --weights FILE, URL or 'pretrained'"
    )


def find_images(arguments: list[str]) -> list[Path]:
    """Files as they are named, and the images below folders, in order."""
    from inline_attention.data.sources import IMAGE_EXTENSIONS, find_files

    paths: list[Path] = []
    for argument in map(Path, arguments):
        if argument.is_dir():
            below = sorted(map(Path, find_files(argument, IMAGE_EXTENSIONS)))
            if not below:
                raise ValueError(f"no images in folder {str(argument)!r}; known: {', '.join(IMAGE_EXTENSIONS)}")
            paths.extend(below)
        elif argument.is_file():
            paths.append(argument)
        else:
            raise ValueError(f"image {str(argument)!r} does not exist or is no regular file")
    return paths
