"""What a trained model sees in images: the most probable classes of each."""

import argparse
from pathlib import Path

HELP = "name what is in images"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="name of the model, see `inline models`")
    parser.add_argument("images", nargs="+", metavar="IMAGE|FOLDER", help="files, or folders (searched to any depth)")
    parser.add_argument("--weights", required=True, help="file, URL, or 'pretrained' for the published weights")
    parser.add_argument("--topk", type=int, default=5, help="classes to show for each image (default: 5)")
    parser.add_argument("--img-size", type=int, nargs="+", metavar="N", help="side, or height and width")
    parser.add_argument("--eval-transform", choices=("published", "timm", "resize"), help="default: the weights' own")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, help="loader processes (default: by the machine)")
    parser.add_argument("--device", help="cpu, cuda or mps (default: the best there is)")
    parser.add_argument("--csv", metavar="FILE", help="write the predictions, a line each")
    parser.add_argument("--json", metavar="FILE", help="write the predictions")


def run(args: argparse.Namespace) -> int:
    from inline_attention.cli._output import choose_device, image_progress, parse_size, write_csv, write_json
    from inline_attention.data import open_files
    from inline_attention.training.classifier import Guess, load_classifier, predict

    paths = find_images(args.images)
    if args.topk < 1:
        raise ValueError(f"--topk is {args.topk}; expected at least 1")
    device = choose_device(args.device)
    classifier = load_classifier(
        args.model, args.weights, img_size=parse_size(args.img_size), eval_transform=args.eval_transform
    )
    config = classifier.data
    config.batch_size, config.max_broken = args.batch_size, len(paths)
    config.workers = args.workers if args.workers is not None else (0 if len(paths) <= args.batch_size else None)
    loader = open_files(paths, config=config)
    found = []
    with image_progress("predicting", total=len(paths)) as on_images:
        for prediction in predict(classifier, loader, device=device, topk=args.topk):
            found.append((str(paths[prediction.sample]), prediction.guesses))
            on_images(1)

    for path, guesses in found:
        print(path)
        for guess in guesses:
            print(f"  {guess.probability:7.2%}  {guess.description or guess.name}")
    if args.csv:
        header = ("image", "rank", *Guess._fields)
        rows = ((path, rank, *guess) for path, guesses in found for rank, guess in enumerate(guesses, start=1))
        write_csv(args.csv, header, rows)
    if args.json:
        predictions = [{"image": path, "guesses": [guess._asdict() for guess in guesses]} for path, guesses in found]
        skipped = [image._asdict() for image in loader.skipped]
        write_json(args.json, {"model": args.model, "predictions": predictions, "skipped_images": skipped})
    return 0 if found else 1


def find_images(arguments: list[str]) -> list[Path]:
    """Files as they are named, and the images below folders, in order."""
    from inline_attention.data.sources import IMAGE_EXTENSIONS

    paths: list[Path] = []
    for argument in map(Path, arguments):
        if argument.is_dir():
            below = sorted(p for p in argument.rglob("*") if p.suffix.lower() in IMAGE_EXTENSIONS and p.is_file())
            if not below:
                raise ValueError(f"no images in folder {str(argument)!r}; known: {', '.join(IMAGE_EXTENSIONS)}")
            paths.extend(below)
        elif argument.is_file():
            paths.append(argument)
        else:
            raise ValueError(f"image {str(argument)!r} does not exist")
    return paths
