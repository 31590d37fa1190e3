"""The cost of a model by stage: output shape, parameters, multiply-accumulates and activation memory of one image.

Everything is counted from shapes, which takes seconds for any model and size. Activation memory is what training keeps
for the backward pass in float32, without gradient checkpointing and fused kernels. A linearised model of timm has one
stage.
"""

import argparse

from inline_attention.cli._options import add_img_size, add_results, add_weights
from inline_attention.cli._output import check_writable, model_title, parse_size
from inline_attention.printing import STANDARD_OUTPUT, say, say_text, table, write_json


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", metavar="MODEL", nargs="?", help="a name of `inline models`; not needed if the weights name it"
    )
    add_weights(parser, otherwise="none, the name is enough")
    add_img_size(parser)
    add_results(parser)


def run(args: argparse.Namespace) -> None:
    import torch

    from inline_attention.models.base import VisionModel, input_shape, resize_input
    from inline_attention.models.profile import profile
    from inline_attention.models.weights import open_model

    check_writable(json=args.json)
    if args.weights:
        model = open_model(args.name, args.weights).to("meta")
    else:
        with torch.device("meta"):
            model = open_model(args.name, None)
    img_size = parse_size(args.img_size)
    if img_size is None:
        _, *size = input_shape(model)
        img_size = (size[0], size[1])
    elif not isinstance(model, VisionModel):
        resize_input(model, img_size)
    costs = profile(model, img_size=img_size)
    if args.json:
        write_json(args.json, [cost._asdict() for cost in costs])
    if args.json == STANDARD_OUTPUT:
        return

    say(f"{model_title(model)} at {img_size[0]}×{img_size[1]}")
    rows = [[cost.name, " × ".join(map(str, cost.shape)), *_in_units(*cost[2:])] for cost in costs]
    totals = [sum(values) for values in zip(*(cost[2:] for cost in costs), strict=True)]
    say_text(table(["stage", "output", "params", "MACs", "activations"], [*rows, ["total", "", *_in_units(*totals)]]))


def _in_units(params: int, macs: int, activation_bytes: int) -> list[str]:
    return [f"{params / 1e6:.2f}M", f"{macs / 1e9:.3f}G", f"{activation_bytes / 2**20:.1f} MiB"]
