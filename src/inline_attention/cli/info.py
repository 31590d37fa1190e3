"""What a model costs, by stage: output shape, parameters, multiply-accumulates and activation memory of one image.

Everything is counted from shapes alone, so that any model and size takes seconds. Activation memory is what training
keeps for the backward in float32, without gradient checkpointing and fused kernels.
"""

import argparse

from inline_attention.printing import say


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="a model of `inline models`")
    parser.add_argument("--weights", metavar="FILE", help="a weights file, which says which model it is of")
    parser.add_argument("--img-size", nargs=2, type=int, metavar=("H", "W"), help="default: the model's own")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> None:
    import json

    import torch

    from inline_attention.cli._output import open_model
    from inline_attention.models.base import to_pair
    from inline_attention.models.profile import profile
    from inline_attention.models.weights import architecture

    if args.weights:
        model = open_model(args.name, args.weights).to("meta")
    else:
        with torch.device("meta"):
            model = open_model(args.name, None)
    img_size = to_pair(args.img_size) if args.img_size else model.img_size
    costs = profile(model, img_size=img_size)
    if args.json:
        say(*json.dumps([cost._asdict() for cost in costs], indent=2).split("\n"))
        return

    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{architecture(model)} at {img_size[0]}×{img_size[1]}", header_style="bold", show_footer=True)
    totals = [sum(values) for values in zip(*(cost[2:] for cost in costs), strict=True)]
    table.add_column("stage", footer="total")
    table.add_column("output", justify="right")
    for heading, total in zip(("params", "MACs", "activations"), totals, strict=True):
        table.add_column(heading, justify="right", footer=_in_units(heading, total))
    for cost in costs:
        table.add_row(
            cost.name,
            " × ".join(map(str, cost.shape)),
            _in_units("params", cost.params),
            _in_units("MACs", cost.macs),
            _in_units("activations", cost.activation_bytes),
        )
    Console().print(table)


def _in_units(heading: str, value: int) -> str:
    if heading == "params":
        return f"{value / 1e6:.2f}M"
    return f"{value / 1e9:.3f}G" if heading == "MACs" else f"{value / 2**20:.1f} MiB"
