"""Write a model to a file that runs without this library, and compare the file's output with the model's.

The class names of the weights and the preparation of images are written into the file. `--format hf` writes a folder
for timm and transformers, which build the model with this library.
"""

import argparse
from pathlib import Path

from inline_attention.cli._options import add_img_size, add_weights
from inline_attention.cli._output import check_writable, parse_size
from inline_attention.printing import say

FORMATS = ("onnx", "pt2", "torchscript", "pt2-int8", "openvino", "coreml", "litert", "hf")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="MODEL", nargs="?", help="a name of `inline models`; needed only if the weights do not name it"
    )
    parser.add_argument("--format", choices=FORMATS, default="onnx", help="format of the file (default: onnx)")
    add_weights(parser, otherwise="random ones")
    parser.add_argument(
        "--num-classes", type=int, metavar="N", help="classes of a model without weights (default: 1000, as published)"
    )
    add_img_size(parser)
    parser.add_argument("--dynamic-batch", action="store_true", help="the file takes any number of images")
    parser.add_argument("--dynamic-size", action="store_true", help="the file takes images of any size above a minimum")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: MODEL.onnx, MODEL.pt2, … in this folder")


def run(args: argparse.Namespace) -> int:
    import torch

    from inline_attention.export import TOLERANCE, export_model
    from inline_attention.export.model import ROUTES
    from inline_attention.models.base import VisionModel
    from inline_attention.models.weights import architecture
    from inline_attention.tasks.classification.classifier import load_classifier

    if args.num_classes is not None and args.num_classes < 0:
        raise ValueError(f"--num-classes {args.num_classes}: expected 0 or more")
    if args.num_classes is not None and args.weights is not None:
        raise ValueError(f"--num-classes {args.num_classes}: the weights decide the number of classes; leave it out")
    if args.format != "hf":  # which writes a folder
        check_writable(args.output)
    endings = {name: Path(f"x{route.suffix}").suffix for name, route in ROUTES.items()}
    if args.output is not None and args.output.suffix in {*endings.values()} - {"", endings[args.format]}:
        raise ValueError(
            f"--output {args.output} has the ending of another format than --format {args.format}: give the --format "
            "of that ending, or another name"
        )
    torch.manual_seed(0)
    img_size = parse_size(args.img_size)
    classifier = load_classifier(
        args.name,
        args.weights,
        img_size=None if args.dynamic_size else img_size,
        arguments={} if args.num_classes is None else dict(num_classes=args.num_classes),
    )
    model = classifier.model
    if not isinstance(model, VisionModel) and not hasattr(model, "linearization"):
        raise ValueError(
            f"{architecture(model)} is a model of timm, not one of this library; `inline models` lists those. "
            "A linearised model of timm is exported with --weights FILE"
        )
    exported = export_model(
        model.eval(),
        args.output or Path(f"{architecture(model)}{ROUTES[args.format].suffix}"),
        format=args.format,
        img_size=img_size,
        dynamic_batch=args.dynamic_batch,
        dynamic_size=args.dynamic_size,
        class_names=classifier.readable_names(),
        preprocessing=classifier.preprocessing(),
        multi_label=classifier.multi_label,
    )
    if not args.weights:
        say("weights: random; --weights exports trained ones")
    say(f"written: {exported.path}")
    say(f"covers:  {exported.covers}")
    named = f"the names of {model.num_classes} classes" if classifier.class_names else "no class names"
    say(f"inside:  {named}; " + ", ".join(f"{key} {exported.about[key]}" for key in ("mean", "std", "interpolation")))
    if exported.note:
        say(f"note:    {exported.note}")
    for check in exported.checks:
        verdict = "ok" if check.passed else f"FAILED (over {TOLERANCE:g})"
        say(f"check:   {' × '.join(map(str, check.shape))}: max |file − model| = {check.difference:.2e} {verdict}")
    return 0 if all(check.passed for check in exported.checks) else 1
