"""Write a model to a file that runs without this library, and compare the file's output with the model's."""

import argparse
from pathlib import Path

from inline_attention.cli._options import add_img_size, add_weights
from inline_attention.cli._output import parse_size
from inline_attention.printing import say


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="a model of `inline models`; needed only if the weights do not name it"
    )
    parser.add_argument("--format", choices=("onnx", "pt2"), default="onnx", help="default: onnx")
    add_weights(parser, otherwise="random ones")
    parser.add_argument("--num-classes", type=int, help="for a model without weights (default: 1000, as published)")
    add_img_size(parser)
    parser.add_argument("--dynamic-batch", action="store_true", help="any number of images")
    parser.add_argument("--dynamic-size", action="store_true", help="any size from a minimum on, which is printed")
    parser.add_argument("--output", type=Path, metavar="F", help="default: NAME.onnx or NAME.pt2 in this directory")


def run(args: argparse.Namespace) -> int:
    import torch

    from inline_attention.export import TOLERANCE, export_model
    from inline_attention.models.base import resize_input
    from inline_attention.models.weights import architecture, open_model

    torch.manual_seed(0)
    model = open_model(args.name, args.weights, num_classes=args.num_classes)
    img_size = parse_size(args.img_size)
    if img_size is not None and not args.dynamic_size:
        resize_input(model, img_size)
    exported = export_model(
        model.eval(),
        args.output or Path(f"{architecture(model)}.{args.format}"),
        format=args.format,
        img_size=img_size,
        dynamic_batch=args.dynamic_batch,
        dynamic_size=args.dynamic_size,
    )
    if not args.weights:
        say("weights: random; --weights exports trained ones")
    say(f"written: {exported.path}")
    say(f"covers:  {exported.covers}")
    for check in exported.checks:
        verdict = "ok" if check.passed else f"FAILED (over {TOLERANCE:g})"
        say(f"check:   {' × '.join(map(str, check.shape))}: max |file − model| = {check.difference:.2e} {verdict}")
    return 0 if all(check.passed for check in exported.checks) else 1
